"""GPUSessionPool: sessions on several GPUs in one process, with each request sent to the least busy session."""

from __future__ import annotations

import functools
import math
import numbers
import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import GPUError, ProviderRequestError, manual
from ..process.background import Task, may_wait
from ..process.late import late
from ..process.threads import FutureOutcome, Outcome, drop_own_frames
from ..provider.devices import Device, DeviceRequest
from ..provider.sizes import memory_by_variable, parse_gpu_size, parse_size
from .lazily import gpu_session_class
from .pool.serving import CLOSING, LostDevice, Service
from .pool.workers import Feeds, NotBegunError, Request, Worker, wait_for_all
from .request import NAMES, PINNED_MEMORY_LIMIT, BatchedOptions, PoolArguments, Unpack, refuse_misspelt

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ..running.onnxruntimes import Results
    from .gpu_session import GPUSession
    from .pool import sessions
    from .pool.batching import Batched
else:
    sessions = late("ortgpu.session.pool.sessions")

__all__ = ["GPUSessionPool", "LostDevice", "WorkerHealth"]

_OWN = "sessions_per_device", "isolate", "deadline", "first_deadline"  # arguments


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The state of one worker of a pool: a session of this process, or one in a process of its own.

    Attributes:
        device: the device of its session.
        state: "ready"; "replacing" while a process that died has no successor yet; "lost" if there is none; "impaired"
            if a thread of the pool has ended, so that requests may wait for ever; "closed".
        pid: the process that the session is in; None while there is none.
        restarts: the number of processes that were started to replace a dead process.
        last_error: why the last process died, or why its GPU is lost; None if neither happened.
        in_flight: the number of requests that it runs. A joined run counts as one request.
        running_since: when the oldest request began, in seconds since the epoch, as time.time(); None without requests.
    """

    device: Device
    state: str
    pid: int | None
    restarts: int
    last_error: GPUError | None
    in_flight: int
    running_since: float | None = None


class GPUSessionPool:
    """A pool of sessions on several GPUs, behind one ``run``: in this process, or each in a process of its own.

    Each request goes to the session with the fewest requests. Three threads or more serve each GPU: the copies of some
    requests overlap the computation of others, as in GPUSession.map.

    Args:
        model: path or bytes, as for GPUSession.
        devices: "all" GPUs that CUDA shows this process, or a sequence of ordinals, "cuda:1" or UUIDs.
        sessions_per_device: number of sessions on each GPU; each holds its own copy of the weights in GPU memory.
        isolate: True opens each session in a worker process. A worker that dies is replaced; see below.
        deadline: seconds for a run with ``isolate``; a worker that takes longer is replaced. Opening a session may take
            ten minutes.
        first_deadline: the same for the first run of a shape in a process, because that run makes plans; two minutes
            by default. The runs of :meth:`warm` count as first runs, without a deadline.
        options: other arguments of GPUSession, by name, for every session; not ``device`` or ``cuda_graph``. With
            ``allow_cpu`` the sessions open on the CPU if no GPU can be used. ``memory``, or ORTGPU_MEMORY, is the most
            that the sessions of one GPU take together.

    Raises:
        GPUError: a session could not be opened. The others are closed.
        DeviceNotFoundError: ``devices`` names a GPU that is not there.
        ProviderRequestError: ``devices`` names a GPU twice or none at all. Or ``cuda_graph`` is set, or ``tuned`` names
            a record with a graph: a pool uses no graphs. Or ``isolate`` is set, and this is not Linux, or
            SessionOptions are given.
        ExecutionError: a worker process cannot be started, for instance without disk space for its files.
        WorkerLostError: a worker process died while it opened its session.
        TypeError, ValueError: an argument is invalid, or its name looks misspelt.
        Exception: ONNX Runtime's own, if the GPU is not the cause.

    The pool removes a GPU that is lost, and runs its requests once more on another GPU. :attr:`lost` and the log say
    why. A GPU is lost if an error says so (uncorrectable memory, a GPU that has gone), or if a request fails there with
    an error of the provider and then succeeds on another GPU. The last GPU is never removed for such an error.

    Requests that run on a GPU at the same time each need GPU memory. Feeds hold host arrays. The pool copies them, so
    you may write to them again once :meth:`submit` returns or :meth:`map` asks for the next feed. The copies count
    toward the ``pinned_memory_limit`` of a session. A pool does not pickle. In a forked child it raises
    ForkedSessionError.

    With ``isolate=True`` a pool survives a sticky CUDA error, a crash, the OOM killer and a run that hangs. A worker
    process that dies, or takes longer than ``deadline``, is replaced, and its requests run once more on another worker.
    If that worker dies too, the request raises WorkerLostError. A worker is given up if its session cannot be opened
    again in half a minute. A GPU without workers is lost.

    With ``isolate=True`` the calling process does not use CUDA. Feeds hold NumPy arrays of numbers, or CPU arrays of
    other libraries. A new worker serves the model that the pool opened, even if its path was renamed over or removed.
    After a change of the file itself no worker can be replaced. ``sess_options`` is a module's function that returns
    new SessionOptions. At the end of the interpreter, an open pool waits 30 seconds for running requests.

    Not promised: without ``isolate``, after a sticky CUDA error every session of the process and the pool raise
    PoisonedContextError. With ``isolate``, requests that run in one worker at the same time fail together, so a request
    may fail because of two others. Requests run in no fixed order; only the results of :meth:`map` have an order.
    """

    def __init__(
        self,
        model: str | bytes | os.PathLike[str],
        devices: str | Iterable[Device | DeviceRequest] = "all",
        sessions_per_device: int = 1,
        *,
        isolate: bool = False,
        deadline: float | None = None,
        first_deadline: float | None = None,
        **options: Unpack[PoolArguments],
    ) -> None:
        if "device" in options:
            raise TypeError("a pool has devices=, a sequence, and no device=")
        refuse_misspelt("GPUSessionPool", options.keys() - set(NAMES), _OWN)
        for name, value in (("deadline", deadline), ("first_deadline", first_deadline)):
            if value is not None and not (isolate and isinstance(value, numbers.Real) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number of seconds, with isolate=True, not {value!r}")
        if isolate and sys.platform != "linux":
            raise ProviderRequestError(
                f"isolate=True works on Linux only, and this is {sys.platform}",
                fixes=[manual("leave isolate out")],
                requested="isolate",
            )
        if not isinstance(devices, str) and isinstance(devices, Iterable):
            devices = list(devices)  # An iterator can be used only once.
        deadlines = deadline and float(deadline), first_deadline and float(first_deadline)
        self._closing = CLOSING if isolate else None
        feeds: Feeds
        arguments: Any = options  # The code below changes this dict, so its type is not the TypedDict.
        number = operator.index(sessions_per_device)
        memory = options.get("memory")
        size = memory_by_variable() if memory is None else parse_gpu_size("memory", memory)
        if size is not None and (memory is not None or number > 1):  # Otherwise each session reads the variable.
            arguments["memory"] = size // max(number, 1) if isinstance(size, int) else size / max(number, 1)
        if isolate:
            # This import is late because it imports numpy, and a session diagnoses the absence of numpy.
            from .pool.isolated import ProcessFeeds, open_processes

            feeds = copies = ProcessFeeds(
                parse_size("pinned_memory_limit", options.get("pinned_memory_limit", PINNED_MEMORY_LIMIT))
            )
        else:
            from .gpu_session import GPUSession as GPUSession  # raises the reason if ONNX Runtime cannot be imported

            feeds = sessions.SessionFeeds(lambda: service.serving)
        self._service = service = Service("ortgpu-pool", "GPUSessionPool", feeds)
        # End it too if the pool is dropped without close().
        weakref.finalize(self, service.let_go).atexit = False
        service.model = model
        try:
            if isolate:
                open_processes(service, model, devices, number, arguments, gpu_session_class, deadlines, copies)
            else:
                sessions.open_sessions(service.workers.append, model, devices, number, arguments, gpu_session_class())
            service.open()
        except BaseException as error:  # noqa: BLE001 - it is raised again
            service.close(0)
            raise drop_own_frames(error)  # noqa: B904 - the same error
        # The latest requests, running and waiting
        self._submitted: deque[weakref.ref[Outcome[Any]]] = deque(maxlen=2 * service.most)

    @property
    def sessions(self) -> tuple[GPUSession, ...]:
        """The open GPUSessions that serve requests. With ``isolate`` they are in other processes, and this is empty."""
        found: Any = [worker.session for worker in self._service.serving if worker.session is not None]
        return tuple(found)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that serve requests, each once, in the order of ``devices``."""
        by_place = {worker.place: worker.device for worker in self._service.serving}
        return tuple(by_place[place] for place in sorted(by_place))

    @property
    def lost(self) -> tuple[LostDevice, ...]:
        """The GPUs that were removed, in the order of their removal."""
        return self._service.lost

    @property
    def queued(self) -> int:
        """The number of requests that wait for a session."""
        return len(self._service.waiting)

    def __len__(self) -> int:
        """Return the number of sessions that serve requests."""
        return len(self._service.serving)

    def health(self) -> tuple[WorkerHealth, ...]:
        """Return the state of each worker, in the order of opening. A death shows within a second.

        Raises ForkedSessionError in a forked child.
        """
        self._refuse_after_fork()
        return tuple(self._health_of(worker) for worker in self._workers)

    def _health_of(self, worker: Worker) -> WorkerHealth:
        if self._closed:
            state = "closed"
        elif worker.is_lost:
            state = "lost"
        else:
            state = "impaired" if self._service.has_lost_threads else worker.state
        runs = list(worker.runs.values())
        return WorkerHealth(
            worker.device, state, worker.pid, worker.restarts, worker.last_error, len(runs), min(runs, default=None)
        )

    def warm(self, feeds: Iterable[Mapping[str, Any]], progress: Callable[[int, int], object] | None = None) -> None:
        """Have each session plan for the shapes of ``feeds`` before the first request, as GPUSession.warm does.

        All sessions do it at the same time, while requests run. ``progress`` is called with the number of finished
        sessions and the number of all sessions. A process of an isolated pool that starts later plans when a shape
        comes back.

        Raises:
            ExecutionError: the pool is closed or drained, maybe meanwhile.
            GPUError, Exception: as GPUSession.warm raises.
        """
        from ..running.warming import arrays_of, listed

        self._refuse_after_fork()
        workers = list(self._service.serving)
        if self._service.is_over or not workers:
            raise self._service.why_over()
        declared = workers[0].declared[0]
        arrays = [arrays_of(feed, {value.name: value.type for value in declared}) for feed in listed(feeds)]
        calls: list[Callable[[], None]] = [functools.partial(worker.warm, arrays) for worker in workers]
        if may_wait():
            calls = [Task(call, "ortgpu-warm").result for call in calls]

        def wait(number: int, call: Callable[[], None]) -> None:
            try:
                call()
            except NotBegunError:  # The process has ended, and its successor plans later.
                if self._service.is_over:
                    raise self._service.why_over() from None
            if progress is not None:
                progress(number, len(calls))

        wait_for_all([functools.partial(wait, number, call) for number, call in enumerate(calls, 1)])

    def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, and wait until all waiting and running requests have ended. The sessions stay open.

        Call :meth:`close` after it. New requests raise ExecutionError. In a callback of a future this does not wait.

        Raises:
            TimeoutError: after ``timeout`` seconds some still wait or run. The pool still refuses new requests.
            ForkedSessionError: the pool was opened in a parent process.
        """
        self._refuse_after_fork()
        self._service.drain(timeout)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Results:
        """Run the model on the least busy session, as InferenceSession.run does. The class lists the exceptions."""
        from ..running.pipeline import copy_names

        self._refuse_after_fork()
        service = self._service
        results: Results = service.result_of(
            Request(service, copy_names(output_names), service.feeds.pass_through(input_feed), Outcome()), service.most
        )
        return results

    def submit(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Future[Results]:
        """Submit a run and return a future of its outputs.

        The arrays of ``input_feed`` are copied, so you may fill them again at once. If an entry cannot be copied, this
        call returns only when the run has ended, unless it is made in a callback of a future. If every thread is busy
        and as many requests are waiting, this call waits for a place. If pinned memory is full, it waits for an earlier
        run. A request that has not begun can be cancelled. Callbacks of the future run in a serving thread and must not
        wait for requests. An interrupt (Ctrl-C, a time limit) during ``future.result()`` may leave its lock held, and
        other threads that wait for this future then wait forever.

        Raises:
            ExecutionError: the pool is closed or has no GPU left. A request that was waiting then gets it as the result
                of its future. It is PoisonedContextError after a sticky CUDA error.
            ForkedSessionError: the pool was opened in a parent process.
            ProviderRequestError: an array of ``input_feed`` is on a GPU.
        """
        from ..running.pipeline import copy_names

        self._refuse_after_fork()
        service, outcome = self._service, FutureOutcome[Any]()
        # A callback runs in a thread of the pool. That thread would wait for itself.
        ends = () if service.must_not_wait else self._ends()
        feed, is_copied = service.feeds.copied(input_feed, ends)
        request = Request(service, copy_names(output_names), feed, outcome)
        service.ask(request, service.most)
        self._submitted.append(weakref.ref(outcome))
        if not is_copied:
            request.wait()
        return outcome.future

    def _ends(self) -> Iterator[Any]:
        for reference in list(self._submitted):
            yield functools.partial(_wait_for, reference)

    def map(
        self,
        feeds: Iterable[Mapping[str, Any]],
        *,
        in_flight: int | None = None,
        output_names: Sequence[str] | None = None,
    ) -> Iterator[Results]:
        """Yield ``run(output_names, feed)`` for each of ``feeds``, in their order, computed on all GPUs at once.

        It works as GPUSession.map; the default of ``in_flight`` is two for each thread of the pool.

        Raises:
            TypeError, ValueError: ``feeds`` is not iterable or is a single feed; ``in_flight`` is not a positive int.
            GPUError: as :meth:`submit` raises.
        """
        from ..running.pipeline import check_arguments, copy_names, may_be_written_to, results_of

        self._refuse_after_fork()
        service = self._service
        if service.is_over:
            raise service.why_over()
        source, ahead = check_arguments(feeds, in_flight, 2 * service.most)
        names = copy_names(output_names)

        def submit(feed: Any, outcome: Outcome[Any]) -> None:
            self._refuse_after_fork()
            service.ask(Request(service, names, feed, outcome), service.most)

        if may_be_written_to(feeds, ahead):
            return results_of(submit, source, ahead, service.feeds.copied)
        return results_of(submit, map(service.feeds.pass_through, source), ahead, None)

    def batched(self, max_batch: int = 64, max_wait: float = 0.002, **options: Unpack[BatchedOptions]) -> Batched:
        """Return a service that joins concurrent small requests into batched runs, as GPUSession.batched does."""
        from ..running.kept_shapes import MOST
        from .pool.batching import Batched

        self._refuse_after_fork()
        if self._service.is_over:
            raise self._service.why_over()

        def warm(feeds: Sequence[Mapping[str, Any]]) -> None:
            self.warm(feeds[:MOST])

        return Batched(self._service, max_batch=max_batch, max_wait=max_wait, warm=warm, **options)

    def close(self, timeout: float | None = None) -> None:
        """Close the sessions and free their GPU memory. Nothing of the pool runs after it. Closing twice is fine.

        Waits for running requests. Waiting requests, and any later use, get an ExecutionError. With ``isolate``, a
        worker process is killed if it does not answer for 5 seconds, or still runs a request after ``timeout`` seconds
        (30 by default). Its requests raise WorkerLostError. In a callback of a future this does not wait.

        Raises:
            TimeoutError: without ``isolate``, requests still run after ``timeout`` seconds. The sessions are closed
                when these end.
        """
        if os.getpid() == self._service.pid:
            self._service.close(self._closing if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GPUSessionPool does not pickle: open one where it is used, or send a GPUSession, which does")

    @property
    def _workers(self) -> list[Worker]:
        return self._service.workers

    @property
    def _closed(self) -> bool:
        return self._service.is_closed

    def _refuse_after_fork(self) -> None:
        if os.getpid() != self._service.pid:
            raise self._service.forked()


def _wait_for(reference: weakref.ref[Outcome[Any]]) -> None:
    """Wait for an outcome. An outcome without references has ended already."""
    outcome = reference()
    if outcome is not None:
        outcome.wait()
