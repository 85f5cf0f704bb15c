"""Interrupts of runs that are staged: what is raised, and that nothing is under way then. See staged_sessions.py."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.lab


def test_an_interrupt_anywhere_leaves_no_copy_under_way(staged_child: Any) -> None:
    """At each call of the code that copies, and at the end of each call that it makes of C: where the interpreter looks
    whether there was a signal. What was left to be made would be made in the memory of another run."""
    found = staged_child(
        "running.staging_interrupts.an_interrupt_anywhere_leaves_no_copy_under_way",
        deadline=120,
    )
    assert found == [[], True, [], [0, 0, 0]]


def test_what_a_handler_of_a_signal_raises_is_not_lost(staged_child: Any) -> None:
    """The time limit of a job, in the main thread: queues and test runners set one with SIGALRM."""
    found = staged_child("running.staging_interrupts.what_a_handler_of_a_signal_raises_is_not_lost")
    assert found == [["TimeLimit"] * 4, 0]


def test_an_interrupt_anywhere_costs_no_run_its_turn(staged_child: Any) -> None:
    """Two runs compute at a time. Were their turns lost, who comes next would wait for ever."""
    found = staged_child("running.staging_interrupts.an_interrupt_anywhere_costs_no_run_its_turn")
    assert found == [[-n for n in range(6)], True, True]
