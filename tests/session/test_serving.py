"""The queue, the threads and the workers of a pool, with workers that are made up: no session, no GPU, no child."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import (
    ExecutionError,
    GPUError,
    PoisonedContextError,
    ProviderFailureError,
    QueueFullError,
    WorkerLostError,
)
from ortgpu.process.threads import FutureOutcome, Outcome
from ortgpu.provider import lifetime
from ortgpu.provider.devices import Device
from ortgpu.session.gpu_session_pool import GPUSessionPool
from ortgpu.session.pool.serving import Service, _end_at_exit
from ortgpu.session.pool.sessions import SessionFeeds, open_sessions
from ortgpu.session.pool.workers import Feeds, Kind, NotBegunError, Request, Worker
from tests.support.made_sessions import made_session

DEADLINE = 30  # seconds; nothing here takes a tenth of one
ECC = ProviderFailureError("the GPU reports an uncorrectable memory error", library="CUDA", status="214")
STICKY = PoisonedContextError("a CUDA error ended this process's use of the GPU", cuda_code=700)


class Made(Worker):
    """A worker that runs what a test says. Without a word it returns the feed."""

    def __init__(self, place: int, most: int = 1) -> None:
        super().__init__(place, most)
        self.capacity = most
        self.script: list[Any] = []
        self.ran: list[Any] = []
        self.refused: list[GPUError] = []
        self.replaced: list[GPUError] = []
        self.is_replaceable = False
        self.closed = 0
        self.patience: list[float | None] = []
        self.loses: tuple[type[GPUError], ...] = ()

    @property
    def device(self) -> Device:
        return Device("cuda", self.place, f"GPU-{self.place}", "NVIDIA H200", (9, 0), None, None)

    def run(self, output_names: Any, feed: Any) -> Any:
        self.ran.append(feed)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, BaseException):
            raise step
        if step is not None:
            step()
        return [self.place, feed]

    def has_lost(self, error: ExecutionError) -> bool:
        return isinstance(error, self.loses)

    def refuse(self, error: GPUError) -> None:
        self.refused.append(error)

    def replace(self, error: GPUError) -> bool:
        if self.is_replaceable:
            self.replaced.append(error)
        return self.is_replaceable

    def close(self, timeout: float | None) -> None:
        self.closed += 1
        self.patience.append(timeout)


class Passed(Feeds):
    closed = 0

    def close(self) -> None:
        self.closed += 1


@contextmanager
def serving(*workers: Made, **options: Any) -> Iterator[Service]:
    service = Service("ortgpu-test", "GPUSessionPool", Passed(), **options)
    for worker in workers:
        service.workers.append(worker)
    service.open()
    try:
        yield service
    finally:
        service.close(DEADLINE)


def ask(service: Service, feed: object = "feed", limit: int = 100, **named: Any) -> Any:
    """Queue a request, and return its outcome."""
    outcome: Outcome[Any] = Outcome()
    service.ask(Request(service, None, feed, outcome), limit, **named)
    return outcome


def run(service: Service, feed: object = "feed", limit: int = 100) -> Any:
    return service.result_of(Request(service, None, feed, Outcome()), limit)


def refusal(service: Service) -> str:
    with pytest.raises(GPUError) as raised:
        run(service)
    return raised.value.summary


class Gate:
    """Holds runs until it is opened."""

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.arrived.release()
        assert self.opened.wait(DEADLINE)

    def wait_for(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=DEADLINE)


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in a thread. Return the thread, and a list for the result or the error."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, results


# Requests and workers


def test_each_request_is_run_once_and_answered_with_its_own_result() -> None:
    workers = Made(0, 2), Made(1, 2)
    with serving(*workers) as service:
        outcomes = [ask(service, number) for number in range(20)]
        assert [outcome.result()[1] for outcome in outcomes] == list(range(20))
    assert sorted(workers[0].ran + workers[1].ran) == list(range(20))


def test_the_least_busy_worker_runs_the_next_request() -> None:
    first, second, gate = Made(0, 2), Made(1, 2), Gate()
    first.script = [gate, gate]
    second.script = [gate, gate]
    with serving(first, second) as service:
        for number in range(2):
            ask(service, number)
            gate.wait_for()
        assert (len(first.ran), len(second.ran)) == (1, 1)
        gate.opened.set()


def test_no_worker_runs_more_than_it_can() -> None:
    worker, gate = Made(0, 1), Gate()
    worker.script = [gate, gate]
    with serving(worker, Made(1, 0)) as service:
        outcomes = [ask(service, number) for number in range(2)]
        gate.wait_for()
        assert (len(worker.runs), len(service.waiting)) == (1, 1)
        gate.opened.set()
        assert [outcome.result()[1] for outcome in outcomes] == [0, 1]


def test_an_error_of_a_request_is_its_own_and_the_worker_goes_on() -> None:
    worker = Made(0)
    worker.script = [ValueError("wrong input")]
    with serving(worker) as service:
        with pytest.raises(ValueError, match="wrong input"):
            run(service)
        assert run(service, 2) == [0, 2]
        assert not worker.runs
        assert service.lost == ()


def test_a_full_queue_refuses_or_waits() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        outcomes = [ask(service, 0)]
        gate.wait_for()
        outcomes.append(ask(service, 1, limit=1))
        with pytest.raises(QueueFullError):
            ask(service, 2, limit=1, raises=lambda: QueueFullError("full", limit=1))
        thread, results = in_thread(lambda: ask(service, 3, limit=1).result())
        thread.join(0.1)
        assert results == []
        assert len(service.waiting) == 1
        gate.opened.set()
        thread.join(DEADLINE)
        assert results == [[0, 3]]
        assert [outcome.result()[1] for outcome in outcomes] == [0, 1]


def test_a_request_that_was_cancelled_never_runs() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        first = ask(service, 0)
        gate.wait_for()
        outcome: FutureOutcome[Any] = FutureOutcome()
        service.ask(Request(service, None, 1, outcome), 100)
        assert outcome.future.cancel()
        assert len(service.waiting) == 0, "it leaves its place at once"
        gate.opened.set()
        assert first.result() == [0, 0]
        assert run(service, 2) == [0, 2]
    assert worker.ran == [0, 2]


def test_a_caller_that_gives_up_takes_its_request_along() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        ask(service, 0)
        gate.wait_for()
        request = Request(service, None, 1, Outcome())

        class Interrupted(Outcome[Any]):
            def result(self) -> Any:
                raise KeyboardInterrupt

        request = Request(service, None, 1, Interrupted())
        with pytest.raises(KeyboardInterrupt):
            service.result_of(request, 100)
        gate.opened.set()
        assert run(service, 2) == [0, 2]
    assert worker.ran == [0, 2]


# A service that drains


def test_drain_refuses_new_requests_and_waits_for_the_others() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        running = ask(service, 0)
        gate.wait_for()
        waiting = ask(service, 1)
        with pytest.raises(TimeoutError, match="1 requests still run and 1 wait"):
            service.drain(0.05)
        assert "drain() was called" in refusal(service)
        assert service.is_over
        thread, results = in_thread(lambda: service.drain(None))
        thread.join(0.05)
        assert results == [], "drain waits for requests that run"
        gate.opened.set()
        thread.join(DEADLINE)
        assert results == [None]
        assert (running.result()[1], waiting.result()[1]) == (0, 1)
        assert worker.closed == 0
        assert "drain() was called" in refusal(service)


def test_drain_refuses_a_caller_that_waits_for_a_place() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        ask(service, 0)
        gate.wait_for()
        ask(service, 1)
        thread, results = in_thread(lambda: ask(service, 2, limit=1))
        thread.join(0.1)
        assert results == []
        with pytest.raises(TimeoutError):
            service.drain(0)
        thread.join(DEADLINE)
        assert [type(result) for result in results] == [ExecutionError]
        gate.opened.set()


# A service that closes


def test_close_waits_for_what_runs_refuses_what_waits_and_closes_each_worker() -> None:
    workers, gate = (Made(0), Made(1, 0)), Gate()
    workers[0].script = [gate]
    with serving(*workers) as service:
        running = ask(service, 0)
        gate.wait_for()
        waiting = ask(service, 1)
        thread, results = in_thread(lambda: service.close(DEADLINE))
        with pytest.raises(ExecutionError, match="closed"):
            waiting.result()
        assert results == []
        assert "closed" in refusal(service)
        gate.opened.set()
        thread.join(DEADLINE)
        assert results == [None]
        assert running.result() == [0, 0]
        assert all(worker.closed for worker in workers)
        assert isinstance(service.feeds, Passed)
        assert service.feeds.closed
        assert not any(each.is_alive() for each in service.threads)


def test_close_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.session.pool.serving._ENDING", 0.05)
    worker, gate, killed = Made(0), Gate(), []
    worker.script = [gate]
    monkeypatch.setattr(worker, "kill", lambda: killed.append(True))
    with serving(worker) as service:
        ask(service, 0)
        gate.wait_for()
        with pytest.raises(TimeoutError, match="requests of this GPUSessionPool still run"):
            service.close(0.05)
        assert killed == [True]
        gate.opened.set()


def test_a_service_of_somebody_elses_session_leaves_it_open() -> None:
    worker = Made(0)
    with serving(worker, owns=False) as service:
        run(service)
    assert worker.closed == 0


def test_a_service_that_is_dropped_answers_what_waits_and_ends_its_threads() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        outcomes = [ask(service, number) for number in range(3)]
        gate.wait_for()
        service.let_go()
        gate.opened.set()
        assert [outcome.result()[1] for outcome in outcomes] == [0, 1, 2]
        wait_until(lambda: not any(each.is_alive() for each in service.threads))
        assert worker.closed


def test_an_idle_service_that_is_dropped_ends_its_threads_too() -> None:
    worker = Made(0, 2)
    with serving(worker) as service:
        run(service)
        service.let_go()
        wait_until(lambda: not any(each.is_alive() for each in service.threads))
        assert worker.closed


# A service that loses GPUs


def test_a_request_that_fails_with_its_gpu_runs_once_more_on_another_one() -> None:
    """Not on another session of the same GPU: its fault would then be said to be the other's."""
    lost, beside, other = Made(0), Made(0), Made(1)
    lost.script = [ECC]
    beside.script = [ECC]
    with serving(lost, beside, other) as service:
        other.runs["busy"] = time.time()
        assert run(service, 7) == [1, 7]
        assert (lost.ran + beside.ran, other.ran) == ([7], [7])
        assert [(each.device.ordinal, each.error.summary) for each in service.lost] == [(0, ECC.summary)]
        assert service.serving == (other,)
        del other.runs["busy"]
        assert run(service, 8) == [1, 8]


