"""Programs of ``tests/behaviour/test_after_the_main_thread.py``."""

from __future__ import annotations

import threading

from tests.programs.on_cpu import outcome, report


def after_the_main_thread(function):
    def work():
        threading.main_thread().join()
        report(outcome(function))

    threading.Thread(target=work).start()
