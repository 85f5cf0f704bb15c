"""Programs of ``tests/running/test_graph_capture.py``."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from tests.programs.on_cpu import NEG, feeds, outcome, report
from tests.programs.with_graphs import Recorded, capturing, runtime, stub

modes = []


class Capturing(Recorded):
    # Captures as ONNX Runtime does, with something else at that moment
    meanwhile = staticmethod(lambda: None)

    def run_with_iobinding(self, binding, options):
        modes.append(stub.stub_capture_mode())
        runtime.synchronise(self.stream)
        if len(modes) == 1:
            stub.stub_begin_capture(ctypes.c_void_p(self.stream))
            worker = threading.Thread(target=self.meanwhile)
            worker.start()
            worker.join(30)
            runtime.end_capture(self.stream)
        self.inner.run_with_iobinding(binding, options)


session = capturing(NEG)
session._sess._inner = Capturing(session._sess._inner.inner, session._sess._inner.stream)


def what_other_threads_do_here_spoils_no_capture() -> None:
    from ortgpu.running.pinned import PinnedMemory

    memory, other, outcomes = PinnedMemory(runtime, 1 << 20), capturing(NEG), []
    captures = threading.Thread(target=lambda: other.run(None, feeds(1)[0]))
    captures.start()
    captures.join(30)
    dropped = [memory.empty(70_000, np.uint8)]

    def meanwhile():
        outcomes.append(outcome(lambda: runtime.is_pinned(memory.empty(1000).__array_interface__["data"][0])))
        outcomes.append(outcome(lambda: other.run(None, feeds(4)[3])[0].tolist()))
        outcomes.append(outcome(lambda: [runtime.pending([1, 2]), runtime.order(1, None)]))
        dropped.clear()
        memory.close()
        outcomes.append(stub.stub_capture_mode())

    Capturing.meanwhile = staticmethod(meanwhile)
    runs = [session.run(None, feed)[0].tolist() for feed in feeds(3)[1:]]
    of_graphs = session._pinned.bytes_in_use + other._pinned.bytes_in_use
    pinned = stub.stub_pinned_bytes() - of_graphs
    report([runs, outcomes, stub.stub_last_error(), memory.bytes_in_use, pinned])


def a_capture_is_strict_and_a_replay_is_not() -> None:
    before = runtime.exchange_capture_mode(1)
    runs = [session.run(None, feed)[0].tolist() for feed in feeds(3)[1:]]
    report([runs, modes, stub.stub_capture_mode(), before])
