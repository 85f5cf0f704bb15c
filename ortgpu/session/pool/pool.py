"""GPUSessionPool: sessions on several GPUs in one process, with each request sent to the least busy session."""

from __future__ import annotations

import functools
import logging
import math
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import (
    ExecutionError,
    GPUError,
    PoisonedContextError,
    ProviderFailureError,
    ProviderRequestError,
    WorkerLostError,
    manual,
)
from ...model.files import ModelSource
from ...process.background import Task, is_of_a_handler, uninterrupted
from ...process.threads import FutureOutcome, Notice, Outcome
from ...provider import lifetime, living
from ...provider.devices import Device, DeviceRequest
from ..lazily import gpu_session_class
from ..request import NAMES, PINNED_MEMORY_LIMIT, refuse_misspelt
from .workers import (
    NotBegunError,
    Worker,
    check,
    choose_devices,
    is_lost,
    named,
    options_of_others,
    stop,
    wait_for_all,
)

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ...provider.interfaces import Value
    from ...running.feed_copies import FeedCopies
    from ...running.onnxruntimes import Results
    from ...running.pinned import PinnedMemory
    from ..gpu_session import GPUSession
    from .batching import Batched
    from .isolated import HostCopies, ProcessWorker

_LOOK = 0.01  # seconds between two looks at the requests that are left

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

logger = logging.getLogger("ortgpu.pool")

# With fewer, a GPU waits while inputs and outputs are copied: ResNet-50 needs three to come to its limit on an H200.
_THREADS_PER_DEVICE = 3


