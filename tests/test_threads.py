"""Threads that help: who calls what, what is raised, and what is kept."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from ortgpu.threads import Executor, _Others

SECONDS = 20  # until something that must come is given up


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor(3, "ortgpu-test") as executor:
        yield executor


def test_threads_call_it_at_the_same_time(executor: Executor) -> None:
    met = threading.Barrier(4)
    seen: list[int] = []

    def work() -> None:
        met.wait(SECONDS)
        seen.append(threading.get_ident())

    executor.together(work, 3, work)
    assert len(set(seen)) == 4
    assert threading.get_ident() in seen


def test_nobody_waits_for_a_thread_that_does_something_else(executor: Executor) -> None:
    gone = threading.Event()
    others = [executor.submit(gone.wait, SECONDS) for _ in range(3)]
    called: list[int] = []

    def work() -> None:
        called.append(threading.get_ident())

    executor.together(work, 3, work)
    assert called == [threading.get_ident()]
    gone.set()
    assert all(other.result(SECONDS) for other in others)
    executor.close()
    assert called == [threading.get_ident()]  # whoever comes late finds nothing to do


def test_there_are_no_more_threads_than_are_allowed(executor: Executor) -> None:
    for count, there in ((2, 2), (2, 3), (7, 3)):
        executor.together(lambda: None, count, lambda: None)
        assert len(executor.threads) == there


def test_those_that_are_there_help_where_the_system_gives_no_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with Executor(8, "ortgpu-test") as executor:
        executor.together(lambda: None, 2, lambda: None)
        threads = list(executor.threads)
        tried: list[threading.Thread] = []

        def refuse(thread: threading.Thread) -> None:
            tried.append(thread)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        met = threading.Barrier(3)
        executor.together(lambda: met.wait(SECONDS), 7, lambda: met.wait(SECONDS))
        monkeypatch.undo()
        assert executor.threads == threads
        assert len(threads) == 2
        assert len(tried) == 1  # not once for each that is missing


@pytest.mark.parametrize("fails_here", [True, False], ids=["the caller", "a helper"])
def test_what_a_call_raises_is_raised_when_all_have_ended(executor: Executor, fails_here: bool) -> None:
    here = threading.get_ident()
    met = threading.Barrier(4)
    ended: list[int] = []

    def work() -> None:
        met.wait(SECONDS)
        if (threading.get_ident() == here) == fails_here:
            raise ValueError("of one")
        threading.Event().wait(0.05)
        ended.append(threading.get_ident())

    with pytest.raises(ValueError, match="of one"):
        executor.together(work, 3, work)
    assert len(ended) == (3 if fails_here else 1)


def test_closed_threads_leave_it_to_the_caller() -> None:
    executor = Executor(3, "ortgpu-test")
    executor.close()
    called: list[int] = []

    def work() -> None:
        called.append(threading.get_ident())

    executor.together(work, 3, work)
    assert called == [threading.get_ident()]
    assert executor.threads == []


def test_what_was_called_is_not_kept(executor: Executor) -> None:
    class Work:
        def __call__(self) -> None:
            raise ValueError

    gone = threading.Event()
    others = [executor.submit(gone.wait, SECONDS) for _ in range(3)]
    work = Work()
    kept = weakref.ref(work)
    with pytest.raises(ValueError):  # noqa: PT011 - that it is raised is enough here
        executor.together(work, 3, work)
    del work
    gc.collect()
    assert kept() is None  # though threads still have it before them
    gone.set()
    assert all(other.result(SECONDS) for other in others)


def test_what_the_caller_raises_comes_before_what_a_helper_does(executor: Executor) -> None:
    """An interrupt is not taken for a failure."""
    met = threading.Barrier(2)

    def work() -> None:
        met.wait(SECONDS)
        raise KeyboardInterrupt

    def elsewhere() -> None:
        met.wait(SECONDS)
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        executor.together(work, 1, elsewhere)


@pytest.mark.parametrize("fails_here", [True, False], ids=["the caller", "a helper"])
def test_nothing_is_kept_without_the_garbage_collector(fails_here: bool) -> None:
    """Memory of a copy that failed is used by the next one."""
    met = threading.Barrier(2)
    here = threading.get_ident()

    class Work:
        def __call__(self) -> None:
            met.wait(SECONDS)
            if (threading.get_ident() == here) == fails_here:
                raise ValueError

    with Executor(1, "ortgpu-test") as executor:
        gc.disable()
        try:
            work = Work()
            kept = weakref.ref(work)
            failed = False
            try:
                executor.together(work, 1, work)
            except ValueError:
                failed = True
            executor.submit(int).result(SECONDS)  # by the same thread, which has done with it then
            del work
            assert failed
            assert kept() is None
        finally:
            gc.enable()


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


def test_the_wait_for_helpers_ends_again_after_an_interrupt_at_its_end() -> None:
    others = _Others(lambda: None)
    others()
    assert others.end() is None
    assert others.end() is None
