"""Threads that help: who calls what, what is raised, and what is kept."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from ortgpu.threads import Executor

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

    futures = [executor.submit(work) for _ in range(3)]
    assert len({future.result(SECONDS) for future in futures} - {threading.get_ident()}) == 3


def test_there_are_no_more_threads_than_are_allowed(executor: Executor) -> None:
    for count, there in ((2, 2), (2, 3), (7, 3)):
        for _ in range(count):
            executor.submit(int)
        assert len(executor.threads) == there


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_thread_that_waits_keeps_nothing_of_what_it_did(executor: Executor, fails: bool) -> None:
    class Argument:
        pass

    def function(_: Argument) -> None:
        if fails:
            raise ValueError

    gc.disable()
    try:
        argument = Argument()
        kept = weakref.ref(argument)
        future = executor.submit(function, argument)
        assert (future.exception(SECONDS) is not None) == fails
        del argument, future
        deadline = time.monotonic() + SECONDS
        while kept() is not None and time.monotonic() < deadline:  # the future is done before its thread lets go
            time.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()