def test_a_request_that_fails_on_two_gpus_removes_neither() -> None:
    workers = Made(0), Made(1), Made(2)
    for worker in workers:
        worker.script = [ECC]
    with serving(*workers) as service:
        with pytest.raises(ProviderFailureError):
            run(service)
        assert sum(len(worker.ran) for worker in workers) == 2
        assert service.lost == ()
        assert len(service.serving) == 3


def test_the_only_gpu_is_not_removed_for_a_doubtful_error() -> None:
    worker = Made(0)
    worker.script = [ECC]
    with serving(worker) as service:
        with pytest.raises(ProviderFailureError):
            run(service)
        assert service.lost == ()
        assert run(service, 2) == [0, 2]
        assert worker.ran == ["feed", 2]


def test_a_gpu_that_is_surely_lost_is_removed_though_it_is_the_last() -> None:
    worker = Made(0)
    worker.script, worker.loses = [ECC], (ProviderFailureError,)
    with serving(worker) as service:
        with pytest.raises(ProviderFailureError):
            run(service)
        assert [type(error) for error in worker.refused] == [ProviderFailureError]
        assert len(service.lost) == 1
        assert refusal(service) == "no GPU of this GPUSessionPool is left"


def test_when_no_gpu_is_left_waiting_requests_are_refused_with_the_cause() -> None:
    worker, gate = Made(0), Gate()
    worker.loses = (PoisonedContextError,)

    def fail() -> None:
        gate()
        raise STICKY

    worker.script = [fail]
    with serving(worker) as service:
        running = ask(service, 0)
        gate.wait_for()
        waiting = ask(service, 1)
        gate.opened.set()
        for outcome in (running, waiting):
            with pytest.raises(PoisonedContextError):
                outcome.result()
        assert refusal(service) == STICKY.summary


