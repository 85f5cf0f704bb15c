"""A service: one queue of requests, the threads that take them, and the workers that run them.

The threads belong to the service, not to a worker. An idle thread takes a request, or collects a batch, and runs it on
the least busy worker. After the loss of a worker its request runs once more in the same thread.

Signal handlers and finalizers of the program may use a service at any moment. So callers change the queue only by
single steps of C, and wake a thread by a Notice. The lock is for the service's own threads, since no signal handler
runs there. The garbage collector may call a finalizer in such a thread. The same thread answers the finalizer's
request; see :meth:`Service.ask`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ExecutionError, GPUError, PoisonedContextError, ProviderFailureError, WorkerLostError, manual
from ...process.background import AT_EXIT, Thread, log, logged, may_wait_for_runs, owners, this_thread, uninterrupted
from ...process.threads import Notice, drop_own_frames, is_in_callback
from ...provider import lifetime
from .workers import Kind, NotBegunError, Request, Worker, twice_lost

if TYPE_CHECKING:
    from ...model.files import ModelSource
    from ...provider.devices import Device
    from .workers import Feeds

_LOOK = 0.02  # seconds between two looks of a waiting caller; an interrupt seldom loses a notice
_ENDING = 5.0  # seconds for threads to end after the end of their workers
_IDLE = 1.0  # seconds for idle threads to end
_DEAD = 1 << 20  # the load of a worker without a process, among requests
CLOSING = 30.0  # default seconds that close() waits for requests in worker processes


@dataclass(frozen=True, slots=True)
class LostDevice:
    """A GPU that a pool has lost, and the error that reported the loss."""

    device: Device
    error: GPUError


class Service:
    """The queue and the threads of a pool, or of a session with joined requests.

    Args:
        name: the name of its threads.
        what: the name of the service in messages.
        feeds: copies the feeds of requests.
        owns: True if the service closes its workers.
    """

    def __init__(self, name: str, what: str, feeds: Feeds, *, owns: bool = True) -> None:
        self._name, self._what, self.feeds, self._owns = name, what, feeds, owns
        self.pid = os.getpid()
        self.model: ModelSource | None = None  # the model of the sessions, for checks of its content
        self.waiting: deque[Request] = deque()
        self.workers: list[Worker] = []
        self.serving: tuple[Worker, ...] = ()  # the workers that are not lost
        self.lost: tuple[LostDevice, ...] = ()
        self.threads: list[Thread] = []
        self.most = 0  # the most concurrent requests
        self.is_closed = self.is_draining = False
        self._is_dropped = False  # True after let_go(): waiting requests are answered, and then the threads end.
        self._own: set[int] = set()  # threads that must not wait for each other
        self._idle: deque[Notice] = deque()  # notices of threads that wait for requests
        self._busy: deque[Notice] = deque()  # notices of threads that wait for a worker, or for more of a batch
        self._room = Notice()  # notice of a free place in the queue
        self._lock = threading.RLock()
        weakref.finalize(self, _end_at_exit, weakref.ref(self))

    # For callers

    @property
    def is_over(self) -> bool:
        return self.is_closed or self.is_draining or not self.serving

    @property
    def must_not_wait(self) -> bool:
        """True in a thread of the service, and in a thread with a lock that the service may need."""
        return threading.get_ident() in self._own or not may_wait_for_runs()

    @property
    def is_hopeless(self) -> bool:
        """True if no waiting request can ever begin."""
        return self.is_closed or not self.serving or (self._is_dropped and not self._has_capacity)

    @property
    def _has_capacity(self) -> bool:
        return any(worker.capacity for worker in self.serving)

    def runs_of(self, joining: Kind) -> int:
        """Return the number of running batches of a kind."""
        count = 0
        for worker in self.workers:
            for run in list(worker.runs):
                count += getattr(run, "joining", None) is joining
        return count

    def ask(
        self,
        request: Request,
        limit: int,
        *,
        raises: Callable[[], GPUError] | None = None,
        keep: Callable[[Request], object] | None = None,
    ) -> None:
        """Queue a request, once fewer than ``limit`` of its kind wait. If it would wait, ``raises`` makes an error.

        ``keep`` copies its feed, unless the caller waits for the result.

        A thread of the service would wait for itself. A thread with a lock or a turn might wait for a thread that needs
        it. Both run the request at once, since a finalizer or handler may wait for it, and its notice may be this
        thread's own. Only requests from the callback of a future are queued, without a limit. Otherwise callbacks would
        run within each other.

        Raises:
            GPUError: the service takes no more requests, or ``raises`` made the error.
        """
        # This is `not may_wait_for_runs()`, without that call where no session takes turns: each request comes here.
        is_bound = this_thread.holds._is_owned() or (owners and not may_wait_for_runs())  # type: ignore[attr-defined]
        if is_bound or threading.get_ident() in self._own:
            if request.is_waited_for or is_bound or not is_in_callback():
                self._answer_here(request)
                return
            limit = sys.maxsize
        joining = request.joining
        while True:
            if self.is_closed or self.is_draining or not self.serving or (joining is not None and joining.is_closed):
                raise self.why_over(joining)
            if len(self.waiting) < limit or sum(each.joining is joining for each in list(self.waiting)) < limit:
                break
            if raises is not None:
                raise raises()
            self._room.take(_LOOK)
        if keep is not None:
            keep(request)
        self.waiting.append(request)
        notice = joining.collector if joining is not None and request.form is not None else None
        if joining is not None and notice is not None:
            if request.items > 1 or len(self.waiting) >= joining.bundle:
                notice.give()
        else:
            self._wake()
        # Another thread may have closed the service meanwhile.
        if self.is_closed or not self.serving or (joining and joining.is_closed):  # type: ignore[redundant-expr]
            uninterrupted(self.refuse_waiting)

    def result_of(self, request: Request, limit: int, *, raises: Callable[[], GPUError] | None = None) -> Any:
        """Queue a request like :meth:`ask`, and return its result. An interrupt of the wait drops the request.

        The caller keeps no reference to the request. It holds the exception, and so the traceback and its frames.
        """
        request.is_waited_for = True
        try:
            self.ask(request, limit, raises=raises)
            return request.outcome.result()
        except BaseException as error:  # noqa: BLE001 - it is raised again
            request.outcome.cancel()
            raise drop_own_frames(error)  # noqa: B904 - the same error
        finally:
            del request

    def is_refused(self, request: Request) -> bool:
        """Return True if a waiting request must not run any more."""
        joining = request.joining
        return self.is_closed or not self.serving or (joining is not None and joining.is_closed)

    def forget(self, request: Request) -> bool:
        """Take a request out of the queue. Return False if it is not there."""
        try:
            self.waiting.remove(request)
        except ValueError:
            return False
        self._room.give()
        return True

    def refuse_waiting(self) -> None:
        """Answer all refused requests. It takes no lock; an interrupt must not reach it."""
        for request in list(self.waiting):
            if self.is_refused(request) and self.forget(request):
                if request.outcome.begin():
                    request.outcome.fail(self.why_over(request.joining))
                else:  # It was cancelled.
                    request.outcome.drop()

    def why_over(self, joining: Kind | None = None) -> GPUError:
        if joining is not None and joining.is_closed:
            what = "service of joined requests"
            return ExecutionError(f"this {what} is closed", fixes=[manual("make a new one by batched()")])
        if self.is_closed:
            return ExecutionError(f"this {self._what} is closed", fixes=[manual(f"open a new {self._what}")])
        if self.serving:
            return ExecutionError(
                f"this {self._what} takes no more requests: drain() was called",
                fixes=[manual(f"open a new {self._what}")],
            )
        causes = [lost.error for lost in self.lost]
        evidence = [f"{lost.device}: {lost.error.summary}" for lost in self.lost]
        for cause in causes:
            if isinstance(cause, PoisonedContextError):
                return PoisonedContextError(
                    cause.summary, evidence=evidence, fixes=cause.fixes, others=causes, cuda_code=cause.cuda_code
                )
        return ExecutionError(
            f"no GPU of this {self._what} is left",
            evidence=evidence,
            fixes=[manual(f"open a new {self._what}: it says what is wrong with a GPU that it cannot use")],
            others=causes,
        )

    def forked(self) -> GPUError:
        """Return the error for a forked process: the service was opened before the fork."""
        return lifetime.forked(
            f"this {self._what} was opened before this process was forked, and its threads are in the parent",
            f"it was opened in process {self.pid}; this is process {os.getpid()}",
            self.pid,
        )

    def drain(self, timeout: float | None) -> None:
        """Take no more requests, and wait for all others to end. A thread of the service does not wait."""
        until = None if timeout is None else time.monotonic() + timeout
        self.is_draining = True
        self._room.give()  # Callers that wait for a place are refused now.
        while not self.must_not_wait and not self.is_closed:
            waiting, running = len(self.waiting), max(len(self.threads) - len(self._idle), 0)
            if not running and not waiting:
                return
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"after {timeout} s, {running} requests still run and {waiting} wait")
            time.sleep(_LOOK / 2)

    def close(self, timeout: float | None = None, patience: float | None = None) -> None:
        """End the threads and close the workers. A thread of the service does not wait for them.

        Raises TimeoutError if a run has not ended after ``timeout`` seconds and cannot be ended.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self.is_closed = True
        uninterrupted(self.refuse_waiting)
        self._wake_all()
        if self.must_not_wait:
            return
        for worker in self.workers:
            worker.begin_ending()
        running = [thread for thread in list(self.threads) if not thread.wait(_left(until))]
        if running:
            for worker in self.workers:
                worker.kill()
            until = time.monotonic() + _ENDING
            if any(not thread.wait(_left(until)) for thread in running):
                raise TimeoutError(f"after {timeout} s, requests of this {self._what} still run")
        self._close_workers(patience)

    def let_go(self) -> None:
        """Tell the service that nobody will use it any more.

        Idle threads end at once. Busy threads end after their answers, and this method does not wait for them.
        """
        if os.getpid() != self.pid:
            return
        self._is_dropped = True
        self._wake_all()
        if not self.must_not_wait and not self.waiting and not any(worker.runs for worker in self.workers):
            until = time.monotonic() + _IDLE  # The wait is short: a closing session may need a lock of this thread.
            for thread in list(self.threads):
                thread.wait(_left(until))

    # For workers

    def open(self) -> None:
        """Serve with all workers that are not lost. Raises RuntimeError if the system gives no threads."""
        self.most = sum(worker.most for worker in self.workers)
        for number in range(self.most):
            # The threads are daemons, since a forgotten thread must not keep the program from ending.
            Thread(self._work, f"{self._name}_{number}").start(self.threads.append)
        with this_thread.holds, self._lock:
            self.serving = tuple(worker for worker in self.workers if not worker.is_lost)

    def notice(self, worker: Worker) -> None:
        """Serve with a worker that can run requests again, or without a lost one. The worker's own thread calls it."""
        self._own.add(threading.get_ident())
        if worker.is_lost and worker.last_error is not None:
            self._take_out(worker, worker.last_error, is_lost=True, alone=True)
        self._wake_all()

    @property
    def has_lost_threads(self) -> bool:
        """True if a thread has ended too early. No known cause ends a thread."""
        return not self.is_closed and any(not thread.is_alive() for thread in list(self.threads))

    # In a thread of the service

    def _work(self) -> None:
        self._own.add(threading.get_ident())
        notice = Notice()
        is_over = False
        while not is_over:
            try:
                is_over = self._take(notice)
            except BaseException as error:  # noqa: BLE001 - callers wait for this thread
                log(logging.ERROR, "a thread that serves requests goes on after an exception", exc_info=error)
                with suppress(ValueError):
                    self._idle.remove(notice)
        self._own.discard(threading.get_ident())
        if all(thread is threading.current_thread() or not thread.is_alive() for thread in self.threads):
            with logged("a session could not be closed"):
                self._close_workers(None)

    def _take(self, notice: Notice) -> bool:
        """Answer a request or a batch, or wait for a request. Return True if there will be no more."""
        self._idle.append(notice)  # Append it before the look at the queue, so that later requests wake the thread.
        with this_thread.holds, self._lock:
            request = worker = None
            if self.waiting:
                request, worker = self._choose(notice)
            is_over = request is None and (self.is_closed or (self._is_dropped and self._has_answered_all()))
        if request is None:
            if not is_over:
                notice.take()
            self._idle.remove(notice)
            return is_over
        if self.waiting:
            self._wake()
        if worker is None:
            assert request.joining is not None
            request.joining.serve(request, notice)
        elif request.outcome.begin():
            self.answer(request, worker)
        else:
            self.release(worker, request)
            request.outcome.drop()
        del request  # The traceback of the request's error holds this frame.
        return False

    def _has_answered_all(self) -> bool:
        """Return True if no request waits. Requests that can never run are refused here."""
        if not self._has_capacity:
            self.is_closed = True
            self.refuse_waiting()
        return not self.waiting

    def _choose(self, notice: Notice) -> tuple[Request | None, Worker | None]:
        """Take a request that can run now out of the queue. Without a worker the request is the first of a batch."""
        for request in list(self.waiting):
            joining, worker = request.joining if request.form is not None else None, None
            if joining is None:
                worker = self._claim(request)
                if worker is None:
                    break
            elif joining.collector is not None:
                continue
            self._idle.remove(notice)  # Unlist it before the request leaves the queue, so that drain() always sees it.
            if self.forget(request):
                if joining is not None:
                    joining.collector = notice
                    self._busy.append(notice)
                return request, worker
            self._idle.append(notice)
            if worker is not None:
                worker.runs.pop(request)
        return None, None

    def _claim(self, key: object, *, overload: bool = False, apart_from: int | None = None) -> Worker | None:
        """Return the least busy worker. It runs ``key`` from now on. None: no worker can run one more request.

        ``overload`` allows more requests than a worker runs at a time, and ``apart_from`` no GPU of that place.
        """
        with this_thread.holds, self._lock:
            spare, least = None, sys.maxsize
            for worker in self.serving:
                load = len(worker.runs) if worker.capacity else _DEAD
                if load < (least if overload else min(least, worker.capacity)) and worker.place != apart_from:
                    spare, least = worker, load
            if spare is not None:
                spare.runs[key] = time.time()
            return spare

    def try_start(self, batch: object, joining: Kind, notice: Notice) -> Worker | None:
        """Return a worker for a collected batch, or None if there is none now."""
        worker = self._claim(batch)
        if worker is not None:
            self.stop_collecting(joining, notice)
        return worker

    def stop_collecting(self, joining: Kind, notice: Notice) -> None:
        joining.collector = None
        self._busy.remove(notice)
        if self.waiting:  # Some requests came while the batch was still collecting.
            self._wake()

    def answer(self, request: Request, worker: Worker | None = None) -> None:
        """Run a request alone, on ``worker`` or on the least busy one, and answer it."""
        outputs: Any = None
        error: BaseException | None = None
        try:
            outputs = self.run(request, request.names, request.feed, worker)
        except BaseException as raised:  # noqa: BLE001 - the outcome raises it
            lifetime.let_go_of_variables(raised)  # They hold arrays, and this request with the error.
            error = raised
        request.feed = None  # Free the memory before the waiting thread continues.
        # Answer after the worker counts as free, and without the lock, because a callback of a future may submit.
        if error is None:
            request.outcome.give(outputs)
        else:
            request.outcome.fail(error)
            del request, error  # Break the cycle of outcome, exception and this frame.

    def _answer_here(self, request: Request) -> None:
        if self.is_refused(request):
            raise self.why_over(request.joining)
        worker = self._claim(request, overload=True)
        if request.outcome.begin():
            self.answer(request, worker)

    def run(self, key: object, names: Any, feed: Any, worker: Worker | None = None) -> Any:
        """Return the outputs of a run on ``worker``, or on the least busy one. ``worker.runs`` already has ``key``.

        If a worker process is lost during the run, the request runs once more. If the GPU may be at fault, it runs once
        more on another GPU.

        Raises:
            WorkerLostError: two worker processes were lost during the runs.
            GPUError, Exception: the errors of the session.
        """
        first: GPUError | None = None
        worker = worker or self._borrow(key)
        while True:
            try:
                return worker.run(names, feed)
            except NotBegunError:
                pass
            except WorkerLostError as error:
                if first is not None:
                    raise twice_lost(first, error) from None
                first = lifetime.fresh_copy(error)
            except (PoisonedContextError, ProviderFailureError) as error:
                return self._run_elsewhere(key, names, feed, worker, error)
            finally:
                self.release(worker, key)
            try:
                worker = self._borrow(key)
            except GPUError as over:
                raise (first or over) from None

    def _run_elsewhere(self, key: object, names: Any, feed: Any, worker: Worker, error: ExecutionError) -> Any:
        """Return the outputs of another GPU. Raise the error if there is no other GPU or the run fails there, too."""
        is_lost = worker.has_lost(error)
        if is_lost:
            self._take_out(worker, error, is_lost=True)
        other = self._claim((key, worker), overload=True, apart_from=worker.place)
        if other is None:
            raise error
        try:
            outputs = other.run(names, feed)
        except (PoisonedContextError, ProviderFailureError) as again:
            if other.has_lost(again):
                self._take_out(other, again, is_lost=True)
            raise
        except NotBegunError:
            raise error from None
        finally:
            self.release(other, (key, worker))
        if not is_lost:  # The request succeeded elsewhere, so this GPU is at fault.
            self._take_out(worker, error, is_lost=False)
        return outputs

    def _borrow(self, key: object) -> Worker:
        """Return the least busy worker, once a worker is free. Raises the reason if no worker can become free."""
        notice, has_to_run = Notice(), not may_wait_for_runs()
        self._busy.append(notice)
        try:
            while not self.is_hopeless:
                worker = self._claim(key, overload=has_to_run)
                if worker is not None:
                    return worker
                notice.take(1)
        finally:
            self._busy.remove(notice)
        self.is_closed = self.is_closed or self._is_dropped
        raise self.why_over()

    def release(self, worker: Worker, key: object) -> None:
        worker.runs.pop(key, None)
        for notice in list(self._busy):
            notice.give()
        if self.waiting:
            self._wake()

    # Lost GPUs

    def _take_out(self, worker: Worker, error: GPUError, *, is_lost: bool, alone: bool = False) -> None:
        """Remove the GPU of ``worker``, and other GPUs if the same error ends their sessions.

        A worker process is replaced instead. ``alone``: it could not be replaced, and only this worker is removed.
        """
        if not alone and worker.replace(error):
            return
        with this_thread.holds, self._lock:
            gone = [worker]
            if not alone:
                gone = [peer for peer in self.serving if peer.place == worker.place or peer.shares(error)]
            if not is_lost and len(gone) == len(self.serving):
                return  # Keep the last GPU: a passing failure must not empty the pool.
            # Keep a copy, because the traceback of the original holds the arrays of a request.
            kept = lifetime.fresh_copy(error)
            for peer in gone:
                if is_lost:
                    peer.refuse(error)
                peer.is_lost, peer.last_error = True, kept
            self.serving = tuple(peer for peer in self.serving if not peer.is_lost)
            places = {peer.place for peer in self.workers if not peer.is_lost}
            devices = {peer.place: peer.device for peer in gone if peer.place not in places}
            removed = [LostDevice(device, kept) for device in devices.values()]
            self.lost += tuple(removed)
        for lost in removed:  # Without the lock, since handlers and callbacks may wait.
            message = "%s is out of the pool [%s]: %s"
            log(logging.WARNING, message, lost.device, lost.error.code, lost.error.summary, name="ortgpu.pool")
        if self.is_closed or not self.serving:
            self.refuse_waiting()

    # Small steps

    def _wake(self) -> None:
        """Wake an idle thread. It wakes the next thread if more requests wait."""
        with suppress(IndexError):
            self._idle[-1].give()

    def wake_busy(self) -> None:
        for notice in list(self._busy):
            notice.give()

    def _wake_all(self) -> None:
        self._room.give()
        for notice in (*self._idle, *self._busy):
            notice.give()

    def _close_workers(self, patience: float | None) -> None:
        for worker in self.workers if self._owns else ():
            worker.close(patience)
        self.feeds.close()


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0)


def _end_at_exit(service: weakref.ref[Service]) -> None:
    """End a service that the program left open: ONNX Runtime must not keep running."""
    ending = service()
    if ending is not None and os.getpid() == ending.pid:
        with suppress(TimeoutError):
            ending.close(AT_EXIT, AT_EXIT)
