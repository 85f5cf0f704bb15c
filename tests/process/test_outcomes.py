"""Outcomes of calls in other threads: made once, told to everybody who waits, and never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ortgpu.process.background import Task, logged
from ortgpu.process.threads import Executor, FutureOutcome, Outcome

DEADLINE = 30


@pytest.fixture
def executor() -> Any:
    made = Executor(2, "ortgpu-test")
    yield made
    made.close(DEADLINE)


def raising() -> None:
    raise ValueError("of the call")


@pytest.mark.parametrize("kind", [Outcome, FutureOutcome])
def test_a_call_is_begun_by_one_or_cancelled_by_one(kind: Callable[[], Outcome[Any]]) -> None:
    begun, cancelled = kind(), kind()
    assert begun.begin()
    assert not begun.cancel()
    assert cancelled.cancel()
    assert not cancelled.begin()


@pytest.mark.parametrize("kind", [Outcome, FutureOutcome])
def test_a_cancelled_call_leaves_the_place_where_it_waits(kind: Callable[[], Outcome[Any]]) -> None:
    left: list[str] = []
    outcome: Any = kind()
    (outcome.future if kind is FutureOutcome else outcome).leave = lambda: lambda: left.append("left")
    assert outcome.cancel()
    assert left == ["left"]
    begun: Any = kind()
    (begun.future if kind is FutureOutcome else begun).leave = lambda: lambda: left.append("left")
    assert begun.begin()
    assert not begun.cancel()
    assert left == ["left"]


def test_a_result_and_an_error_reach_everybody_who_waits(executor: Executor) -> None:
    result, error = Outcome[int](), FutureOutcome[None]()
    executor.submit(result, lambda: 7)
    executor.submit(error, raising)
    for _ in range(2):
        assert result.result() == 7
        with pytest.raises(ValueError, match="of the call"):
            error.result()
    with pytest.raises(ValueError, match="of the call"):
        error.future.result(DEADLINE)


def test_a_call_that_was_cancelled_is_not_made(executor: Executor) -> None:
    calls: list[int] = []
    held, release = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        held.release()
        assert release.wait(DEADLINE)

    for _ in range(2):
        executor.submit(Outcome(), hold)
        assert held.acquire(timeout=DEADLINE)
    outcomes = [Outcome[None]() for _ in range(3)]
    for number, outcome in enumerate(outcomes):
        executor.submit(outcome, calls.append, number)
    assert outcomes[1].cancel()
    release.set()
    for outcome in (outcomes[0], outcomes[2]):
        outcome.wait()
    executor.close(DEADLINE)
    assert sorted(calls) == [0, 2]


def test_close_waits_for_submitted_calls_and_takes_no_more() -> None:
    executor, began, made = Executor(1, "ortgpu-test"), threading.Event(), list[int]()

    def slow() -> None:
        began.set()
        threading.Event().wait(0.05)
        made.append(1)

    executor.submit(Outcome(), slow)
    executor.submit(Outcome(), slow)
    assert began.wait(DEADLINE)
    executor.close()
    assert made == [1, 1]
    assert not any(thread.is_alive() for thread in executor.threads)
    with pytest.raises(RuntimeError, match="have ended"):
        executor.submit(Outcome(), slow)
    executor.close()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_threads_than_asked_for(most: int) -> None:
    executor, lock, at_work, highest = Executor(most, "ortgpu-test"), threading.Lock(), [0], [0]

    def work() -> None:
        with lock:
            at_work[0] += 1
            highest[0] = max(highest[0], at_work[0])
        threading.Event().wait(0.002)
        with lock:
            at_work[0] -= 1

    outcomes = [Outcome[None]() for _ in range(12)]
    for outcome in outcomes:
        executor.submit(outcome, work)
    for outcome in outcomes:
        outcome.wait()
    executor.close(DEADLINE)
    assert highest[0] <= most == len(executor.threads)


def test_each_callback_of_a_future_is_called_whatever_the_others_raise(executor: Executor) -> None:
    called: list[int] = []

    def leave(_: object) -> None:
        raise SystemExit(3)

    outcome = FutureOutcome[int]()
    for callback in (leave, lambda future: called.append(future.result()), leave, lambda _: called.append(2)):
        outcome.future.add_done_callback(callback)
    executor.submit(outcome, lambda: 1)
    outcome.wait()
    again = Outcome[int]()
    executor.submit(again, lambda: 5)
    assert again.result() == 5, "the thread goes on"
    executor.close(DEADLINE)
    assert called == [1, 2]


def test_a_task_raises_what_its_function_raised() -> None:
    assert Task(lambda: 7, "ortgpu-test").result() == 7
    task: Task[None] = Task(raising, "ortgpu-test")
    for _ in range(2):
        with pytest.raises(ValueError, match="of the call"):
            task.result()


def test_a_block_that_logs_lets_an_interrupt_of_the_main_thread_through(caplog: pytest.LogCaptureFixture) -> None:
    with logged("it failed"):
        raising()
    assert [record.getMessage() for record in caplog.records] == ["it failed"]
    with pytest.raises(KeyboardInterrupt), logged("it failed"):
        raise KeyboardInterrupt

    def in_a_thread() -> None:
        with logged("a thread failed"):
            raise SystemExit(1)
        caplog.records.append(None)  # type: ignore[arg-type]  # it was reached

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(DEADLINE)
    assert caplog.records[-1] is None
