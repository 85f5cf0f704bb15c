"""What happens while a graph is captured: failures, other threads, the end of other graphs. See graph_sessions.py."""

from __future__ import annotations

import textwrap

import pytest

from tests.lab.stubs import Stubs
from tests.support.graph_sessions import with_graphs

pytestmark = pytest.mark.lab

FAILING = """
class Failing(Recorded):
    # Fails while it captures, as a kernel that asks CUDA for memory does
    def run_with_iobinding(self, binding, options):
        stub.stub_begin_capture(ctypes.c_void_p(self.stream))
        raise RuntimeError(sys.argv[2])
import ctypes
session = capturing(NEG)
inner = session._sess._inner
session._sess._inner = Failing(inner, inner.stream)
"""


def test_a_failed_capture_is_told_by_this_run_and_the_next(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        FAILING
        + textwrap.dedent("""
        first = outcome(lambda: session.run(None, feeds(1)[0]))
        session._sess._inner = inner
        report([first, outcome(lambda: session.run(None, feeds(1)[0])), stub.stub_device_bytes(), stub.stub_captures(),
                outcome(lambda: runtime.free(runtime.allocate(64))), stub.stub_last_error()])
        """),
        "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0",
    )
    first, second, *after = found
    assert first == second
    assert first["type"] == "ProviderRequestError"
    assert "CUDA failure 900" in first["text"]
    assert "output shapes that depend on data" in first["text"]
    assert after == [0, 0, {"returned": None}, 0]  # an open capture would keep all threads from memory


def test_a_capture_that_failed_in_another_thread_ends_the_replays(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        FAILING
        + textwrap.dedent("""
        failing, session._sess._inner, outcomes = session._sess._inner, inner, []
        first = session.run(None, feeds(1)[0])[0].tolist()
        session._sess._inner = failing
        worker = threading.Thread(target=lambda: outcomes.append(outcome(lambda: session.run(None, feeds(1)[0]))))
        worker.start()
        worker.join(30)
        session._sess._inner = inner
        report([first, *outcomes, outcome(lambda: session.run(None, feeds(1)[0]))])
        """),
        "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0",
    )
    assert found[0] == [0] * 4
    assert found[1] == found[2]
    assert found[1]["type"] == "ProviderRequestError"


@pytest.mark.parametrize(
    ("text", "is_of_the_capture"),
    [
        ("CUDA failure 908: attempt to terminate a capture from another thread", True),
        ("Graph capture did not complete after 3 runs", True),
        ("CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR", False),
        ("CUDA failure 909: wait operation timed out", False),  # cudaErrorTimeout
    ],
)
def test_what_else_fails_while_capturing_is_itself_and_ends_the_capture(
    stubs: Stubs, text: str, is_of_the_capture: bool
) -> None:
    found = with_graphs(
        stubs,
        FAILING
        + textwrap.dedent("""
        feed = {"x": session.pinned_empty(70_000)}
        first = outcome(lambda: session.run(None, feed))
        session._sess._inner = inner
        again = outcome(lambda: session.run(None, feeds(2)[1])[0].tolist())
        report([first, again, stub.stub_captures()])
        """),
        text,
    )
    assert text in found[0]["text"]
    assert ("could not be captured" in found[0]["text"]) is is_of_the_capture
    assert found[1] == (found[0] if is_of_the_capture else {"returned": [-1] * 4})
    assert found[2] == 0


CAPTURING = """
import ctypes
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
"""


def test_what_other_threads_do_here_spoils_no_capture(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        CAPTURING
        + textwrap.dedent("""
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
        """),
    )
    runs, outcomes, *after = found
    assert runs == [[-1] * 4, [-2] * 4]
    assert outcomes == [{"returned": True}, {"returned": [-3] * 4}, {"returned": [[], None]}, 0]
    assert after == [0, 0, 0]


def test_a_capture_is_strict_and_a_replay_is_not(stubs: Stubs) -> None:
    """What an operator does beside the stream must fail while it is captured: replays would leave it out."""
    found = with_graphs(
        stubs,
        CAPTURING
        + textwrap.dedent("""
        before = runtime.exchange_capture_mode(1)
        runs = [session.run(None, feed)[0].tolist() for feed in feeds(3)[1:]]
        report([runs, modes, stub.stub_capture_mode(), before])
        """),
    )
    assert found == [[[-1] * 4, [-2] * 4], [0, 2], 1, 0]


@pytest.mark.parametrize("end", ["session.close()", "del session", "session.close(); del session"])
def test_graphs_are_destroyed_whatever_is_captured_at_that_moment(stubs: Stubs, end: str) -> None:
    found = with_graphs(
        stubs,
        f"""
        import weakref
        modes, session = [], capturing(NEG)
        weakref.finalize(session._sess._inner.inner, lambda: modes.append(stub.stub_capture_mode()))
        session.run(None, feeds(1)[0])
        {end}
        gc.collect()
        report([modes, stub.stub_capture_mode(), stub.stub_device_bytes(), stub.stub_streams()])
    """,
    )
    assert found == [[2], 0, 0, 0]


def test_no_more_than_so_many_shapes_are_ever_captured(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        """
        session = capturing(NEG)
        warned = []
        logging.getLogger("ortgpu").addFilter(lambda record: warned.append(record.getMessage()))
        right = [session.run(None, feeds(2, size)[1])[0].tolist() == [-1] * size for size in range(1, 2 * MAX_CAPTURES)]
        right += [session.run(None, feeds(3, size)[2])[0].tolist() == [-2] * size for size in (1, MAX_CAPTURES)]
        report([all(right), sorted(set(bound)) == list(range(1, MAX_CAPTURES + 1)), len(bound) - MAX_CAPTURES, warned])
    """,
    )
    assert found[:3] == [True, True, 1]  # the shape that was captured last is replayed, the first is run
    assert len(found[3]) == 1
    assert "without a CUDA graph" in found[3][0]
