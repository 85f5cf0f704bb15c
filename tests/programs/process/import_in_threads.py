"""Programs of ``tests/process/test_import_in_threads.py``."""

from __future__ import annotations

import sys
import threading

import ortgpu
from tests.programs.on_cpu import outcome, report


def program() -> None:
    import importlib

    outcomes = []
    other = threading.Thread(
        target=lambda: outcomes.append(outcome(lambda: importlib.import_module(sys.argv[1]).__name__))
    )

    class Pausing:
        # In the middle of the package's code, until the other thread waits for it
        @staticmethod
        def find_spec(name, path, target=None):
            if name == "ortgpu.diagnosis.facts" and other.ident is None:
                other.start()
                other.join(1)

    sys.meta_path.insert(0, Pausing)
    outcomes.append(outcome(lambda: importlib.import_module("ortgpu.diagnosis.diagnosing").__name__))
    other.join()
    report(sorted(each.get("returned", str(each)) for each in outcomes))


def a_guard_that_ends_takes_no_module_from_another_thread() -> None:
    import importlib

    sys.path.insert(0, sys.argv[1])
    reached, goes_on = threading.Event(), threading.Event()

    class Pausing:
        @staticmethod
        def find_spec(name, path, target=None):
            if name == "wanted":
                reached.set()
                goes_on.wait(30)

    ortgpu.install()
    sys.meta_path.insert(-1, Pausing)  # before the finder of files
    outcomes = []
    wanted = lambda: importlib.import_module("wanted").__name__
    other = threading.Thread(target=lambda: outcomes.append(outcome(wanted)))
    other.start()
    reached.wait(30)
    ortgpu.uninstall()
    goes_on.set()
    other.join()
    report(outcomes)
