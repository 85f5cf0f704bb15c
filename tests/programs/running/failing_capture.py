"""Programs of ``tests/running/test_graph_capture.py``."""

from __future__ import annotations

import ctypes
import sys
import threading

from tests.programs.on_cpu import NEG, feeds, outcome, report
from tests.programs.with_graphs import Recorded, capturing, runtime, stub


class Failing(Recorded):
    # Fails while it captures, as a kernel that asks CUDA for memory does
    def run_with_iobinding(self, binding, options):
        stub.stub_begin_capture(ctypes.c_void_p(self.stream))
        raise RuntimeError(sys.argv[2])


session = capturing(NEG)
inner = session._sess._inner
session._sess._inner = Failing(inner, inner.stream)


def a_failed_capture_is_told_by_this_run_and_the_next() -> None:
    first = outcome(lambda: session.run(None, feeds(1)[0]))
    session._sess._inner = inner
    report(
        [
            first,
            outcome(lambda: session.run(None, feeds(1)[0])),
            stub.stub_device_bytes(),
            stub.stub_captures(),
            outcome(lambda: runtime.free(runtime.allocate(64))),
            stub.stub_last_error(),
        ]
    )


def a_capture_that_failed_in_another_thread_ends_the_replays() -> None:
    failing, session._sess._inner, outcomes = session._sess._inner, inner, []
    first = session.run(None, feeds(1)[0])[0].tolist()
    session._sess._inner = failing
    worker = threading.Thread(target=lambda: outcomes.append(outcome(lambda: session.run(None, feeds(1)[0]))))
    worker.start()
    worker.join(30)
    session._sess._inner = inner
    report([first, *outcomes, outcome(lambda: session.run(None, feeds(1)[0]))])


def what_else_fails_while_capturing_is_itself_and_ends_the_capture() -> None:
    feed = {"x": session.pinned_empty(70_000)}
    first = outcome(lambda: session.run(None, feed))
    session._sess._inner = inner
    again = outcome(lambda: session.run(None, feeds(2)[1])[0].tolist())
    report([first, again, stub.stub_captures()])
