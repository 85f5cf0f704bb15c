"""GPUSessionPool at work: who does which request, and whose failure it is."""

from __future__ import annotations

from tests.support.pool_child import child


def test_results_are_those_of_a_session_wherever_it_ran() -> None:
    found = child("session.pool.results_are_those_of_a_session_wherever_it_ran")
    assert found["sizes"] == [4, 4, 2, 0]
    assert (found["run"], found["named"]) == (3, 4)
    assert found["futures"] == list(range(20))
    assert found["map"] == list(range(200))
    assert sum(found["calls"]) == 222
    assert max(found["most"]) <= 2
    assert found["left"] == []


def test_a_request_goes_to_the_session_that_is_least_busy() -> None:
    found = child("session.pool.a_request_goes_to_the_session_that_is_least_busy")
    assert found["spread"] == [2, 2, 2]
    assert found["then"] == [2, 4, 2]
    assert found["values"] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_what_waits_is_bounded() -> None:
    found = child("session.pool.what_waits_is_bounded")
    assert found["values"] == list(range(300))
    assert found["most"] <= 6  # as many as there are threads


def test_what_waits_can_be_cancelled_and_what_runs_cannot() -> None:
    found = child("session.pool.what_waits_can_be_cancelled_and_what_runs_cannot")
    assert found["cancelled"] == [False, True]
    assert found["values"] == [0, 1, 2, 4]
    assert found["calls"] == 4


def test_what_a_request_raises_is_its_own() -> None:
    found = child("session.pool.what_a_request_raises_is_its_own")
    assert found["wrong input"]["type"] == "InvalidArgument"
    assert "type" in found["wrong name"]
    assert "type" in found["no feed"]
    assert found["memory"]["type"] == "GPUOutOfMemoryError"
    assert found["calls"] == 1  # not tried elsewhere
    assert found["after"] == [7, 2, 0]


def test_arrays_on_a_gpu_are_refused() -> None:
    """A pool chooses the GPU, and its threads do not know the stream in which an array is made."""
    found = child("session.pool.arrays_on_a_gpu_are_refused")
    for name in ("run", "submit", "map"):
        assert found[name]["type"] == "ProviderRequestError", found
        assert "input 'x' is on a GPU, and a pool chooses the GPU itself" in found[name]["text"]
    assert found["on the CPU"] == {"returned": 7.0}


def test_values_that_are_no_tensors_are_on_no_gpu() -> None:
    """A sequence that one model gave is for the next one: it has no device that could be asked for."""
    found = child("session.pool.values_that_are_no_tensors_are_on_no_gpu")
    assert found["run"] == {"returned": 2}
    assert found["map"] == {"returned": [2, 2]}
    assert found["wrong"]["type"] == "InvalidArgument"


def test_a_failure_that_nobody_looks_at_holds_no_arrays() -> None:
    found = child("session.pool.a_failure_that_nobody_looks_at_holds_no_arrays")
    assert found["held"] == [False, False]


def test_a_callback_may_submit_and_close() -> None:
    found = child("session.pool.a_callback_may_submit_and_close")
    assert found["values"] == list(range(21))
    assert found["closed"]["type"] == "ExecutionError"


def test_what_a_callback_raises_ends_no_thread() -> None:
    """Also what is no Exception: SystemExit, or that with which a test or a task of another library is ended."""
    found = child("session.pool.what_a_callback_raises_ends_no_thread")
    assert found["value"] == 7
    assert found["threads"] == [3, 3]
    assert set(found["logged"]) == {"SystemExit('enough')"}


def test_what_a_callback_raises_keeps_no_other_request_waiting() -> None:
    """A thread that has answered looks for more; here each of them raises instead, and nobody asks again."""
    found = child("session.pool.what_a_callback_raises_keeps_no_other_request_waiting")
    assert found["values"] == [*range(6)]


def test_everything_resolves_under_load() -> None:
    found = child("session.pool.everything_resolves_under_load")
    assert len(found["ended"]) == 800
    assert set(found["ended"]) <= {"right", "CancelledError", "GPUOutOfMemoryError"}
    assert found["idle"] == [0, 0, 0]
    assert found["left"] == []