@dataclass(frozen=True, slots=True)
class LostDevice:
    """A GPU that was removed from a pool, and the error that showed that it was lost."""

    device: Device
    error: GPUError


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The state of one worker of a pool: a session, and the threads or the process that serve it.

    Attributes:
        device: the device of its session.
        state: "ready"; "replacing" while a process that died has no successor yet; "lost" if there is none; "closed".
        pid: the process that the session is in; None while there is none.
        restarts: the number of processes that were started in the place of one that died.
        last_error: the error that says why the last one died, or why its GPU is lost; None if that never happened.
        in_flight: the number of requests that it runs.
    """

    device: Device
    state: str
    pid: int | None
    restarts: int
    last_error: GPUError | None
    in_flight: int


@dataclass(slots=True)
class _Request:
    output_names: Sequence[str] | None
    feed: Any  # None once it has run
    outcome: Outcome[Any]
    has_begun: bool = False
    lost_in: GPUError | None = None  # how the first worker process died that ran it


class GPUSessionPool:
    """A pool of sessions on several GPUs, behind one ``run``: in this process, or each in a process of its own.

    Each request goes to the session with the fewest requests. Three threads or more serve each GPU. While the GPU
    computes one request, the inputs and outputs of others are copied through pinned memory, as in GPUSession.map.

    Args:
        model: path or bytes, as for GPUSession.
        devices: "all" GPUs that CUDA shows this process, or a sequence of ordinals, "cuda:1" or UUIDs.
        sessions_per_device: number of sessions on each GPU; each holds its own copy of the weights in GPU memory.
        isolate: True opens each session in a worker process, which is replaced when it dies; see below.
        deadline: seconds for a run with ``isolate``; a worker that takes longer is replaced. The first run of a shape
            in a process may take two minutes, and opening a session ten.
        options: other arguments of GPUSession, by name, for every session; not ``device`` or ``cuda_graph``. With
            ``allow_cpu`` the sessions open on the CPU if no GPU can be used.

    Raises:
        GPUError: a session could not be opened. The others are closed.
        DeviceNotFoundError: ``devices`` names a GPU that is not there.
        ProviderRequestError: ``devices`` names a GPU twice or none at all; ``cuda_graph`` is set, or ``tuned``
            names a record with a graph, which a pool cannot use; or ``isolate`` is set, and this is not Linux.
        WorkerLostError: a worker process died while it opened its session.
        TypeError, ValueError: an argument is invalid, or its name looks misspelt.
        Exception: ONNX Runtime's own, if the GPU is not the cause.

    The pool removes a GPU that is lost. :attr:`lost` and the log say why. Its requests run once more on another GPU. A
    GPU is lost if an error says so (uncorrectable memory, a GPU that has gone). It also counts as lost if a request
    fails there with an error of the provider and then succeeds on another GPU, as long as another GPU is left. If the
    request fails on both GPUs, it raises its error, and neither GPU is removed.

    Requests that run on a GPU at the same time each need GPU memory. Feeds hold host arrays. The pool copies them, so
    you may write to them again once :meth:`submit` returns or :meth:`map` asks for the next feed. The copies are in
    pinned memory, which counts toward the ``pinned_memory_limit`` of a session. A pool does not pickle. In a forked
    child it raises ForkedSessionError.

    With ``isolate=True`` a pool survives a sticky CUDA error, such as an illegal memory access, a crash, the OOM killer
    and a run that hangs. A worker process that dies, or takes longer than ``deadline``, is replaced, and :meth:`health`
    says so. A request that it was running runs once more on another one. If that one dies too, the request raises
    WorkerLostError. A worker whose session cannot be opened again in half a minute is given up, and its GPU is lost
    when none is left on it. The calling process then does not use CUDA, and imports ONNX Runtime for its threads only,
    once they copy an array of 2 MiB or more. Feeds hold NumPy arrays of numbers, or arrays of other libraries on the
    CPU. Beside the copies of :meth:`submit` and of :meth:`map`, they are copied once, and so are results, through
    memory that both processes share. A worker that replaces another one opens the file of the model again.

    Not promised: without ``isolate``, a pool does not survive a sticky CUDA error. CUDA requires a restart of the
    process, whichever GPU caused the error. From then on every session and the pool raise PoisonedContextError. With
    ``isolate``, requests that run in one worker at the same time share its fate, so that one may fail because of two
    others. Requests run in no fixed order; only the results of :meth:`map` have one.
    """

    def __init__(
        self,
        model: str | bytes | os.PathLike[str],
        devices: str | Iterable[Device | DeviceRequest] = "all",
        sessions_per_device: int = 1,
        *,
        isolate: bool = False,
        deadline: float | None = None,
        **options: Any,
    ) -> None:
        self._pid = os.getpid()
        self._turn = threading.RLock()  # for waiting; reentrant, as the garbage collector may submit
        self._room = Notice()  # that there may be a place
        self._lock = threading.RLock()  # guards all below; held only briefly
        self._waiting: deque[_Request] = deque()
        self._serving: tuple[Worker, ...] = ()
        self._lost: tuple[LostDevice, ...] = ()
        self._in_hand = 0  # requests that threads have taken and not answered yet
        self._closed = False
        self._is_draining = False
        if "device" in options:
            raise TypeError("a pool has devices=, a sequence, and no device=")
        refuse_misspelt("GPUSessionPool", options.keys() - set(NAMES), ("sessions_per_device", "isolate", "deadline"))
        if deadline is not None and not (isolate and 0 < deadline < math.inf):
            raise ValueError(f"deadline must be a number of seconds, with isolate=True, not {deadline!r}")
        if isolate and sys.platform != "linux":
            raise ProviderRequestError(
                f"isolate=True works on Linux only, and this is {sys.platform}",
                fixes=[manual("leave isolate out")],
                requested="isolate",
            )
        self._is_isolated = isolate
        self._pinned_memory_limit = options.get("pinned_memory_limit", PINNED_MEMORY_LIMIT)
        self._copies: FeedCopies | HostCopies | None = None
        self._workers: list[Worker] = []
        # Close too if the pool is dropped without close(), or the interpreter ends.
        self._stop = self._finalizer()
        try:
            number = operator.index(sessions_per_device)
            if isolate:
                from .isolated import (  # not above: it imports numpy, and a session diagnoses its absence
                    HostCopies,
                    open_processes,
                )

                tell = functools.partial(_notice, weakref.ref(self))
                self._copies = copies = HostCopies(self._pinned_memory_limit)
                open_processes(self._workers, model, devices, number, options, deadline, copies, tell)
            else:
                open_sessions(self._workers, model, devices, number, options)
        except BaseException:
            self.close()
            raise
        self._serving = tuple(self._workers)
        self._threads = frozenset(thread for worker in self._workers for thread in worker.threads)
        self._limit = len(self._threads)
        # The latest requests, running and waiting
        self._submitted: deque[weakref.ref[Outcome[Any]]] = deque(maxlen=2 * self._limit)

    @property
    def sessions(self) -> tuple[GPUSession, ...]:
        """The open GPUSessions that serve requests; none with ``isolate``, whose sessions are in other processes."""
        return tuple(worker.session for worker in self._serving if isinstance(worker, SessionWorker))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that serve requests, each once, in the order of ``devices``."""
        by_place = {worker.place: worker.device for worker in self._serving}
        return tuple(by_place[place] for place in sorted(by_place))

    @property
    def lost(self) -> tuple[LostDevice, ...]:
        """The GPUs that were removed, in the order of their removal."""
        return self._lost

    @property
    def queued(self) -> int:
        """The number of requests that wait for a session."""
        return len(self._waiting) + sum(len(worker.assigned) for worker in self._serving)

    def __len__(self) -> int:
        """Return the number of sessions that serve requests."""
        return len(self._serving)

    def health(self) -> tuple[WorkerHealth, ...]:
        """Return the state of each worker, in the order in which they were opened. A death shows within a second.

        Raises ForkedSessionError in a forked child.
        """
        self._refuse_after_fork()
        return tuple(self._health_of(worker) for worker in self._workers)

    def _health_of(self, worker: Worker) -> WorkerHealth:
        state = "closed" if self._closed else worker.state if worker in self._serving else "lost"
        return WorkerHealth(worker.device, state, worker.pid, worker.restarts, worker.last_error, worker.busy)

    def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, and wait until those that wait or run have ended. The sessions stay open.

        Call :meth:`close` after it. New requests raise ExecutionError. Not to be called in a callback of a future.

        Raises:
            TimeoutError: after ``timeout`` seconds some still wait or run. The pool goes on refusing new ones.
            ForkedSessionError: the pool was opened in a parent process.
        """
        self._refuse_after_fork()
        until = math.inf if timeout is None else time.monotonic() + timeout
        self._is_draining = True
        self._room.give()  # for whoever waits for a place, and is refused
        while True:
            with self._lock:
                running, waiting = self._in_hand, self.queued
            if not running and not waiting:
                return
            if time.monotonic() >= until:
                raise TimeoutError(f"after {timeout} s, {running} requests still run and {waiting} wait")
            time.sleep(_LOOK)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Results:
        """Run the model on the least busy session, as InferenceSession.run does; the class says what is raised."""
        outcome: Outcome[Results] = Outcome()
        try:
            self._ask(output_names, self._as_it_is_now(input_feed), outcome)
            return outcome.result()
        except BaseException:  # an interrupt, while it waits
            outcome.cancel()
            raise
        finally:
            del outcome  # it holds the exception, and that this frame

    def submit(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Future[Results]:
        """Submit a run and return a future of its outputs.

        The arrays of ``input_feed`` are copied, so you may fill them again at once. If an entry cannot be copied, this
        call returns only when the run has ended, unless it is made in a callback of a future. If every thread is busy
        and as many requests are waiting, this call waits for a place. If pinned memory is full, it waits for an earlier
        run. A request that has not begun can be cancelled. Callbacks of the future run in a serving thread and must not
        wait for requests.

        The future is a ``concurrent.futures.Future``. An interrupt (Ctrl-C, a time limit) during ``future.result()``
        may leave its lock held, and other threads that wait for this future then wait forever. The pool itself goes on
        working. :meth:`run` and :meth:`map` are not affected.

        Raises:
            ExecutionError: the pool is closed or has no GPU left. A request that was waiting then gets it as the result
                of its future. It is PoisonedContextError after a sticky CUDA error.
            ForkedSessionError: the pool was opened in a parent process.
            ProviderRequestError: an array of ``input_feed`` is on a GPU.
        """
        self._refuse_after_fork()
        # A callback of a future runs in a serving thread, which would wait for itself.
        waits = threading.current_thread() not in self._threads
        ends = [functools.partial(_wait_for, each) for each in list(self._submitted)] if waits else []
        feed, is_copied = self._copied(input_feed, ends)
        outcome: FutureOutcome[Any] = FutureOutcome()
        self._ask(output_names, feed, outcome)
        self._submitted.append(weakref.ref(outcome))
        if waits and not is_copied:
            try:
                outcome.wait()
            except BaseException:  # an interrupt, while it waits
                outcome.cancel()
                raise
        return outcome.future

    def _copied(self, feed: Any, waits: Iterable[Callable[[], object]]) -> tuple[Any, bool]:
        """Copy a feed, as :meth:`ortgpu.running.feed_copies.FeedCopies.of` does."""
        if self._is_isolated:
            from .isolated import host_arrays

            assert self._copies is not None
            return self._copies.of(host_arrays(feed), waits)
        from ...running.device_arrays import refuse_on_gpu, with_values
        from ...running.feed_copies import FeedCopies

        refuse_on_gpu(feed)
        if self._copies is None:
            session = self._sessions_of(self._workers)[0].session
            # Use copying threads of our own, since those of a session are busy with its runs.
            ordinal = -1 if lifetime.device_of(session).is_gpu else None
            self._copies = FeedCopies(self._memories, session._pinned_memory_limit, ordinal)
        serving = self._sessions_of(self._serving)
        try:
            feed = (with_values(serving[0].session, feed) if serving else None) or feed
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # otherwise the run raises it
        return self._copies.of(feed, waits)

    def _as_it_is_now(self, feed: Any) -> Any:
        self._refuse_after_fork()
        if self._is_isolated:
            from .isolated import host_arrays

            return host_arrays(feed)
        from ...running.device_arrays import refuse_on_gpu
        from ...running.pipeline import as_it_is_now

        refuse_on_gpu(feed)
        return as_it_is_now(feed)

    def _memories(self) -> list[PinnedMemory]:
        from ...running.pinned import memory_of

        return [memory_of(session) for session in self.sessions if lifetime.error_of(session) is None]

    def map(
        self,
        feeds: Iterable[Mapping[str, Any]],
        *,
        in_flight: int | None = None,
        output_names: Sequence[str] | None = None,
    ) -> Iterator[Results]:
        """Yield ``run(output_names, feed)`` for each of ``feeds``, in their order, computed on all GPUs at once.

        It works as GPUSession.map. ``feeds`` may be an endless generator that fills the same arrays again. The feeds of
        a ``list`` or ``tuple`` are not copied. ``in_flight`` limits the feeds that were taken and whose results were
        not yielded yet; the default is two for each thread of the pool. The first exception is raised in its place and
        ends the iteration. Ending the iteration early waits for the running requests and leaves nothing running.

        Raises:
            TypeError, ValueError: ``feeds`` is not iterable or is a single feed; ``in_flight`` is not a positive int.
            GPUError: as :meth:`submit` raises.
        """
        from ...running.pipeline import check_arguments, for_many_runs, may_be_written_to, results_of

        self._refuse_after_fork()
        if self._is_over:
            raise self._why_over()
        source, ahead = check_arguments(feeds, in_flight, 2 * self._limit)
        submit = functools.partial(self._ask, for_many_runs(output_names))
        if may_be_written_to(feeds, ahead):
            return results_of(submit, source, ahead, self._copied)
        return results_of(submit, map(self._as_it_is_now, source), ahead, None)

    def batched(self, max_batch: int = 64, max_wait: float = 0.002, **options: Any) -> Batched:
        """Return a service that joins concurrent requests of few items into runs, as GPUSession.batched does."""
        from .batching import Batched

        self._refuse_after_fork()
        if self._is_over:
            raise self._why_over()
        return Batched(
            self.run,
            self._serving[0].declared,
            None if self._is_isolated else self._memories,
            self._pinned_memory_limit,
            sessions=len(self),
            threads=self._limit,
            max_batch=max_batch,
            max_wait=max_wait,
            **options,
        )

    def close(self) -> None:
        """Close the sessions and free their GPU memory. Closing twice is fine.

        Waits for running requests. Waiting requests, and any later use, get an ExecutionError.
        """
        if os.getpid() != self._pid:
            return
        self._refuse_all()
        try:
            self._stop()
        except BaseException:  # an interrupt during the wait: finish when the pool is dropped
            self._stop = self._finalizer()
            raise
        if self._copies is not None:
            self._copies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GPUSessionPool does not pickle: open one where it is used, or send a GPUSession, which does")

    def _finalizer(self) -> weakref.finalize[..., Self]:
        return weakref.finalize(self, _end, weakref.ref(self), self._waiting, self._workers, self._pid)

    @staticmethod
    def _sessions_of(workers: Iterable[Worker]) -> list[SessionWorker]:
        return [worker for worker in workers if isinstance(worker, SessionWorker)]

    @property
    def _is_over(self) -> bool:
        return self._closed or self._is_draining or not self._serving

    # Changes of several fields happen only in threads of the pool. An interrupt, which comes in the main thread, could
    # leave such a change half done and a request unanswered.

    def _ask(self, output_names: Sequence[str] | None, feed: Any, outcome: Outcome[Any]) -> None:
        """Queue a request whose feed does not change until its run has ended."""
        self._refuse_after_fork()
        request = _Request(output_names, feed, outcome)
        if threading.current_thread() in self._threads:  # a callback of a future, which would wait for itself
            self._append(request, sys.maxsize)
            return
        with self._turn:  # one waiter at a time, so an interrupted waiter never keeps a notice from another
            while not self._append(request, self._limit):
                self._room.take()

    def _append(self, request: _Request, limit: int) -> bool:
        """Assign the request to the least busy session, or queue it. False if ``limit`` requests wait already."""
        with self._lock:
            if self._is_over:
                raise self._why_over()
            if len(self._waiting) >= limit:
                return False
            worker = min(self._serving, key=lambda each: (not each.capacity, _by_load(each)))
            if self._waiting or _by_load(worker) >= worker.capacity:
                self._waiting.append(request)  # a thread that has answered takes the next one
            else:
                self._wake(worker)  # first: a thread woken too early just finds no request
                worker.assigned.append(request)
            return True

    def _wake(self, worker: Worker) -> None:
        worker.put(functools.partial(self._serve, worker))

    # Called in the thread of a worker

    def _serve(self, worker: Worker) -> None:
        while (request := self._take(worker)) is not None:
            try:
                self._answer(worker, request)
            finally:
                with self._lock:
                    self._in_hand -= 1

    def _take(self, worker: Worker) -> _Request | None:
        """Take a request for a thread of ``worker``, and count the thread as busy. None if there is no request."""
        found: deque[_Request]
        with self._lock:
            if worker.assigned:
                found = worker.assigned
            elif worker in self._serving and worker.capacity and self._waiting:
                found = self._waiting
            else:
                return None
            worker.busy += 1
            self._in_hand += 1
            self._room.give()
            return found.popleft()

    def _answer(self, worker: Worker, request: _Request) -> None:
        outcome = request.outcome
        if not (request.has_begun or outcome.begin()):  # it was cancelled
            request.feed = None
            self._release(worker)
            outcome.drop()
            return
        request.has_begun = True
        outputs: Any = None
        error: BaseException | None = None
        try:
            outputs = self._run_on(worker, request.output_names, request.feed)
        except (NotBegunError, WorkerLostError) as raised:
            if self._is_put_back(worker, request, raised):
                return
            error = self._why_not_run(request, raised)
        except BaseException as raised:  # noqa: BLE001 - the outcome raises it
            error = raised
        request.feed = None  # free its memory before the waiting thread goes on
        self._release(worker)
        # Answer after the thread counts as free, and without the lock, because a callback of a future may submit.
        if error is None:
            outcome.give(outputs)
        else:
            outcome.fail(error)
            del request, outcome, error  # break the cycle: outcome, exception, this frame

    def _is_put_back(self, worker: Worker, request: _Request, error: Exception) -> bool:
        """Queue the request again, as the next one, if its process did not see it or was the first that it lost."""
        if isinstance(error, WorkerLostError):
            if request.lost_in is not None:
                return False
            request.lost_in = lifetime.fresh_copy(error)
        with self._lock:
            if self._closed or not self._serving:
                return False
            worker.busy -= 1
            self._waiting.appendleft(request)
            self._wake_idle()
        return True

    def _wake_idle(self) -> None:
        """Wake a thread for each waiting request, as far as there are idle ones. A thread may find no request."""
        left = len(self._waiting)
        for worker in self._serving:
            for _ in range(min(left, worker.capacity - _by_load(worker))):
                self._wake(worker)
                left -= 1

    def _why_not_run(self, request: _Request, error: Exception) -> GPUError:
        if not isinstance(error, WorkerLostError):
            return self._why_over()
        if request.lost_in is None or request.lost_in.summary == error.summary:
            return error
        from .isolated import twice_lost

        return twice_lost(request.lost_in, error)

    def _run_on(self, worker: Worker, output_names: Sequence[str] | None, feed: Mapping[str, Any]) -> Any:
        """Return the outputs. If the GPU may be at fault, run on another GPU."""
        try:
            return worker.run(output_names, feed)
        except (PoisonedContextError, ProviderFailureError) as error:
            lost = worker.has_lost(error)
            if lost:
                self._take_out(worker, error, lost=lost)
            other = self._borrow_other_than(worker)
            if other is None:
                raise
            try:
                outputs = other.run(output_names, feed)
            except (PoisonedContextError, ProviderFailureError) as again:
                if other.has_lost(again):
                    self._take_out(other, again, lost=True)
                raise
            finally:
                self._release(other)
                self._wake(other)  # no thread was woken while it counted as busy
            if not lost:  # the request succeeded elsewhere, so this GPU is at fault
                self._take_out(worker, error, lost=lost)
            return outputs

    def _borrow_other_than(self, worker: Worker) -> Worker | None:
        """Return the least busy worker of another GPU, counted as busy until it is released. None if there is none."""
        with self._lock:
            others = [each for each in self._serving if each.place != worker.place and each.capacity]
            other = min(others, key=_by_load) if others else None
            if other is not None:
                other.busy += 1
            return other

    def _release(self, worker: Worker) -> None:
        with self._lock:
            worker.busy -= 1

    def _take_out(self, worker: Worker, error: ExecutionError, *, lost: bool) -> None:
        """Remove the GPU of ``worker`` from the pool, and GPUs whose sessions refuse because of the same error.

        A worker process is replaced instead.
        """
        if not isinstance(worker, SessionWorker):
            worker.replace(error)
            return
        poisoned = isinstance(error, PoisonedContextError)
        with self._lock:
            gone = [
                each
                for each in self._sessions_of(self._serving)
                if each.place == worker.place or (poisoned and lifetime.error_of(each.session) is not None)
            ]
            if not lost and len(gone) == len(self._serving):
                return  # keep the last GPU: a passing failure must not empty the pool
            if lost:
                for each in gone:
                    lifetime.refuse(each.session, error)
            # Keep a copy, because the traceback of the original holds the arrays of a request.
            removed = self._remove(gone, lifetime.fresh_copy(error))
        self._say_lost(removed)

    def _notice(self, worker: ProcessWorker) -> None:
        """Serve by a worker that has a new process, or serve the requests of one that has none by others."""
        removed: Sequence[LostDevice] = ()
        with self._lock:
            if worker.is_lost and worker.last_error is not None:
                removed = self._remove([worker], worker.last_error)
            if not worker.capacity:
                self._waiting.extendleft(reversed(worker.assigned))
                worker.assigned.clear()
            self._wake_idle()
        self._say_lost(removed)

    def _remove(self, gone: Sequence[Worker], error: GPUError) -> Sequence[LostDevice]:
        """Serve without some workers. Return their GPUs, if no worker is left on them. Called with the lock."""
        self._serving = tuple(each for each in self._serving if each not in gone)
        left = {each.place for each in self._serving}
        for each in gone:
            each.last_error = error
        devices = {each.place: each.device for each in gone if each.place not in left}
        lost = tuple(LostDevice(device, error) for device in devices.values())
        self._lost += lost
        return lost

    def _say_lost(self, removed: Sequence[LostDevice]) -> None:
        """Log GPUs that were removed, and refuse what waits if none is left. Not with the lock: callbacks may wait."""
        for lost in removed:
            logger.warning("%s is out of the pool [%s]: %s", lost.device, lost.error.code, lost.error.summary)
        if self._closed or not self._serving:
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
            self._room.give()
        _refuse(dropped, self._why_over)

    def _refuse_all(self) -> None:
        self._closed = True
        uninterrupted(self._refuse_waiting)

    def _why_over(self) -> GPUError:
        if self._closed:
            return _closed()
        if self._serving:
            return ExecutionError(
                "this GPUSessionPool takes no more requests: drain() was called",
                fixes=[manual("open a new GPUSessionPool")],
            )
        causes = [lost.error for lost in self._lost]
        evidence = [f"{lost.device}: {lost.error.summary}" for lost in self._lost]
        for cause in causes:
            if isinstance(cause, PoisonedContextError):
                return PoisonedContextError(
                    cause.summary, evidence=evidence, fixes=cause.fixes, others=causes, cuda_code=cause.cuda_code
                )
        return ExecutionError(
            "no GPU of this GPUSessionPool is left",
            evidence=evidence,
            fixes=[manual("open a new GPUSessionPool: it says what is wrong with a GPU that it cannot use")],
            others=causes,
        )

    def _refuse_after_fork(self) -> None:
        if os.getpid() != self._pid:
            raise lifetime.forked(
                "this GPUSessionPool was opened before this process was forked, and its threads are in the parent",
                f"it was opened in process {self._pid}; this is process {os.getpid()}",
                self._pid,
            )


def _end(pool: weakref.ref[GPUSessionPool], waiting: Sequence[_Request], workers: Sequence[Worker], pid: int) -> None:
    """End the pool: it was closed or dropped, or the program ends."""
    if os.getpid() == pid:
        ending = pool()
        if ending is not None:
            ending._refuse_all()
        else:  # no thread served these: all processes were being replaced
            _refuse(waiting, _closed)
        stop(workers)


def _refuse(requests: Iterable[_Request], why: Callable[[], GPUError]) -> None:
    for request in requests:
        if request.has_begun or request.outcome.begin():
            request.outcome.fail(why())
        else:
            request.outcome.drop()


def _closed() -> GPUError:
    return ExecutionError("this GPUSessionPool is closed", fixes=[manual("open a new GPUSessionPool")])


def _notice(pool: weakref.ref[GPUSessionPool], worker: ProcessWorker) -> None:
    told = pool()
    if told is not None:
        told._notice(worker)


def _wait_for(reference: weakref.ref[Outcome[Any]]) -> None:
    """Wait for an outcome. One that nobody refers to has ended already."""
    outcome = reference()
    if outcome is not None:
        outcome.wait()


def _by_load(worker: Worker) -> int:
    return worker.busy + len(worker.assigned)


# The sessions of this process with the threads that call them, opened together and closed together


class SessionWorker(Worker):
    """A session of this process, and the threads that call it."""

    def __init__(self, session: GPUSession, place: int) -> None:
        super().__init__(place)
        self.session = session

    @property
    def device(self) -> Device:
        return self.session.device

    @property
    def declared(self) -> tuple[Sequence[Value], Sequence[Value]]:
        return self.session.get_inputs(), self.session.get_outputs()

    def run(self, output_names: Any, feed: Any) -> Any:
        from ...running.pipeline import staged_run  # not above: it imports numpy, and a session diagnoses its absence

        return staged_run(self.session, output_names, feed)

    def has_lost(self, error: ExecutionError) -> bool:
        return is_lost(self.session, error)

    def close(self) -> None:
        self.session.close()


def open_sessions(
    workers: list[Worker],
    model: ModelSource,
    devices: str | Iterable[Device | DeviceRequest],
    sessions_per_device: int,
    options: dict[str, Any],
) -> None:
    """Fill ``workers`` with one worker for each session, going round the devices ``sessions_per_device`` times.

    The first session opens in this thread, so that its warnings name the caller and a general fault is diagnosed only
    once. The others open together, in threads. After an error ``workers`` has those that are open.
    """
    check(sessions_per_device, options)
    chosen = choose_devices(named(devices))
    places = [place for _ in range(sessions_per_device) for place in range(len(chosen))]
    opened: dict[int, GPUSession] = {}  # filled by threads: an interrupt here loses no session
    open_session: Callable[..., GPUSession] = gpu_session_class()
    try:
        _open_all(opened, functools.partial(open_session, model), [chosen[place] for place in places], options)
    finally:
        workers += [SessionWorker(opened[number], places[number]) for number in sorted(opened)]
    for worker in workers:
        worker.start(-(-_THREADS_PER_DEVICE // sessions_per_device))


def _open_all(
    opened: dict[int, GPUSession],
    open_session: Callable[..., GPUSession],
    devices: Sequence[DeviceRequest],
    options: dict[str, Any],
) -> None:
    def open_one(number: int) -> None:
        opened[number] = open_session(device=devices[number], **options)

    open_one(0)
    others = range(1, len(devices))
    if not opened[0].device.is_gpu:  # allow_cpu: open one after the other, so that each warns the caller
        for number in others:
            open_one(number)
        return
    options = options_of_others(options)
    tasks = [Task(functools.partial(open_one, number), f"ortgpu-open-{devices[number]}") for number in others]
    try:
        wait_for_all(task.result for task in tasks)
    finally:
        del tasks  # the traceback of an error holds this frame
    for number in others:
        living.attribute(opened[number], to=opened[0])
