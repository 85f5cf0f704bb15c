"""Runners that bound the runs at a time."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.running import turns as module
from ortgpu.running.plain_runs import PlainRunner
from tests.support.cpu_session import child
from tests.support.made_sessions import made_session


def test_only_one_run_is_at_work() -> None:
    highest, made, name = child("running.turns.only_one_run_is_at_work")
    assert highest == 1
    assert made == [-1, 0, 1, 2], "a run that raises gives its turn back"
    assert name == "Slow"


def test_a_run_within_a_run_does_not_wait_for_the_turn_of_its_own_thread() -> None:
    """A signal handler or finalizer amid a run makes it."""
    made = child("running.turns.a_run_within_a_run_does_not_wait_for_the_turn_of_its_own_thread")
    assert made == [[0, [1, [2, 3]]], [2, 3]]


def test_a_finalizer_amid_other_work_waits_for_a_turn_but_not_for_ever() -> None:
    """Two runs at a time would use the same handles. The thread with the turn may wait for a lock of this one."""
    order = child("running.turns.a_finalizer_amid_other_work_waits_for_a_turn_but_not_for_ever")
    assert order == ["a run", "amid other work", "amid other work", "a run"]


def test_a_thread_that_runs_again_at_once_does_not_go_ahead_of_one_that_waits() -> None:
    """Otherwise a thread that makes one run after the other might keep all others waiting for minutes."""
    assert child("running.turns.a_thread_runs_again_at_once") == ["first", "other", "first again"]


@pytest.mark.skipif(sys.platform == "win32", reason="no signal interrupts a wait for a lock on Windows")
def test_a_signal_handler_amid_the_wait_for_a_turn_runs_before_it() -> None:
    """It must not wait for the thread that it interrupts."""
    order, after = child("running.turns.a_handler_amid_the_wait")
    assert order == ["other", "handler", "interrupted"]
    assert after == [["other", "raised", "after"], 0, 0]


def test_a_reminder_has_a_thread_only_while_there_is_something_to_wait_for() -> None:
    from ortgpu.process.reminders import Reminder

    class Owner:
        left = 3
        done = threading.Event()

    def check(owner: Any) -> float | None:
        owner.left -= 1
        if owner.left:
            return 0.001
        owner.done.set()
        return None

    owner = Owner()
    reminder = Reminder(owner, check, "ortgpu-test")
    assert reminder.thread is None
    reminder.start()
    assert owner.done.wait(30)
    reminder.stop()
    assert reminder.thread is None
    owner.left, owner.done = 2, threading.Event()
    reminder.start()
    assert owner.done.wait(30)
    owner.left = 1 << 30
    reminder.start()
    del owner
    reminder.stop()
    assert not [each.name for each in threading.enumerate() if each.name == "ortgpu-test"]


def test_the_end_of_the_interpreter_waits_for_a_check_at_work() -> None:
    """Otherwise ONNX Runtime's thread was ended amid a call, and the process aborted."""
    ended = child(
        """
        from ortgpu.process.reminders import Reminder
        begun = threading.Event()
        def check(_):
            begun.set()
            time.sleep(0.5)
            report("the check has ended")
        owner = threading.Event()
        reminder = Reminder(owner, check, "ortgpu-test")
        reminder.start()
        begun.wait(30)
        """
    )
    assert ended == "the check has ended"


def test_an_idle_session_trims_itself_and_leaves_no_thread() -> None:
    trimmed, left, result, after, closed, wrong = child(
        "running.turns.an_idle_session_trims_itself_and_leaves_no_thread"
    )
    assert trimmed < 64 << 20
    assert left == []
    assert result == 1.0
    assert after < 64 << 20
    assert closed == []
    assert wrong == ["ValueError", "ValueError", "TypeError", "TypeError"]


@pytest.mark.parametrize("way", ["run_with_iobinding", "run_on_device", "run_with_ort_values", "map", "run_async"])
def test_an_idle_session_trims_itself_however_it_ran(way: str) -> None:
    grown, trimmed = child(
        """
        import onnxruntime
        from ortgpu.running import arena
        session = GPUSession(model('two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'), trim_idle=0.05)
        big = np.ones((64, 1 << 18), np.float32)
        def bound():
            binding = session.io_binding()
            binding.bind_cpu_input("x", big)
            binding.bind_output("z")
            session.run_with_iobinding(binding)
        def later():
            done = threading.Event()
            session.run_async(["z"], {"x": big}, lambda *_: done.set(), None)
            done.wait(30)
        ways = {
            "run_with_iobinding": bound,
            "run_on_device": lambda: session.run_on_device(None, {"x": big}),
            "run_with_ort_values": lambda: session.run_with_ort_values(
                None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(big)}),
            "map": lambda: list(session.map([{"x": big}])),
            "run_async": later,
        }
        grown = []
        shrink, until = arena.shrink, time.monotonic() + 30
        arena.shrink = lambda session: (grown.append(session.memory.arena), shrink(session))
        session.run(None, {"x": big[:1, :1]})  # The arena keeps its first region.
        ways[sys.argv[1]]()
        while (max(grown, default=0) < 64 << 20 or session.memory.arena > 64 << 20) and time.monotonic() < until:
            time.sleep(0.01)
        report([max(grown, default=0), session.memory.arena])
        """,
        way,
    )
    assert grown > 64 << 20
    assert trimmed < 64 << 20


def test_a_run_over_a_binding_takes_a_turn_too() -> None:
    taken: list[Any] = []

    def run(method: Any, *arguments: Any) -> Any:
        taken.append(arguments)
        return method(*arguments)

    turns: Any = SimpleNamespace(run=run)
    runner = PlainRunner(made_session())
    module.take_turns(runner, turns)
    assert runner.around(abs)(-5) == 5
    assert taken == [(-5,)]


def test_a_session_in_the_middle_of_a_run_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[Any] = []
    monkeypatch.setattr(module, "trim", trimmed.append)
    session = made_session()
    runner: Any = PlainRunner(session)
    session._gpu_runner = runner
    module.trim_when_idle(session, runner, 60)
    runner.last_run = time.monotonic() - 1000
    runner.at_work.append(None)
    assert module._trim_idle(60, session) == 60
    assert trimmed == []
    runner.at_work.clear()
    module._trim_idle(60, session)
    assert trimmed == [session]


@pytest.mark.parametrize("fails", [False, True], ids=["it succeeds", "it fails"])
def test_a_run_over_a_binding_is_one_that_an_idle_session_is_not_trimmed_after(fails: bool) -> None:
    started: list[str] = []
    session = made_session()
    runner: Any = PlainRunner()
    module.trim_when_idle(session, runner, 1000.0)
    runner.reminder, runner.last_run = SimpleNamespace(thread=None, start=lambda: started.append("reminder")), 0.0

    def run(number: int) -> tuple[int, int]:
        if fails:
            raise KeyError(number)
        return number, len(runner.at_work)

    if fails:
        with pytest.raises(KeyError):
            runner.around(run)(5)
    else:
        assert runner.around(run)(5) == (5, 1)
    assert (runner.at_work, started) == ([], ["reminder"])
    assert runner.last_run > 0
