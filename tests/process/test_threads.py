"""Threads that help: who calls what, what is raised, and what is kept."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from ortgpu.process.background import Thread, may_wait
from ortgpu.process.threads import Executor, Notice, Outcome, Slots, Turns
from tests.support.children import run_python

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


def test_a_notice_stays_until_it_is_taken_once() -> None:
    notice = Notice()
    assert not notice.take(0.01)
    notice.give()
    notice.give()
    assert notice.take()
    assert not notice.take(0)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="the system sends no signals to a thread")
def test_signals_do_not_keep_a_thread_waiting_for_a_notice() -> None:
    """Before Python 3.13, SimpleQueue waits for ever if one comes when its time is over."""
    found = run_python("process.threads.signals_do_not_keep_a_thread_waiting_for_a_notice")
    assert found.ok().reports["goes on"]


def test_a_caller_waits_for_the_thread_that_another_one_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make its call itself, beside that thread, which alone may run a captured session."""
    starting, may_start = threading.Event(), threading.Event()
    start = Thread.start

    def slow_start(self: Thread, started: Callable[[Thread], object]) -> None:
        starting.set()
        assert may_start.wait(20)
        start(self, started)

    monkeypatch.setattr(Thread, "start", slow_start)
    executor = Executor(1, "one")
    outcomes: list[Outcome[str]] = [Outcome(), Outcome()]
    first = threading.Thread(target=executor.submit, args=(outcomes[0], lambda: threading.current_thread().name))
    first.start()
    assert starting.wait(20)
    executor.submit(outcomes[1], lambda: threading.current_thread().name)
    may_start.set()
    first.join()
    assert [each.result() for each in outcomes] == ["one_0", "one_0"]
    executor.close()


@pytest.mark.parametrize("limit", [Turns(), Slots(1), Slots(2)], ids=["turns", "one slot", "two slots"])
def test_threads_give_back_what_they_take_for_a_call(limit: Turns | Slots) -> None:
    at_work, most, lock = 0, 0, threading.Lock()
    results: list[int] = []

    def run(number: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.002)
        with lock:
            at_work -= 1
        if number == 3:
            raise ValueError("as runs may")
        return number

    def call(number: int) -> None:
        for _ in range(3):
            try:
                results.append(limit.run(run, number))
            except ValueError:
                results.append(-1)

    # A thread that waits for a turn for ever must keep neither this test nor pytest from ending.
    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a turn was lost"
    assert sorted(results) == sorted([-1, 0, 1, 2, 4] * 3)
    count = limit._slots.qsize() if isinstance(limit, Slots) else 1
    assert 1 <= most <= count
    if isinstance(limit, Turns):
        assert (limit.owner, limit.first) == (0, 0)


def test_a_turn_that_a_call_starts_lasts_until_it_is_given_back() -> None:
    turns, order = Turns(), list[str]()
    turns.start("first", order.append, "started")
    other = threading.Thread(target=turns.run, args=(order.append, "next"), daemon=True)
    other.start()
    deadline = time.monotonic() + SECONDS
    while turns.first != other.ident and time.monotonic() < deadline:
        time.sleep(0.001)
    order.append("given back")
    turns.give("first")
    other.join(SECONDS)
    assert order == ["started", "given back", "next"]
    turns.start("second", int)
    turns.give("first")  # An interrupt may have given it back before.
    assert turns.owner != 0
    turns.give("second")
    with pytest.raises(ZeroDivisionError):
        turns.start("third", lambda: 1 // 0)
    turns.give("third")
    assert turns.run(int) == 0


def test_a_handler_amid_the_start_of_a_call_waits_for_a_second_at_most() -> None:
    """The thread that it has interrupted would keep it waiting for ever. It starts a call itself, without a turn."""
    turns, order = Turns(), list[str]()

    def interrupted() -> None:
        turns.run(order.append, "a run of the handler")
        turns.start("of the handler", order.append, "a call that the handler starts")
        turns.give("of the handler")
        order.append("the call")

    def call() -> None:
        turns.start("first", interrupted)
        order.append("free" if turns.owner == 0 else "it lasts")
        turns.give("first")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert order == ["a run of the handler", "a call that the handler starts", "the call", "it lasts"]
    assert turns.run(int) == 0


def test_a_thread_in_a_turn_waits_for_nobody_and_others_may() -> None:
    turns, found = Turns(), list[bool]()
    assert turns.run(may_wait) is False
    assert may_wait()
    other = threading.Thread(target=lambda: found.append(may_wait()))

    def ask_beside() -> None:
        other.start()
        other.join(SECONDS)

    turns.run(ask_beside)
    assert found == [True]
