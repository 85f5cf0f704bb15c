"""What happens while a graph is captured: failures, other threads, the end of other graphs. See graph_sessions.py."""

from __future__ import annotations

import pytest

from tests.lab.stubs import Stubs
from tests.support.graph_sessions import with_graphs

pytestmark = pytest.mark.lab


def test_a_failed_capture_is_told_by_this_run_and_the_next(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        "running.failing_capture.a_failed_capture_is_told_by_this_run_and_the_next",
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
        "running.failing_capture.a_capture_that_failed_in_another_thread_ends_the_replays",
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
        "running.failing_capture.what_else_fails_while_capturing_is_itself_and_ends_the_capture",
        text,
    )
    assert text in found[0]["text"]
    assert ("could not be captured" in found[0]["text"]) is is_of_the_capture
    assert found[1] == (found[0] if is_of_the_capture else {"returned": [-1] * 4})
    assert found[2] == 0


def test_what_other_threads_do_here_spoils_no_capture(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        "running.capturing.what_other_threads_do_here_spoils_no_capture",
    )
    runs, outcomes, *after = found
    assert runs == [[-1] * 4, [-2] * 4]
    assert outcomes == [{"returned": True}, {"returned": [-3] * 4}, {"returned": [[], None]}, 0]
    assert after == [0, 0, 0]


def test_a_capture_is_strict_and_a_replay_is_not(stubs: Stubs) -> None:
    """What an operator does beside the stream must fail while it is captured: replays would leave it out."""
    found = with_graphs(
        stubs,
        "running.capturing.a_capture_is_strict_and_a_replay_is_not",
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
        "running.graph_capture.no_more_than_so_many_shapes_are_ever_captured",
    )
    assert found[:3] == [True, True, 1]  # the shape that was captured last is replayed, the first is run
    assert len(found[3]) == 1
    assert "without a CUDA graph" in found[3][0]