def test_failures_that_pass_leave_the_last_gpu() -> None:
    """Two requests that failed at the same moment, each served by the GPU of the other."""
    first, second = Made(0), Made(1)
    with serving(first, second) as service:
        for worker in (first, second):
            service._take_out(worker, ECC, is_lost=False)
        assert service.serving == (second,)
        assert run(service, 1) == [1, 1]


def test_a_closed_pool_refuses_a_request_at_once_and_gives_its_sessions_the_time_of_close() -> None:
    worker = Made(0)
    with serving(worker) as service:
        service.close(DEADLINE, 5.0)
        assert 5.0 in worker.patience
        with pytest.raises(ExecutionError, match="is closed"):
            ask(service)
        with pytest.raises(ExecutionError, match="is closed"):
            ask(service, limit=0, raises=lambda: QueueFullError("full", limit=0))


def test_a_worker_process_is_replaced_and_its_gpu_stays() -> None:
    lost, other = Made(0), Made(1)
    lost.script, lost.is_replaceable = [ECC], True
    with serving(lost, other) as service:
        assert run(service, 7) == [1, 7]
        assert [type(error) for error in lost.replaced] == [ProviderFailureError]
        assert service.lost == ()


def gone(worker: int = 0) -> WorkerLostError:
    return WorkerLostError(f"worker {worker} was lost", worker=worker, device="cuda:0", cause="SIGKILL")


