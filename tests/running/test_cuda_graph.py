"""What sessions that replay CUDA graphs give, keep and give back. See graph_sessions.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.graph_sessions import with_graphs


@pytest.fixture
def with_stub(stubs: Stubs) -> Any:
    return lambda code, *arguments: with_graphs(stubs, code, *arguments)


def test_results_are_those_of_run_and_each_shape_has_its_graph(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.results_are_those_of_run_and_each_shape_has_its_graph")
    assert found == [True, [1] * 4 + [2] * 4 + [1] * 4 + [3] * 4 + [2] * 4 + [1] * 8, [1, 2, 3]]


def test_every_type_that_can_be_captured(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.every_type_that_can_be_captured")
    assert set(found[0].values()) == {True}
    assert len(found[0]) == 12
    assert found[1] == 24


@pytest.mark.parametrize("slow", ["replay", "plain run"])
def test_later_runs_go_the_way_that_was_faster(with_stub: Any, slow: str) -> None:
    """Runs without a replay may allocate memory while another session captures, and the graph needs none any more."""
    found = with_stub(
        "running.timed_graphs.later_runs_go_the_way_that_was_faster",
        slow,
    )
    faster = "plain run" if slow == "replay" else "replay"
    tried = ["plain run", "replay", "replay", "plain run", "plain run", "replay"]
    assert found == [True, ["plain run", "replay", *tried, *[faster] * 5], True, 0, 32 if faster == "replay" else 0]


@pytest.mark.parametrize("slow", ["replay", "plain run"])
def test_requests_that_differ_every_second_time_do_not_decide_which_way_is_faster(with_stub: Any, slow: str) -> None:
    """All replays were timed with the output that takes long to copy, and all other runs without."""
    found = with_stub(
        "running.timed_graphs.requests_that_differ_every_second_time_do_not_decide_which_way_is_faster",
        slow,
    )
    assert found == ["plain run" if slow == "replay" else "replay"] * 5


def test_a_result_is_the_callers_own(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.a_result_is_the_callers_own")
    assert found == [[-1] * 4, [-2] * 4, [-1] * 4]


def test_inputs_with_gaps_and_of_other_kinds(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.inputs_with_gaps_and_of_other_kinds")
    assert found[0] == [[0, -2, -4, -6], [-6, -4, -2, 0], [0, -2, -4, -6], [-1, -2], [], [-1] * 4]
    assert found[1:] == [[1, 1, 1, 1, 1], [], -3]  # nothing is captured of what is no tensor, or has no elements


def test_wrong_feeds_stay_onnx_runtimes_own_exceptions(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.wrong_feeds_stay_onnx_runtimes_own_exceptions")
    captured, plain, after, device_bytes = found
    assert captured == plain
    assert all("type" in each for each in plain)
    assert after == [-1] * 4
    assert device_bytes == 32


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_generator_that_fills_one_array_again(with_stub: Any, size: int) -> None:
    found = with_stub(f"""
        session = capturing(NEG)
        plain = session._gpu_runner.graphs._run_captured
        def late(*arguments):
            time.sleep(0.004)
            return plain(*arguments)
        session._gpu_runner.graphs._run_captured = late
        def refilled():
            array = np.zeros({size}, np.float32)
            for number in range(20):
                array[:] = number
                yield {{"x": array}}
        report([[int(result[0][-1]) for result in session.map(refilled())], session._pinned.bytes_in_use])
    """)
    assert found[0] == [-number for number in range(20)]
    assert found[1] == (64 << 10 if size == 4 else 0)  # of the captured graph


@pytest.mark.parametrize("names", ["iter(['y'])", "'y'"])
def test_names_that_onnx_runtime_does_not_take(with_stub: Any, names: str) -> None:
    """An iterator left no name for the results, which were then none."""
    found = with_stub(f"""
