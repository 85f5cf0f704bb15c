"""What sessions with CUDA graphs copy through pinned memory, and which runs are replays. See graph_sessions.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.graph_sessions import with_graphs

pytestmark = pytest.mark.lab


@pytest.fixture
def with_stub(stubs: Stubs) -> Any:
    return lambda program, *arguments: with_graphs(stubs, program, *arguments, behind="running.graph_buffers")


@pytest.mark.parametrize("limit", [0, 1 << 16, 1 << 24])
def test_small_and_large_arrays_in_one_graph(with_stub: Any, limit: int) -> None:
    found = with_stub("running.graph_buffers.small_and_large_arrays_in_one_graph", str(limit))
    # Blocks of 64 KiB: of the third graph the two inputs and two of the outputs take four each. Runs of the last graph
    # use 4 MiB for "x", 2 for "w" and 4 for "y", and "y" may be wanted twice.
    pinned = {0: 0, 1 << 16: 1 << 16, 1 << 24: (1 + 1 + 17 + 1 + 1 + 1 + 3 * 64 + 32) << 16}[limit]
    assert found == [144, True, limit == 1 << 24, pinned, 0, 0]


@pytest.mark.parametrize(("size", "limit"), [("LARGE", 20), ("HUGE", 24)])
def test_the_memory_of_a_large_result_is_used_again_once_the_caller_has_dropped_it(
    with_stub: Any, size: str, limit: int
) -> None:
    found = with_stub(
        "running.graph_buffers.the_memory_of_a_large_result_is_used_again_once_the_caller_has_dropped_it",
        size,
        str(limit),
    )
    assert found == [True, False, True, True]


def test_what_is_computed_on_the_cpu_is_the_callers_own_too(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.what_is_computed_on_the_cpu_is_the_callers_own_too")
    assert found == [[True] * 4, 2 * 4 * (6 + 5)]


def test_small_arrays_of_all_graphs_are_given_back_with_their_graphs(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.small_arrays_of_all_graphs_are_given_back_with_their_graphs")
    assert found == [[16 << 16, 16 << 16], 0]


def test_results_are_not_overwritten_by_later_runs_of_any_thread(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.results_are_not_overwritten_by_later_runs_of_any_thread")
    assert found == [[], 200, 0]


def test_which_runs_are_replayed_at_once(with_stub: Any) -> None:
    found = with_stub("running.replays.which_runs_are_replayed_at_once")
    assert found == [*["replay"] * 3, "run", *["no replay"] * 5, "replay", "no replay", "replay"]


def test_a_tracer_sees_each_run_of_a_session_that_is_captured_after_it_came(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.a_tracer_sees_each_run_of_a_session_that_is_captured_after_it_came")
    assert found == [3, [[-2] * 4] * 2, 9]


CALLS = ["cudaSetDevice", "cudaMemcpyAsync", "cudaStreamSynchronize"]
CALLS_FOR_THREADS = [*CALLS, "cudaEventRecord", "cudaEventQuery"]


@pytest.mark.parametrize(
    ("function", "size"), [*((call, "5") for call in CALLS), *((call, "HUGE") for call in CALLS_FOR_THREADS)]
)
def test_a_call_that_fails_while_a_graph_is_replayed_is_told_and_the_session_works_on(
    with_stub: Any, function: str, size: str
) -> None:
    found = with_stub(f"""
        session, failed = capturing(PAIR), []
        right(session, 1, 3, {size})
        before = runtime.exchange_capture_mode(1)
        for late in (1, 2, 3):
            stub.stub_fail(0)
            os.environ["STUB_CUDART_FAIL"] = f"{function}=999@{{late}}"
            failed.append(outcome(lambda: right(session, 2, 3, {size})))
            del os.environ["STUB_CUDART_FAIL"]
            failed.append([right(session, 3, 3, {size}), stub.stub_late_copies()])
        left = stub.stub_capture_mode(), stub.stub_last_error()
        session.close()
        report([failed, *left, stub.stub_pinned_bytes() + stub.stub_device_bytes() + stub.stub_events()])
    """)
    outcomes, mode, last_error, left = found
    told = outcomes[::2]
    assert outcomes[1::2] == [[True, 0]] * 3
    assert f"CUDA failure 999: stub error ; GPU=0 ; expr={function}" in told[0]["text"]
    assert all(each == {"returned": True} or each["text"] == told[0]["text"] for each in told)
    assert (mode, last_error, left) == (1, 0, 0)


def test_large_arrays_in_any_order_of_memory_and_pinned_ones(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.large_arrays_in_any_order_of_memory_and_pinned_ones")
    # 16 results, and the four inputs that are contiguous and not pinned
    assert found == [True, 16, 20, True, 0]


def test_where_no_thread_can_be_started_one_copies(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.where_no_thread_can_be_started_one_copies")
    assert found == [[True] * 3, "_OneThread"]


def test_threads_that_copy_end_with_the_session(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.threads_that_copy_end_with_the_session")
    assert found == [True, True, 1, 1, 0, 0]


def test_out_of_pinned_memory_the_copies_are_the_ordinary_ones(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.out_of_pinned_memory_the_copies_are_the_ordinary_ones")
    assert found == [True, 1 << 16, 0]


def test_a_session_that_refuses_replays_nothing(with_stub: Any) -> None:
    found = with_stub("running.graph_buffers.a_session_that_refuses_replays_nothing")
    assert found == ["PoisonedContextError", 1]
