"""The service behind pools and joined requests: complete requests, foreign exceptions, ends, and its size."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import child_environment, run_child
from tests.support.fork_server import fork_python

linux = pytest.mark.skipif(sys.platform != "linux", reason="isolate=True works on Linux only")


# About signals, descriptors, the main module, or the end of a process: see tests/support/fork_server.py
FRESH = (
    "ended_threads", "hung_at_exit", "interrupted", "limits", "no_standard_input", "options_that_stay",
    "sigpipe_at_default",
)  # fmt: skip


def program(name: str, *arguments: str, deadline: float = 100, before: tuple[str, ...] = ()) -> dict[str, Any]:
    command, env = ["-m", "tests.programs.services", name, *arguments], child_environment({"CUDA_VISIBLE_DEVICES": ""})
    if name not in FRESH:
        return dict(fork_python(command, env=env, deadline=deadline).ok().reports)
    return dict(run_child([*before, sys.executable, *command], env=env, deadline=deadline).ok().reports)


def test_a_request_enters_few_functions() -> None:
    found = program("functions_entered")
    assert found["pool.run"] <= 32
    assert found["pool.batched().submit"] <= 45
    assert found["batched().submit"] <= 35


@linux
def test_a_request_is_complete_at_the_call() -> None:
    assert set(program("names_reused")["wrong"].values()) == {0}
    assert set(program("arrays_reused").values()) == {True}


@linux
def test_what_cannot_travel_to_a_worker_process_is_refused() -> None:
    found = program("options_that_stay")
    assert found["object"] == "ProviderRequestError"
    assert found["number"] == found["of main"] == "TypeError"
    assert found["function True"] == found["function False"] == [[3, 4], 1.0]


@linux
def test_a_successor_serves_the_model_that_the_pool_opened() -> None:
    assert program("replaced_file") == {"one file": [[2.0], [2.0]], "weights beside it": [[2.0], [2.0]]}


@linux
def test_a_request_that_ends_its_worker_while_it_is_read_is_given_up_after_two() -> None:
    found = program("deadly_feed")
    assert found["bomb"] == "WorkerLostError"
    assert found["others"] == [0, 1, 2, 3, 4]
    assert found["restarts"] == 2


@linux
def test_no_exception_of_the_program_ends_a_thread_that_serves() -> None:
    found = program("log_filters")
    assert found == {"isolated": 7, "threads": [7, "ready"]}


@linux
def test_a_worker_that_is_given_up_while_others_open_is_out() -> None:
    found = program("lost_while_others_open")
    assert found["opened"] == [1, ["lost", "ready"]]
    assert found["over"] == ["ExecutionError", 1]


@linux
@pytest.mark.parametrize("end", ["close", "exit"])
def test_drain_then_close_returns_though_a_worker_is_stopped(end: str) -> None:
    started = time.monotonic()
    found = program("stopped_worker", end)
    assert time.monotonic() - started < 60
    assert (found["since"], found["drain"]) == (True, "TimeoutError")
    if end == "close":
        assert found["future"] in ("WorkerLostError", "ExecutionError")  # the process may have begun to read it
        assert found["left"] == []
        assert found["seconds"] < 20


@linux
def test_close_has_a_limit() -> None:
    found = program("long_run")
    assert found["isolated"] == [True, "WorkerLostError"]
    assert found["threads"] == "TimeoutError"
    assert found["deadline"] == found["first deadline alone"] == "WorkerLostError"
    assert (found["no number"], found["goes on"]) == (["TypeError", "TypeError"], 3)
    assert found["result"] == 1


@linux
@pytest.mark.parametrize("isolate", ["", "isolate"])
def test_the_end_of_the_interpreter_waits_for_a_limited_time(isolate: str) -> None:
    started = time.monotonic()
    found = program("hung_at_exit", isolate)
    assert time.monotonic() - started < 60  # it would wait for ever
    assert not Path(f"/proc/{found['pid']}").exists()


@linux
def test_an_interrupt_amid_a_run_changes_no_later_result() -> None:
    assert program("interrupted") == {"threads": [0, 0], "isolated": [0, 0]}


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGUSR1")
def test_a_handler_amid_a_turn_waits_for_no_thread_that_needs_the_turn() -> None:
    assert program("asked_amid_a_turn")["answers"] == [3, 2] * 4


def test_a_handler_with_the_next_turn_waits_for_no_thread_that_needs_it() -> None:
    assert program("asked_with_the_next_turn")["answers"] == [3] * 5 + [2]


def test_health_tells_of_a_thread_that_has_ended() -> None:
    found = program("ended_threads")
    assert found == {"state": "impaired", "others": [0, 1, 2, 3, 4], "closed": "closed"}


def test_requests_of_many_shapes_take_the_memory_of_their_own_items() -> None:
    assert program("shapes")["megabytes"] < 100


@linux
def test_a_program_without_standard_input_has_pools_of_models_as_bytes() -> None:
    found = program("no_standard_input", before=("/bin/sh", "-c", 'exec "$0" "$@" <&-'))
    assert found["value"] == 3


@linux
def test_a_program_with_sigpipe_at_its_default_outlives_its_workers() -> None:
    assert program("sigpipe_at_default")["survived"] is True


@linux
def test_limits_and_odd_arguments_end_in_typed_errors() -> None:
    found = program("limits")
    assert set(found["descriptors"]) <= {"ExecutionError", "3.0"}
    assert found["descriptors"][0] == "ExecutionError"
    assert found["file size"] == "ExecutionError"
    assert found["empty model"] not in ("ValueError", "OSError", "TypeError")
    assert found["deadline"] == ["ValueError", "3.0", "3.0", "3.0"]
    assert found["first deadline"] == found["iterator"] == "3.0"
    assert found["left"] == [0, 0]