def test_a_request_of_a_lost_process_runs_once_more_and_no_third_time() -> None:
    worker = Made(0)
    with serving(worker) as service:
        worker.script = [gone()]
        assert run(service, 1) == [0, 1]
        worker.script, worker.ran = [gone(), gone()], []
        with pytest.raises(WorkerLostError, match="two worker processes were lost"):
            run(service, 2)
        assert worker.ran == [2, 2]
        worker.script, worker.ran = [NotBegunError(), NotBegunError(), gone()], []
        assert run(service, 3) == [0, 3]
        assert worker.ran == [3, 3, 3, 3], "a process that has not begun is not blamed"


def test_a_worker_that_is_given_up_is_served_without() -> None:
    given_up, other = Made(0), Made(1)
    with serving(given_up, other) as service:
        given_up.is_lost, given_up.last_error = True, gone()
        in_thread(lambda: service.notice(given_up))[0].join(DEADLINE)
        assert service.serving == (other,)
        assert [each.device.ordinal for each in service.lost] == [0]
        assert run(service, 1) == [1, 1]


def test_the_worker_that_is_left_runs_no_more_than_before() -> None:
    """There are as many threads as before."""
    worker, lost, gate = Made(0), Made(1), Gate()
    worker.script = [gate, gate]
    with serving(worker, lost) as service:
        lost.is_lost, lost.last_error = True, gone()
        in_thread(partial(service.notice, lost))[0].join(DEADLINE)
        first = ask(service, 0)
        gate.wait_for()
        assert service._claim("second") is None
        gate.opened.set()
        assert first.result() == [0, 0]


