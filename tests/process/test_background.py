"""Threads and locks of the library, where an interrupt or a fork comes: the parts alone. See test_locks.py."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ortgpu.process import background
from ortgpu.process.background import (
    Task,
    Thread,
    cached_property,
    fork_safe_lock,
    holds_lock,
    is_of_a_handler,
    may_wait,
    this_thread,
    uninterrupted,
)

DEADLINE = 20


def fail() -> None:
    raise KeyError("its own")


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_holds_a_lock_or_a_turn_waits_for_nobody() -> None:
    assert (holds_lock(), may_wait()) == (False, True)
    with this_thread.holds:
        assert (holds_lock(), may_wait()) == (True, False)
    with this_thread.has_turn:
        assert (holds_lock(), may_wait()) == (False, False)
    assert (holds_lock(), may_wait()) == (False, True)


def test_the_marks_are_those_of_one_thread() -> None:
    found: list[bool] = []
    with this_thread.holds:
        other = threading.Thread(target=lambda: found.append(holds_lock()))
        other.start()
        other.join(DEADLINE)
    assert found == [False]
    with pytest.raises(AttributeError):
        this_thread.other  # noqa: B018 - the look is what raises


def test_a_value_is_made_once_and_the_first_of_two_stays() -> None:
    class Owner:
        made = 0

        @cached_property
        def value(self) -> int:
            self.made += 1
            if self.made == 1:
                assert self.value == 2  # another thread, as it were
            return self.made

    owner = Owner()
    assert owner.value == 2
    assert owner.value == 2
    assert owner.made == 2
    assert isinstance(Owner.value, cached_property)


def test_a_function_that_no_interrupt_reaches_runs_in_another_thread() -> None:
    seen: list[int] = []
    uninterrupted(lambda: seen.append(threading.get_ident()))
    assert seen != [threading.get_ident()]
    with pytest.raises(KeyError, match="its own"):
        uninterrupted(fail)


def test_where_no_thread_can_be_had_the_caller_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("_thread.start_new_thread", refuse)
    seen: list[int] = []
    uninterrupted(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    with pytest.raises(KeyError):
        uninterrupted(fail)


def test_a_thread_can_be_waited_for_and_knows_itself() -> None:
    may_end, found = threading.Event(), []

    def work() -> None:
        found.append(thread.is_this())
        may_end.wait(DEADLINE)

    thread = Thread(work, "ortgpu-test")
    assert thread.wait(), "it has not begun"
    started: list[Thread] = []
    thread.start(started.append)
    assert started == [thread]
    assert thread.daemon
    assert not thread.wait(0.02)
    may_end.set()
    assert thread.wait(DEADLINE)
    assert thread.wait()
    assert (found, thread.is_this(), thread.is_alive()) == ([True], False, False)


def test_the_end_of_the_interpreter_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.is_finalizing", lambda: True)
    with pytest.raises(RuntimeError, match="at the end of the interpreter"):
        Thread(lambda: None, "ortgpu-test").start()
    seen: list[int] = []
    uninterrupted(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]


def test_a_task_has_a_result_or_an_error() -> None:
    assert Task(lambda: threading.current_thread().name, "ortgpu-test").result() == "ortgpu-test"
    failed: Task[Any] = Task(fail, "ortgpu-test")
    for _ in range(2):
        with pytest.raises(KeyError, match="its own"):
            failed.result()


def test_a_task_without_a_thread_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thread, "start", refuse)
    assert Task(lambda: threading.get_ident(), "ortgpu-test").result() == threading.get_ident()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
def test_what_a_handler_raises_is_told_from_other_errors() -> None:
    class Limit:
        def __call__(self, *_: Any) -> None:
            raise TimeoutError

    def limit(*_: Any) -> None:
        raise TimeoutError

    for handler in (
        Limit(),
        limit,
        functools.partial(limit, "job"),
        functools.partial(functools.partial(limit), "job"),
    ):
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(TimeoutError) as caught:
                signal.raise_signal(signal.SIGUSR1)
            assert is_of_a_handler(caught.value)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not is_of_a_handler(caught.value), "it is no handler any more"
    with pytest.raises(TimeoutError) as caught:
        raise TimeoutError
    assert not is_of_a_handler(caught.value)


def test_a_message_from_a_thread_that_must_go_on_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise KeyError

    logger = logging.getLogger("ortgpu")
    refusing = Refusing()
    logger.addFilter(refusing)
    try:
        background.log(logging.ERROR, "lost")
    finally:
        logger.removeFilter(refusing)
    with caplog.at_level(logging.ERROR, "ortgpu"):
        background.log(logging.ERROR, "kept %s", "so")
    assert caplog.messages == ["kept so"]


def test_errors_of_a_block_are_logged_and_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> None:
        with background.logged("a callback raised"):
            raise KeyError

    with caplog.at_level(logging.ERROR, "ortgpu"):
        failing()
    assert caplog.messages == ["a callback raised"]
    with background.logged("nothing"):
        pass
    assert caplog.messages == ["a callback raised"]


def test_an_interrupt_is_raised_in_the_main_thread_and_ends_no_other() -> None:
    def interrupted() -> None:
        with background.logged("interrupted"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Task(interrupted, "ortgpu-test").result() is None


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")
def test_a_lock_that_another_thread_holds_is_free_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that forked is in the child: nobody there would release it."""
    registered: list[Callable[[], object]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: registered.append(after_in_child))
    lock: Any = fork_safe_lock()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert not lock.acquire(blocking=False)
    (after_in_child,) = registered
    after_in_child()
    assert lock.acquire(blocking=False)
    lock.release()
