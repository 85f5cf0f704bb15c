"""Large arrays of ``run``: results, types and exceptions are those of plain ``run``. See staged_sessions.py."""

from __future__ import annotations

import signal
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.running.staging import StagedRunner
from tests.lab.installed import older_than
from tests.support.cpu_session import child
from tests.support.made_sessions import made_session
from tests.support.staged_sessions import STAGES

stages = pytest.mark.skipif(older_than(STAGES) is not None, reason=str(older_than(STAGES)))


def test_results_are_those_of_run(staged_child: Any) -> None:
    """Any types, shapes, orders of memory and settings; large and small inputs and outputs beside each other."""
    found = staged_child(
        "running.staging.results_are_those_of_run",
        deadline=110,
    )
    assert found == [True, True, 0]


def test_small_arrays_go_straight_through(staged_child: Any) -> None:
    found = staged_child("running.staging.small_arrays_go_straight_through")
    assert found == [[True], 1, 1]


def test_outputs_that_are_always_large_are_staged_whatever_the_inputs_are(staged_child: Any) -> None:
    found = staged_child("running.staging.outputs_that_are_always_large_are_staged_whatever_the_inputs_are")
    assert found == [[True], True]


def test_outputs_of_unknown_size_are_staged_once_they_were_seen_to_be_large(staged_child: Any) -> None:
    """They are for inputs as large as those that had large outputs: a smaller batch is run as before."""
    found = staged_child("running.staging.outputs_of_unknown_size_are_staged_once_they_were_seen_to_be_large")
    plain, is_staged = [True], [True, True]
    assert found == [plain, plain, plain, plain, is_staged, is_staged, plain, is_staged, plain, is_staged]


def test_a_run_for_a_small_output_says_nothing_of_the_others(staged_child: Any) -> None:
    """An encoder was asked for its small output first, and no run for the large one was ever staged."""
    found = staged_child("running.staging.a_run_for_a_small_output_says_nothing_of_the_others")
    assert found == [[[5]], [[5]], [[500]], [[500], True], [[5, 500], True]]


def test_threads_copy_smaller_arrays_beside_a_large_one_too(staged_child: Any) -> None:
    found = staged_child("running.staging.threads_copy_smaller_arrays_beside_a_large_one_too")
    assert found == [True, [2, 8, 4] * 2, [True] * 2]


def test_wrong_calls_raise_what_run_raises(staged_child: Any) -> None:
    found = staged_child("running.staging.wrong_calls_raise_what_run_raises")
    staged, plain, *after = found
    assert staged == plain
    assert all("type" in each for each in plain)
    assert after == [-1, 0, True]


def test_a_failing_model_raises_what_run_raises(staged_child: Any) -> None:
    found = staged_child("running.staging.a_failing_model_raises_what_run_raises")
    assert found[0] == found[1]
    assert found[0]["type"] == "InvalidArgument"
    assert found[2] == [False]


def test_other_values_in_a_feed(staged_child: Any) -> None:
    found = staged_child("running.staging.other_values_in_a_feed")
    assert found[0] == [[4, 4], [3, 3], [4, 4], [4, 4], [4, 4]]
    # What is not NumPy's is left to run; only the second has a size.
    assert found[1:] == [4, [False, True, True]]


def test_an_array_that_copies_in_its_own_way_is_taken_as_it_is(staged_child: Any) -> None:
    found = staged_child("running.staging.an_array_that_copies_in_its_own_way_is_taken_as_it_is")
    assert found == [[True, True], [True, True]]


def test_outputs_and_inputs_that_are_on_the_cpu_stay_there(staged_child: Any) -> None:
    """On a GPU some are, beside others that are not; told here by a session that says so of its own."""
    found = staged_child("running.staging.outputs_and_inputs_that_are_on_the_cpu_stay_there")
    assert found == [[{"x": True, "z": False}, {"y": True, "s": False}], [True, True], [True, True]]


@stages
def test_what_a_signal_handler_raises_in_a_staged_run_reaches_the_caller() -> None:
    """The time limit of a request, for instance. Any other error is left to plain run."""

    class TimeLimitError(Exception):
        pass

    def handler(*_: object) -> None:
        raise TimeLimitError

    def run(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("CUDA")

    session = made_session()
    runner = StagedRunner(session)
    made: Any = SimpleNamespace(run=run)
    runner._runs = made
    assert runner._run_staged(session, None, {}) is None
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(TimeLimitError):
            runner._run_staged(session, None, {})
    finally:
        signal.signal(signal.SIGINT, before)


def test_which_sessions_stage() -> None:
    found = child("running.staged_or_not.which_sessions_stage")
    assert found == [True, True, True, False, False, False, False, False, False, "PlainRunner", False, False, False]


TRACER = """
import functools
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, Session
seen, plain = [], InferenceSession.run

@functools.wraps(plain)
def traced(self, *given):
    seen.append(given[0])
    return plain(self, *given)
"""


@stages
@pytest.mark.parametrize("bases", ["GPUSession, Logged", "GPUSession"])
def test_nothing_is_staged_where_a_class_in_between_has_a_run(bases: str) -> None:
    found = child(
        TRACER
        + textwrap.dedent(f"""
        from ortgpu.running.onnxruntimes import onnxruntimes_run
        class Logged(InferenceSession):
            def run(self, *given):
                return super().run(*given)
        class Session({bases}):
            pass
        report(onnxruntimes_run(Session(NEG)) is None)
    """)
    )
    assert found == ("Logged" in bases)


@stages
@pytest.mark.parametrize("where", ["InferenceSession", "Session"])
def test_nothing_is_staged_where_a_tracer_was_first(where: str) -> None:
    found = child(
        TRACER
        + textwrap.dedent(f"""
        import dataclasses
        from ortgpu.running import staging
        session = GPUSession(NEG)
        session.device = dataclasses.replace(session.device, kind="cuda")
        session._provider_options = {{"CUDAExecutionProvider": {{}}, "CPUExecutionProvider": {{}}}}
        stages = [staging.may_stage(session)]
        {where}.run = traced
        report([*stages, staging.may_stage(session)])
    """)
    )
    assert found == [True, False]


def test_a_generator_that_fills_one_array_again(staged_child: Any) -> None:
    """Its copies are pinned: none is staged once more."""
    found = staged_child("running.staging.a_generator_that_fills_one_array_again")
    assert found == [True, True, 30, True, 0]