def test_a_request_that_is_cancelled_as_a_thread_takes_it_is_not_run() -> None:
    class Late(Outcome[Any]):
        def begin(self) -> bool:
            self.cancel()
            return super().begin()

    worker = Made(0)
    with serving(worker) as service:
        service.ask(Request(service, None, 1, Late()), 100)
        assert run(service, 2) == [0, 2]
        assert worker.ran == [2]
        assert not worker.runs


def test_the_refusal_of_a_pool_without_a_gpu_tells_why_each_was_lost() -> None:
    workers = Made(0), Made(1)
    with serving(*workers) as service:
        for number, worker in enumerate(workers):
            worker.is_lost, worker.last_error = True, gone(number)
            in_thread(partial(service.notice, worker))[0].join(DEADLINE)
        with pytest.raises(ExecutionError, match="no GPU of this GPUSessionPool is left") as caught:
            run(service)
        assert [error.summary for error in caught.value.others] == ["worker 0 was lost", "worker 1 was lost"]


# Requests that may be joined


def test_a_closed_kind_is_refused_and_others_go_on() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        ask(service, 0)
        gate.wait_for()
        closed, outcome = Kind(), Outcome[Any]()
        service.ask(Request(service, None, 1, outcome, closed), 100)
        plain = ask(service, 2)
        closed.is_closed = True
        service.refuse_waiting()
        with pytest.raises(ExecutionError, match="service of joined requests is closed"):
            outcome.result()
        gate.opened.set()
        assert plain.result() == [0, 2]
        with pytest.raises(ExecutionError, match="joined requests is closed"):
            service.ask(Request(service, None, 3, Outcome(), closed), 100)


def test_the_limit_of_the_queue_is_that_of_each_kind() -> None:
    worker, gate = Made(0), Gate()
    worker.script = [gate]
    with serving(worker) as service:
        ask(service, 0)
        gate.wait_for()
        ask(service, 1, limit=1)
        service.ask(Request(service, None, 2, Outcome(), Kind()), 1)
        assert len(service.waiting) == 2
        gate.opened.set()


# Two threads and the lock


