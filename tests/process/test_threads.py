"""Threads that help: who calls what, what is raised, and what is kept."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from ortgpu.process.threads import Executor, Outcome

SECONDS = 20  # until something that must come is given up


@pytest.fixture
def executor() -> Iterator[Executor]:
    with contextlib.closing(Executor(3, "ortgpu-test")) as executor:
        yield executor


def test_threads_call_it_at_the_same_time(executor: Executor) -> None:
    met = threading.Barrier(3)

    def work() -> int:
        met.wait(SECONDS)
        return threading.get_ident()

    outcomes: list[Outcome[int]] = [Outcome() for _ in range(3)]
    for outcome in outcomes:
        executor.submit(outcome, work)
    assert len({outcome.result() for outcome in outcomes} - {threading.get_ident()}) == 3


def test_there_are_no_more_threads_than_are_allowed(executor: Executor) -> None:
    for count, there in ((2, 2), (2, 3), (7, 3)):
        for _ in range(count):
            executor.submit(Outcome(), int)
        assert len(executor.threads) == there


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_thread_that_waits_keeps_nothing_of_what_it_did(executor: Executor, fails: bool) -> None:
    class Argument:
        pass

    def function(_: Argument) -> None:
        if fails:
            raise ValueError("of the call")

    gc.disable()
    try:
        argument = Argument()
        kept = weakref.ref(argument)
        outcome: Outcome[None] = Outcome()
        executor.submit(outcome, function, argument)
        with pytest.raises(ValueError, match="of the call") if fails else contextlib.nullcontext():
            outcome.result()
        del argument, outcome
        deadline = time.monotonic() + SECONDS
        while kept() is not None and time.monotonic() < deadline:  # the outcome is there before its thread lets go
            time.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()
