"""Runs that go to C++ at once: which ones do, and that nobody can tell by results, types or exceptions. On the CPU."""

from __future__ import annotations

from typing import Any

from tests.support.cpu_session import child


def direct_child(code: str) -> Any:
    return child(code, behind="running.plain_runs")


def test_which_runs_are_direct() -> None:
    found = direct_child("running.plain_runs.which_runs_are_direct")
    assert found == {
        "an array": True, "with names": True, "a view": True, "run options": False, "a list": False,
        "a subclass": False, "an OrtValue": False, "another dict": False,
    }  # fmt: skip


def test_outcomes_are_those_of_plain_run() -> None:
    """Of right and of wrong feeds and names, with an input that has a value of its own and one that is optional."""
    found = direct_child("running.plain_runs.outcomes_are_those_of_plain_run")
    assert found == [[], True]


def test_a_tracer_sees_each_run_of_a_session_that_is_opened_after_it_came() -> None:
    found = direct_child("running.plain_runs.a_tracer_sees_each_run_of_a_session_that_is_opened_after_it_came")
    assert found == [[True, True, False], False, 1]


def test_a_class_in_between_sees_each_run() -> None:
    """One that InferenceSession is the base of, and that comes after GPUSession: as of its other methods."""
    found = direct_child("running.plain_runs.a_class_in_between_sees_each_run")
    assert found == [[[-2] * 4] * 2, [3, 2]]


def test_a_run_that_does_something_new_is_called() -> None:
    """As a later release may: what it does there has to be read first."""
    found = direct_child("running.plain_runs.a_run_that_does_something_new_is_called")
    assert found == [[-1, -1, -1, -1], True]


def test_a_closed_session_refuses() -> None:
    found = direct_child("running.plain_runs.a_closed_session_refuses")
    assert found == [True, "ExecutionError"]


def test_names_that_are_not_utf_8_leave_the_session_be() -> None:
    found = direct_child("running.plain_runs.names_that_are_not_utf_8_leave_the_session_be")
    assert found == "GPUSession"
