"""A thread that looks after its owner now and then, and is there only as long as there is something to wait for."""

from __future__ import annotations

import gc
import os
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.process import reminders
from ortgpu.process.background import Thread
from ortgpu.process.reminders import Reminder

NAME = "ortgpu-test-reminder"
DEADLINE = 20


class Owner:
    """Answers each look with the next of its numbers."""

    def __init__(self, *answers: float | None) -> None:
        self.answers = list(answers)
        self.looks: SimpleQueue[str] = SimpleQueue()
        self.reminder = Reminder(self, Owner.check, NAME)

    def check(self) -> float | None:
        self.looks.put(threading.current_thread().name)
        return self.answers.pop(0)


def wait_until_gone() -> None:
    until = time.monotonic() + DEADLINE
    while any(each.name == NAME for each in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.005)


def test_it_looks_until_there_is_nothing_to_wait_for() -> None:
    owner = Owner(0.001, 0.0, None)
    assert owner.reminder.thread is None
    owner.reminder.start()
    assert [owner.looks.get(timeout=DEADLINE) for _ in range(3)] == [NAME] * 3
    wait_until_gone()
    assert owner.reminder.thread is None


def test_it_can_be_started_again_and_has_one_thread() -> None:
    owner = Owner(None, 60.0)
    owner.reminder.start()
    owner.looks.get(timeout=DEADLINE)
    wait_until_gone()
    owner.reminder.start()
    owner.looks.get(timeout=DEADLINE)
    owner.reminder.start()
    assert sum(each.name == NAME for each in threading.enumerate()) == 1
    owner.reminder.stop()
    wait_until_gone()


def test_stop_ends_a_long_wait_and_waits_for_the_thread() -> None:
    owner = Owner(3600.0)
    owner.reminder.start()
    owner.looks.get(timeout=DEADLINE)
    owner.reminder.stop()
    assert owner.reminder.thread is None
    assert not any(each.name == NAME for each in threading.enumerate())
    owner.reminder.stop()


def test_it_keeps_its_owner_from_nothing() -> None:
    owner = Owner(3600.0)
    owner.reminder.start()
    owner.looks.get(timeout=DEADLINE)
    del owner
    gc.collect()
    wait_until_gone()


def test_a_process_at_its_limit_of_threads_is_not_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Thread):
        def start(self, *_: Any) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(reminders, "Thread", Refused)
    owner = Owner()
    owner.reminder.start()
    assert owner.reminder.thread is None
    owner.reminder.stop()


def test_a_forked_child_starts_none_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    owner.reminder.start()
    assert owner.reminder.thread is None
    owner.reminder.stop()
    assert owner.looks.empty()


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """The thread is not in the child, and its end would be waited for without end."""
    waited: list[str] = []
    thread: Any = SimpleNamespace(is_this=lambda: False, wait=lambda: waited.append("waited"))
    owner = Owner()
    reminder = Reminder(owner, lambda owner: None, "ortgpu-test")
    reminder.thread = thread
    reminder._pid += 1
    reminder.stop()
    reminder.start()
    assert (waited, reminder._ends.qsize(), reminder.thread) == ([], 0, thread)
    reminder._pid -= 1
    reminder.stop()
    assert (waited, reminder._ends.qsize()) == (["waited"], 1)
