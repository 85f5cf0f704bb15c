"""Interrupts: what a handler of a signal raises, at any moment, leaves no lock held and no thread waiting for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.support.cpu_session import fresh_child as child
from tests.support.pool_child import fresh_child as pool_child

pytestmark = pytest.mark.lab

MANY, SOME = 10_000, 200
DEADLINE = 7200  # seconds, of many
PROGRAM = "process.interrupt_fuzz.run"


def check(found: dict[str, Any], count: int) -> None:
    assert found["raised"] >= count
    assert len(found["steps"]) == 11
    assert found["locks"] >= 8
    assert found["held"] == 0
    assert found["odd"] == []
    assert set(found["left"]) == {0}
    assert found["turns"] in (None, 2)
    # One that waits for the lock of a future, which an interrupt of Future.result left held: submit says so.
    assert set(found["alive"]) <= {"ortgpu-future"}
    assert found["sessions"] == 0


def on_the_stub_machine(lab: Lab, provider_library: str, count: int) -> dict[str, Any]:
    machine = lab.machine_that_places(provider_library)
    found: dict[str, Any] = machine.run_program(PROGRAM, str(count), "1", timeout=DEADLINE).ok().json
    return found


def test_some_interrupts() -> None:
    check(child(PROGRAM, str(SOME), "1", deadline=100), SOME)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE)
def test_many_interrupts() -> None:
    check(child(PROGRAM, str(MANY), "2", deadline=DEADLINE), MANY)


def test_some_interrupts_of_sessions_on_a_gpu_that_computes_nothing(lab: Lab, provider_library: str) -> None:
    check(on_the_stub_machine(lab, provider_library, SOME), SOME)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE)
def test_many_interrupts_of_sessions_on_a_gpu_that_computes_nothing(lab: Lab, provider_library: str) -> None:
    check(on_the_stub_machine(lab, provider_library, MANY), MANY)


def test_a_future_whose_lock_an_interrupt_left_held_stops_nobody_else() -> None:
    """``Future.result`` enters its lock in Python. Taken and not given back is what such an interrupt leaves."""
    found = pool_child("process.futures_after_interrupts.a_future_whose_lock_an_interrupt_left_held_stops_nobody_else")
    assert found["others"] == [7, *range(10), 8]
    assert found["again"] == [0, 1, 2, 3, 4]  # the thread that holds it may ask again
    assert found["left"] == []


def test_a_lock_is_free_in_a_forked_child_whoever_held_it() -> None:
    found = child("process.locks_after_interrupts.a_lock_is_free_in_a_forked_child_whoever_held_it")
    assert found == [7, "_thread"]


def test_a_forked_child_computes_what_a_thread_of_its_parent_was_computing() -> None:
    found = child("process.locks_after_interrupts.a_forked_child_computes_what_a_thread_of_its_parent_was_computing")
    assert found == [42, 42]
