"""GPUSessionPool: one process, sessions on several GPUs, each request to the session that is least busy."""

from __future__ import annotations

import functools
import logging
import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import ExecutionError, GPUError, PoisonedContextError, ProviderFailureError, manual
from ...process.background import uninterrupted
from ...process.signals import is_of_a_handler
from ...process.threads import FutureOutcome, Outcome
from ...provider import lifetime
from ...provider.devices import Device, DeviceRequest
from .. import arguments
from .workers import Worker, open_workers, stop

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ...running.feed_copies import FeedCopies
    from ...running.pinned import PinnedMemory

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

logger = logging.getLogger("ortgpu.pool")


@dataclass(frozen=True, slots=True)
class LostDevice:
    """A GPU that was taken out of a pool, and the error that showed it to be lost."""

    device: Device
    error: GPUError


@dataclass(slots=True)
class _Request:
    output_names: Sequence[str] | None
    feed: Any  # None once it has run
    outcome: Outcome[Any]


class GPUSessionPool:
    """Sessions on several GPUs in one process, behind one ``run``.

    A request goes to the session that has the fewest. Each GPU is served by three threads or more: while it computes
    for one, the inputs and outputs of others are copied, through pinned memory as in GPUSession.map.

    Args:
        model: path or bytes, as for GPUSession.
        devices: "all" that CUDA shows this process, or those to use: ordinals, "cuda:1", UUIDs.
        sessions_per_device: each has weights of its own in the memory of the GPU.
        options: what GPUSession takes beside ``device`` and ``cuda_graph``, by name, for every session. With
            ``allow_cpu``, where no GPU can be had, as many are opened on the CPU.

    Raises:
        GPUError: one of the sessions could not be opened; the others are closed again.
        DeviceNotFoundError, ProviderRequestError: ``devices`` names a GPU that is not there, or one twice; or
            ``cuda_graph`` was asked for, which sessions that work side by side cannot have.
        TypeError, ValueError: an argument means nothing, or is nearly the name of one.
        Exception: ONNX Runtime's own, for what is not about the GPU.

    A GPU that is lost while it works is taken out: :attr:`lost` says why, and so does the log. Its requests are run
    once more, on another GPU. Lost is a GPU that an error says to be lost (memory beyond correction, a GPU that is not
    there any more), and one that fails a request with an error of the provider where another GPU then does not, as long
    as another is left. A request that fails on both is raised, and takes out neither.

    Requests that are at work on a GPU at the same time each need some of its memory for what they compute. Feeds hold
    arrays of the host, which may be written to again as soon as :meth:`submit` returns, or :meth:`map` asks for the
    next: they are copied, into pinned memory that counts toward the ``pinned_memory_limit`` of a session. A pool does
    not pickle, and in a forked child it raises ForkedSessionError.

    Not promised: to survive a sticky CUDA error, such as an illegal memory access. CUDA's word for that is that the
    process has to be restarted, whichever of its GPUs the error came from: every session refuses from then on, and so
    does the pool, with a PoisonedContextError. What must survive it needs a process for each GPU. Nor is there an order
    among requests, but that of the results of :meth:`map`.
    """

    def __init__(
        self,
        model: str | bytes | os.PathLike[str],
        devices: str | Iterable[Device | DeviceRequest] = "all",
        sessions_per_device: int = 1,
        **options: Any,
    ) -> None:
        self._pid = os.getpid()
        self._turn = threading.RLock()  # of who waits for a place: the garbage collector may make a request meanwhile
        self._room: SimpleQueue[None] = SimpleQueue()  # not empty when there may be a place
        self._lock = threading.RLock()  # guards all below, and is held for moments
        self._waiting: deque[_Request] = deque()
        self._serving: tuple[Worker, ...] = ()
        self._lost: tuple[LostDevice, ...] = ()
        self._closed = False
        self._closed_itself = False
        if "device" in options:
            raise TypeError("a pool has devices=, a sequence, and no device=")
        arguments.refuse_misspelt("GPUSessionPool", options.keys() - set(arguments.NAMES), ("sessions_per_device",))
        self._copies: FeedCopies | None = None
        self._workers: list[Worker] = []
        # Also where the pool is dropped without close(), or the interpreter ends.
        self._stop = weakref.finalize(self, _end, weakref.ref(self), self._workers, self._pid)
        try:
            open_workers(self._workers, model, devices, operator.index(sessions_per_device), options)
        except BaseException:
            self.close()
            raise
        self._serving = tuple(self._workers)
        self._threads = frozenset(thread for worker in self._workers for thread in worker.threads)
        self._limit = len(self._threads)
        # The last ones: at work, and waiting
        self._submitted: deque[weakref.ref[Outcome[Any]]] = deque(maxlen=2 * self._limit)

    @property
    def sessions(self) -> tuple[Any, ...]:
        """The GPUSessions that serve."""
        return tuple(worker.session for worker in self._serving)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that serve, each once, in the order in which they were named."""
        by_place = {worker.place: worker.session.device for worker in self._serving}
        return tuple(by_place[place] for place in sorted(by_place))

    @property
    def lost(self) -> tuple[LostDevice, ...]:
        """The GPUs that were taken out, in the order in which that happened."""
        return self._lost

    def __len__(self) -> int:
        """How many sessions serve."""
        return len(self._serving)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Any:
        """As InferenceSession.run, on the session that is least busy; see the class for what is raised."""
        outcome: Outcome[Any] = Outcome()
        try:
            self._ask(output_names, self._as_it_is_now(input_feed), outcome)
            return outcome.result()
        except BaseException:  # an interrupt, while it waits
            outcome.cancel()
            raise
        finally:
            del outcome  # it holds the exception, and that this frame

    def submit(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Future[Any]:
        """Ask for a run; the future has its outputs, or what it raised.

        The arrays of ``input_feed`` are copied, and may be filled again at once. Where something of it cannot be
        copied, this returns when the run has ended; not so in a callback of a future.
        Where every thread has a request and as many are waiting, this waits for a place among them, and where pinned
        memory is full, for a run that was submitted. A request that has
        not begun can be cancelled. Callbacks of the future run in a thread that serves, and must not wait for requests.

        The future is the standard library's, and so is what an interrupt (Ctrl-C, a time limit) does to
        ``future.result()``: it may leave the future's lock held by the thread that was interrupted, and who else waits
        for this one future then waits for ever. The pool works on. :meth:`run` and :meth:`map` have no such moment.

        Raises:
            ExecutionError: the pool is closed, or none of its GPUs is left; also for a request that was waiting then,
                as the result of its future. PoisonedContextError, where a sticky CUDA error ended them.
            ForkedSessionError: this process was forked from that of the pool.
            ProviderRequestError: an array of ``input_feed`` is on a GPU.
        """
        self._refuse_after_fork()
        # A callback of a future runs in a thread that serves: it would wait for itself.
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
        """See :meth:`ortgpu.running.feed_copies.FeedCopies.of`."""
        from ...running.device_arrays import refuse_on_gpu, with_values
        from ...running.feed_copies import FeedCopies

        refuse_on_gpu(feed)
        if self._copies is None:
            session = self._workers[0].session
            # Threads that a session also has would keep it waiting.
            ordinal = -1 if lifetime.device_of(session).is_gpu else None
            self._copies = FeedCopies(self._memories, session._pinned_memory_limit, ordinal)
        serving = self._serving
        try:
            feed = (with_values(serving[0].session, feed) if serving else None) or feed
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # else the run will say
        return self._copies.of(feed, waits)

    def _as_it_is_now(self, feed: Any) -> Any:
        from ...running.device_arrays import refuse_on_gpu
        from ...running.pipeline import as_it_is_now

        self._refuse_after_fork()
        refuse_on_gpu(feed)
        return as_it_is_now(feed)

    def _memories(self) -> list[PinnedMemory]:
        from ...running.pinned import memory_of

        return [memory_of(worker.session) for worker in self._serving if not lifetime.refuses(worker.session)]

    def map(
        self,
        feeds: Iterable[Mapping[str, Any]],
        *,
        in_flight: int | None = None,
        output_names: Sequence[str] | None = None,
    ) -> Iterator[Any]:
        """What ``run(output_names, feed)`` gives for each of ``feeds``, in their order, computed on all GPUs at once.

        As GPUSession.map: ``feeds`` may be a generator without end, which may fill the same arrays again, and of a
        ``list`` or ``tuple`` nothing is copied; ``in_flight`` is how many may have been taken whose results were not
        handed out, two for each thread of the pool unless given; the first exception comes out at its place and ends
        the iteration; ending it early waits for what is under way, and leaves nothing running.

        Raises:
            TypeError, ValueError: ``feeds`` is not iterable, or one feed; ``in_flight`` is not a positive int.
            GPUError: as :meth:`submit`.
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

    def close(self) -> None:
        """Give up the sessions and their GPU memory. What is running is waited for; what was waiting gets an
        ExecutionError as its result, and so does any later use. Closing twice is fine."""
        if os.getpid() != self._pid:
            return
        self._refuse_all()
        if self._copies is not None:
            self._copies.close()
        try:
            self._stop()
        except BaseException:  # an interrupt while it waits: what is left is done when the pool is dropped
            self._stop = weakref.finalize(self, _end, weakref.ref(self), self._workers, self._pid)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GPUSessionPool does not pickle: open one where it is used, or send a GPUSession, which does")

    @property
    def _is_over(self) -> bool:
        return self._closed or not self._serving

    # Whatever changes more than one thing is called in threads of the pool alone, where no interrupt comes: half of it
    # done, a request of somebody else would never be answered.

    def _ask(self, output_names: Sequence[str] | None, feed: Any, outcome: Outcome[Any]) -> None:
        """:meth:`submit`, of what stays as it is until the run has ended."""
        self._refuse_after_fork()
        request = _Request(output_names, feed, outcome)
        if threading.current_thread() in self._threads:  # a callback of a future: it would wait for itself
            self._append(request, sys.maxsize)
            return
        with self._turn:  # one at a time: who is interrupted leaves nobody behind who was not told
            while not self._append(request, self._limit):
                self._room.get()

    def _append(self, request: _Request, limit: int) -> bool:
        """Give it to the least busy session, or let it wait until a thread is free; False where ``limit`` do."""
        with self._lock:
            if self._is_over:
                raise self._why_over()
            if len(self._waiting) >= limit:
                return False
            worker = min(self._serving, key=_by_load)
            if self._waiting or _by_load(worker) >= worker.capacity:
                self._waiting.append(request)  # each thread that has answered looks for more
            else:
                self._wake(worker)  # first: who is woken for nothing does nothing
                worker.assigned.append(request)
            return True

    def _wake(self, worker: Worker) -> None:
        worker.put(functools.partial(self._serve, worker))

    # In a worker's thread

    def _serve(self, worker: Worker) -> None:
        try:
            while (request := self._take(worker)) is not None:
                self._answer(worker, request)
        except BaseException:  # SystemExit, say, of a callback of a future: others may be waiting
            self._wake(worker)
            raise

    def _take(self, worker: Worker) -> _Request | None:
        """A request for a thread of ``worker``, which is counted as busy."""
        found: deque[_Request]
        with self._lock:
            if worker.assigned:
                found = worker.assigned
            elif worker in self._serving and self._waiting:
                found = self._waiting
            else:
                return None
            worker.busy += 1
            self._make_room()
            return found.popleft()

    def _make_room(self) -> None:
        if self._room.empty():
            self._room.put(None)

    def _answer(self, worker: Worker, request: _Request) -> None:
        outcome = request.outcome
        if not outcome.begin():  # it was cancelled
            request.feed = None
            self._release(worker)
            outcome.drop()
            return
        try:
            outputs, error = self._run_on(worker, request.output_names, request.feed), None
        except BaseException as raised:  # noqa: BLE001 - the outcome's to raise
            outputs, error = None, raised
        request.feed = None  # who waits for the result may count on its memory
        self._release(worker)
        # After the thread counts as free, and without the lock: a callback of a future may submit.
        if error is None:
            outcome.give(outputs)
        else:
            outcome.fail(error)
            del request, outcome, error  # the outcome holds the exception, and that this frame

    def _run_on(self, worker: Worker, output_names: Sequence[str] | None, feed: Mapping[str, Any]) -> Any:
        """The outputs; where the GPU is, or may be, at fault, those of another GPU."""
        from ...running.pipeline import staged_run  # not above: it imports numpy, whose absence a session diagnoses

        try:
            return staged_run(worker.session, output_names, feed)
        except (PoisonedContextError, ProviderFailureError) as error:
            lost = _is_lost(worker, error)
            if lost:
                self._take_out(worker, error, lost=lost)
            other = self._borrow_other_than(worker)
            if other is None:
                raise
            try:
                outputs = staged_run(other.session, output_names, feed)
            except (PoisonedContextError, ProviderFailureError) as again:
                if _is_lost(other, again):
                    self._take_out(other, again, lost=True)
                raise
            finally:
                self._release(other)
                self._wake(other)  # nobody was, while it counted as busy
            if not lost:  # so it was not the request
                self._take_out(worker, error, lost=lost)
            return outputs

    def _borrow_other_than(self, worker: Worker) -> Worker | None:
        """The least busy worker of another GPU; to be released."""
        with self._lock:
            others = [each for each in self._serving if each.place != worker.place]
            other = min(others, key=_by_load) if others else None
            if other is not None:
                other.busy += 1
            return other

    def _release(self, worker: Worker) -> None:
        with self._lock:
            worker.busy -= 1

    def _take_out(self, worker: Worker, error: ExecutionError, *, lost: bool) -> None:
        """Let the GPU of ``worker`` serve no more, nor any whose sessions refuse because of the same error."""
        poisoned = isinstance(error, PoisonedContextError)
        with self._lock:
            gone = [
                each
                for each in self._serving
                if each.place == worker.place or (poisoned and lifetime.refuses(each.session))
            ]
            if not lost and len(gone) == len(self._serving):
                return  # the last one: failures that come and go must not empty the pool
            if lost:
                for each in gone:
                    lifetime.refuse(each.session, error)
            devices = {each.place: each.session.device for each in gone}
            self._serving = tuple(each for each in self._serving if each not in gone)
            # A copy: the traceback of the original holds the arrays of a request.
            self._lost += tuple(LostDevice(device, lifetime.fresh_copy(error)) for device in devices.values())
        for device in devices.values():
            logger.warning("%s is out of the pool [%s]: %s", device, error.code, error.summary)
        if not self._serving:
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
            self._make_room()
        for request in dropped:
            if request.outcome.begin():
                request.outcome.fail(self._why_over())
            else:
                request.outcome.drop()

    def _refuse_all(self) -> None:
        """What is waiting, and what is asked for from now on."""
        self._closed = True
        uninterrupted(self._refuse_waiting)

    def _close_itself(self) -> None:
        """At the end of the program, when callbacks of atexit may still use it."""
        self._closed_itself = not self._closed
        self._refuse_all()

    def _why_over(self) -> GPUError:
        if self._closed_itself:
            return ExecutionError(
                "this GPUSessionPool closed itself at the end of the program",
                evidence=["what was registered with atexit before it was opened is called after that"],
                fixes=[manual("register what uses it when it is open, or use it before the program ends")],
            )
        if self._closed:
            return ExecutionError("this GPUSessionPool is closed", fixes=[manual("open a new GPUSessionPool")])
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


def _end(pool: weakref.ref[GPUSessionPool], workers: Sequence[Worker], pid: int) -> None:
    """It was closed, nobody refers to it any more, or the program has come to its end."""
    ending = pool()
    if ending is not None and os.getpid() == pid:
        ending._close_itself()
    stop(workers, pid)


def _wait_for(reference: weakref.ref[Outcome[Any]]) -> None:
    """Nobody refers to an outcome whose run has ended."""
    outcome = reference()
    if outcome is not None:
        outcome.wait()


def _by_load(worker: Worker) -> int:
    return worker.busy + len(worker.assigned)


def _is_lost(worker: Worker, error: ExecutionError) -> bool:
    """Whether the error says that the GPU, or the process's use of it, is at its end, and the driver does not deny."""
    from ...diagnosis.messages import cuda_codes

    if isinstance(error, ProviderFailureError):
        said = error.library == "CUDA" and error.status in [cuda_codes.name_of(code) for code in cuda_codes.LOST]
        session = worker.session
        return said and (lifetime.refuses(session) or not lifetime.gpu_works(lifetime.device_of(session).ordinal))
    return isinstance(error, PoisonedContextError)
