"""Programs of ``tests/running/test_cuda_graph.py``."""

from __future__ import annotations

import sys
import types

from ortgpu.running import cuda_graph
from tests.programs.on_cpu import NEG, feeds, model, report
from tests.programs.with_graphs import Recorded, capturing, stub

cuda_graph.TRIALS = 3
now = 0.0
cuda_graph.time = types.SimpleNamespace(perf_counter=lambda: now)  # type: ignore[attr-defined]  # its name in there


def takes(seconds):
    global now
    now += seconds


class Slow(Recorded):
    def run(self, *arguments):
        ways.append("plain run")
        modes.append(stub.stub_capture_mode())
        takes(0.01 * (sys.argv[2] == "plain run"))
        return self.inner.run(*arguments)

    def run_with_iobinding(self, *arguments):
        ways.append("replay")
        takes(0.01 * (sys.argv[2] == "replay"))
        return super().run_with_iobinding(*arguments)


ways, modes = [], []


def timed(model):
    session = capturing(model)
    inner = session._sess._inner
    session._sess._inner = Slow(inner.inner, inner.stream)
    return session


def later_runs_go_the_way_that_was_faster() -> None:
    session = timed(NEG)
    right = [session.run(None, feed)[0].tolist() == [-number] * 4 for number, feed in enumerate(feeds(12))]
    relaxed = set(modes) == {cuda_graph.CAPTURE_MODE_RELAXED}  # type: ignore[attr-defined]  # its name in there
    report([all(right), ways, relaxed, stub.stub_capture_mode(), stub.stub_device_bytes()])


def requests_that_differ_every_second_time_do_not_decide_which_way_is_faster() -> None:
    both = model("both (float[n] x) => (float[n] small, float[n] large) { small = Neg(x) large = Neg(x) }")
    session = timed(both)
    for way, names in (("_run_without", 0), ("_run_captured", 2)):

        def copying(*arguments, plain=getattr(session._sess, way), names=names):
            takes(0.03 * (arguments[names] == ["large"]))
            return plain(*arguments)

        setattr(session._sess, way, copying)
    for number in range(12):
        session.run(["small", "large"][number % 2 :][:1], feeds(1)[0])
    report(ways[-5:])
