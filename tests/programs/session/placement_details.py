"""Programs of ``tests/session/test_placement_details.py``."""

from __future__ import annotations

import os
import signal

from tests.programs.on_cpu import NEG, outcome, report


def in_a_process_that_is_not_told_how_its_children_end() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    from ortgpu.session.placement_details import explain_placement

    del os.environ["ORTGPU_ALLOW_CPU"]  # the child is to fail
    report(outcome(lambda: explain_placement(NEG)))