class Held:
    """A lock that counts how often it is taken."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.RLock()

    def __enter__(self) -> bool:
        self.taken += 1
        return self._lock.__enter__()

    def __exit__(self, *arguments: Any) -> None:
        self._lock.__exit__(*arguments)


@pytest.mark.parametrize(
    "way", ["_take", "try_start", "_answer_here", "_borrow", "_run_elsewhere", "_take_out", "notice"]
)
def test_workers_are_chosen_under_the_lock(way: str) -> None:
    """Otherwise two threads see the same worker free."""
    worker, other = Made(0), Made(1)
    with serving(worker, other) as service:
        lock: Any = Held()
        service._lock = lock
        if way == "_take":
            run(service)
        elif way == "try_start":
            from ortgpu.process.threads import Notice

            notice = Notice()
            service._busy.append(notice)
            assert service.try_start("batch", Kind(), notice) is not None
        elif way == "_answer_here":
            service._answer_here(Request(service, None, 1, Outcome()))
        elif way == "_borrow":
            service._borrow("key")
        elif way == "_run_elsewhere":
            assert service._run_elsewhere("key", None, 1, worker, ECC) == [1, 1]
        elif way == "_take_out":
            service._take_out(worker, ECC, is_lost=False)
        else:
            worker.is_lost, worker.last_error = True, gone()
            service.notice(worker)
        assert lock.taken
        for each in (worker, other):
            each.runs.clear()


def test_the_queue_is_looked_at_under_the_lock() -> None:
    """Otherwise two threads choose the same request, and the claim of one ends with that of the other."""
    looks: list[bool] = []

    class Watched(deque[Any]):
        def __iter__(self) -> Iterator[Any]:
            looks.append(service._lock._is_owned())  # type: ignore[attr-defined]  # as Condition asks
            return super().__iter__()

    with serving(Made(0)) as service:
        service.waiting = Watched()
        assert run(service) == [0, "feed"]
        assert looks == [True]


def test_many_threads_never_run_more_than_the_workers_can() -> None:
    at_work, most, lock = [0, 0], [0, 0], threading.Lock()

    class Counted(Made):
        def run(self, output_names: Any, feed: Any) -> Any:
            with lock:
                at_work[self.place] += 1
                most[self.place] = max(most[self.place], at_work[self.place])
            time.sleep(0.0005)
            with lock:
                at_work[self.place] -= 1
            return feed

    with serving(Counted(0, 2), Counted(1, 1)) as service:
        threads = [in_thread(lambda: [run(service, number) for number in range(25)]) for _ in range(6)]
        for thread, results in threads:
            thread.join(DEADLINE)
            assert results == [list(range(25))]
    assert most[0] <= 2
    assert most[1] <= 1


# Beside a pool


def pool_of(service: Service) -> GPUSessionPool:
    pool = GPUSessionPool.__new__(GPUSessionPool)
    pool._service = service
    return pool


def test_health_tells_since_when_the_oldest_request_runs() -> None:
    workers = Made(0), Made(1)
    with serving(*workers) as service:
        workers[0].runs = {"b": 7.0, "a": 5.0, "c": 9.0}
        health = pool_of(service).health()
        assert [(state.in_flight, state.running_since, state.state) for state in health] == [
            (3, 5.0, "ready"),
            (0, None, "ready"),
        ]
        workers[0].runs.clear()


@pytest.mark.parametrize("end", ["drain", "close"])
def test_a_pool_that_takes_no_more_requests_makes_no_plans(end: str) -> None:
    with serving(Made(0)) as service:
        getattr(service, end)(DEADLINE)
        with pytest.raises(ExecutionError, match=r"drain\(\) was called|is closed"):
            pool_of(service).warm([])


def test_a_forked_child_does_not_end_the_service_of_its_parent() -> None:
    """The threads and the sessions are the parent's."""
    with serving(Made(0)) as service:
        service.pid += 1
        _end_at_exit(weakref.ref(service))
        service.let_go()
        assert not service.is_closed
        assert not service._is_dropped
        service.pid -= 1
        _end_at_exit(weakref.ref(service))
        assert service.is_closed


class Asked:
    """A session of a pool: it notes what it was opened with."""

    def __init__(self, model: str, *, device: Any, **options: Any) -> None:
        self.asked = device
        self.device = Device("cuda", device, f"GPU-{device}", None, None, None, None)


@pytest.mark.parametrize(("each", "threads"), [(1, 3), (2, 2), (3, 1), (4, 1), (7, 1)])
def test_each_session_has_a_thread_and_each_gpu_three(monkeypatch: pytest.MonkeyPatch, each: int, threads: int) -> None:
    """Sessions go round the GPUs, so that the first ones use all of them."""
    workers: list[Any] = []
    monkeypatch.setattr("ortgpu.session.pool.sessions.choose_devices", lambda devices: [1, 0])
    monkeypatch.setattr("ortgpu.session.pool.sessions.living.attribute", lambda session, to: None)
    open_sessions(workers.append, "model.onnx", "all", each, {}, Asked)  # type: ignore[arg-type]  # as much as is used
    assert [worker.session.asked for worker in workers] == [1, 0] * each
    assert [worker.place for worker in workers] == [0, 1] * each
    assert {(worker.most, worker.capacity) for worker in workers} == {(threads, threads)}


def test_feeds_go_to_no_memory_of_a_session_that_lost_its_gpu() -> None:
    """CUDA has freed it. The other sessions of the pool go on."""
    sessions = made_session(), made_session()
    feeds = SessionFeeds(lambda: [SimpleNamespace(session=session) for session in sessions])
    before = feeds.source()
    assert len(set(before)) == 2
    lifetime.refuse(sessions[0], STICKY)
    assert feeds.sessions == [sessions[1]]
    assert feeds.source() == before[1:]
    copied, is_whole = feeds.copied({"x": np.ones(3, np.float32)})
    assert (copied["x"].tolist(), is_whole) == ([1, 1, 1], True)