session = capturing(NEG)
first, second = (outcome(lambda: [one.tolist() for one in session.run({names}, feeds(1)[0])]) for _ in range(2))
report([first["type"], second["type"], bound])
""")
    assert found == ["TypeError", "TypeError", []]


def test_the_longest_unused_shape_gives_its_buffers_back_and_numbers_are_not_used_again(with_stub: Any) -> None:
    found = with_stub(
        "running.cuda_graph.the_longest_unused_shape_gives_its_buffers_back_and_numbers_are_not_used_again"
    )
    full, after, again, highest, different, most, left = found
    assert full == sum(2 * 4 * size for size in range(1, most + 1))
    assert after == full + 2 * 4 * 100 - 2 * 4 * 2
    assert again == [-3, -3]
    assert highest == different == most + 2
    assert left == 0


def test_graphs_are_measured_and_stay_in_the_room_of_a_budget(with_stub: Any) -> None:
    """Shapes that have no room run without a graph, and do so in each thread."""
    found = with_stub("running.budgeted_graphs.graphs_are_measured_and_stay_in_the_room_of_a_budget")
    # The graph of 4 floats has 8 MiB, that of a mebifloat 16 with its buffers, that of 5 floats 8. In the 6 MiB left, a
    # graph of few floats would have room, but not in a further thread.
    assert found == [[True] * 9, [0, 3, 3, True], 3]


def test_dropped_it_gives_everything_back(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.dropped_it_gives_everything_back")
    # The C++ session, which the metadata keep, has the stream to its end.
    assert found == [[32, ["ortgpu-graph_0"]], [0, [], 1], 0]


def test_threads_get_their_own_results_and_two_threads_do_all_runs(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.threads_get_their_own_results_and_two_threads_do_all_runs")
    assert found == [[], ["MainThread", "ortgpu-graph_0"], True, [], 0]


def test_a_signal_handler_may_use_the_session_amid_a_run(with_stub: Any) -> None:
    """Its runs change no buffers of the run that it interrupts, and wait for nothing that this one holds."""
    found = with_stub("running.cuda_graph.a_signal_handler_may_use_the_session_amid_a_run")
    assert found == [[], "ExecutionError", []]


def test_a_map_goes_straight_to_the_thread_that_runs(with_stub: Any) -> None:
    """But for arrays that are staged, which other threads copy meanwhile."""
    found = with_stub("running.cuda_graph.a_map_goes_straight_to_the_thread_that_runs")
    assert found == [100, True, ["ortgpu-graph_0"], ["ortgpu-gra", "ortgpu-map"], "ExecutionError", [], 0]


def test_other_ways_to_run_are_refused(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.other_ways_to_run_are_refused")
    assert found[:2] == [{"returned": [-1] * 4}, []]
    assert [each["type"] for each in found[2:]] == ["ProviderRequestError"] * 6


def test_closed_it_says_so(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.closed_it_says_so")
    assert [each["type"] for each in found] == ["ExecutionError"] * 3


def test_a_map_that_is_collected_while_a_graph_is_replayed(with_stub: Any) -> None:
    """It waits for what is under way, which needs the lock of the replay."""
    found = with_stub("running.cuda_graph.a_map_that_is_collected_while_a_graph_is_replayed")
    assert found == [[-2] * 4, True]


def test_constructed_again_it_is_what_it_was_constructed_as(with_stub: Any) -> None:
    """By a class that unpickles itself, say: nothing is left of the session that it was."""
    found = with_stub("running.cuda_graph.constructed_again_it_is_what_it_was_constructed_as")
    assert found == [1, [[2] * 4, [-1] * 4], [2] * 3, [2] * 4, 1]


def test_the_callers_arrays_are_free_when_a_run_has_ended(with_stub: Any) -> None:
    """Copies from pinned memory go on after the call that begins them."""
    found = with_stub("running.cuda_graph.the_callers_arrays_are_free_when_a_run_has_ended")
    assert found[0] == []
    assert "CUBLAS failure 14" in found[1]
    assert found[2] == 0


def test_out_of_memory_is_told_as_such_and_the_session_works_on(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.out_of_memory_is_told_as_such_and_the_session_works_on")
    assert found[0]["type"] == "GPUOutOfMemoryError"
    assert found[1] == [-1] * 4


def test_a_run_that_was_out_of_memory_has_none_left_for_its_error(with_stub: Any) -> None:
    """Who runs a smaller batch in the ``except`` clause has the memory for it."""
    found = with_stub("running.cuda_graph.a_run_that_was_out_of_memory_has_none_left_for_its_error")
    assert found == [0, [-1] * 4]


def test_a_forked_child_frees_nothing(with_stub: Any) -> None:
    found = with_stub("running.cuda_graph.a_forked_child_frees_nothing")
    assert found == [["ForkedSessionError", 32], [-1] * 4]
