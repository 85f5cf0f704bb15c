"""The interfaces of a service: requests, the workers of both kinds that run them, and feeds."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...diagnosis.messages import cuda_codes
from ...errors import (
    ExecutionError,
    GPUError,
    PoisonedContextError,
    ProviderFailureError,
    ProviderRequestError,
    WorkerLostError,
    manual,
)
from ...process.threads import FutureOutcome, Outcome
from ...provider import lifetime
from ...provider.devices import Device
from ...provider.interfaces import Opened, Value
from ...provider.records import VoidRecordError, read_record
from ...provider.settings import CAPTURE, options_of
from ...running.cudart import address_of

if TYPE_CHECKING:
    from typing import Protocol

    import numpy as np  # Import it only here: a session diagnoses its absence.
    from numpy.typing import NDArray

    from ...process.threads import Notice
    from ...running.copying import ParallelCopy

    class Queue(Protocol):
        """The part of a service that its requests use."""

        @property
        def must_not_wait(self) -> bool: ...

        def forget(self, request: Request) -> bool: ...


class Kind:
    """Requests of a service that may run together.

    Attributes:
        collector: the notice of the thread that collects the next batch; None while there is no such thread.
        bundle: the number of waiting requests that this thread wakes for.
    """

    def __init__(self) -> None:
        self.collector: Notice | None = None
        self.bundle = 1
        self.is_closed = False

    def serve(self, first: Request, notice: Notice) -> None:
        """Collect a batch that begins with a request, run it and answer. In a thread of the service."""
        raise NotImplementedError


class Request:
    """A request. The service never reads it later from a list or dict of the caller.

    Attributes:
        joining: the kind of requests that it may be joined with; None for a request of a pool.
        form: the types and shapes of its inputs without the first axis. None: it runs alone.
        items: the length of the first axis of its inputs.
        is_waited_for: the caller waits for its result at once.
        is_copied: its run reads no array of the caller.
        sheet, row: the joined arrays with a copy of the request, and its first row there.
    """

    __slots__ = (
        "__weakref__", "arrived", "feed", "form", "is_copied", "is_waited_for", "items", "joining", "names", "outcome",
        "row", "service", "sheet",
    )  # fmt: skip

    def __init__(
        self,
        service: Queue,
        names: Any,
        feed: Any,
        outcome: Outcome[Any],
        joining: Kind | None = None,
        items: int = 1,
        form: object = None,
    ) -> None:
        self.service, self.names, self.feed, self.outcome = service, names, feed, outcome
        self.joining, self.items, self.form = joining, items, form
        self.is_waited_for, self.is_copied = False, True
        self.sheet: Any = None
        self.row = 0
        self.arrived = time.monotonic()
        # The reference is weak, since callers keep futures for long.
        (outcome.future if isinstance(outcome, FutureOutcome) else outcome).leave = weakref.WeakMethod(self._leave)

    def runs_with(self, other: Request) -> bool:
        return self.joining is other.joining and self.form == other.form and self.names == other.names

    def wait(self) -> None:
        """Wait for the end, since the run reads the caller's array. A thread of the service would wait for itself."""
        if not self.service.must_not_wait:
            try:
                self.outcome.wait()
            except BaseException:  # an interrupt of the wait
                self.outcome.cancel()
                raise

    def _leave(self) -> None:
        """Leave the queue after a cancellation."""
        if self.service.forget(self) and not self.outcome.begin():  # begin() tells all waiters of the future.
            self.outcome.drop()


class NotBegunError(Exception):
    """A request did not reach the session of a worker, and can run on another one."""


class Worker:
    """A session that runs requests of a service, in this process or in its own.

    Attributes:
        place: the index of its GPU among the GPUs of the pool.
        most: the number of requests that it can run at a time.
        capacity: ``most``, or 0 while it can run no requests.
        runs: the requests and batches that it runs, with the time of their beginning.
        is_lost: it runs no more requests, because of ``last_error``.
        restarts: the number of processes that replaced a dead one.
        session: the session, if it is in this process.
    """

    capacity: int
    restarts = 0
    is_lost = False
    last_error: GPUError | None = None
    session: Opened | None = None

    def __init__(self, place: int, most: int) -> None:
        self.place, self.most = place, most
        self.runs: dict[object, float] = {}

    @property
    def state(self) -> str:
        return "ready"

    @property
    def pid(self) -> int | None:
        """The process of its session."""
        return os.getpid()

    @property
    def device(self) -> Device:
        """The device of its session, once a session was opened."""
        raise NotImplementedError

    @property
    def declared(self) -> tuple[Sequence[Value], Sequence[Value]]:
        """The inputs and outputs of the model."""
        raise NotImplementedError

    def run(self, output_names: Any, feed: Any) -> Any:
        """Run a request. Raises NotBegunError, WorkerLostError, or the session's error."""
        raise NotImplementedError

    def warm(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        """Plan for the shapes of ``feeds``, like GPUSession.warm. Raises the errors of :meth:`run`."""
        raise NotImplementedError

    def has_lost(self, error: ExecutionError) -> bool:
        """Return True if ``error`` of a run means that the session has lost its GPU, and will refuse all runs."""
        return self.session is not None and is_lost(self.session, error)

    def shares(self, error: GPUError) -> bool:
        """Return True if ``error`` of another session ends this session, too."""
        if self.session is None or not isinstance(error, PoisonedContextError):
            return False
        return lifetime.error_of(self.session) is not None

    def refuse(self, error: GPUError) -> None:
        """Have the session refuse all further runs with ``error``."""
        if self.session is not None:
            lifetime.refuse(self.session, error)

    def replace(self, error: GPUError) -> bool:
        """Replace the process: its runs raise ``error``, while others succeed. False: the session is in this one."""
        return False

    def begin_ending(self) -> None:
        """Prepare for the end of the service. Current runs may end."""

    def kill(self) -> None:
        """End the remaining runs, if possible."""

    def close(self, timeout: float | None) -> None:
        """Close the session after its last run. Closing twice is fine."""
        raise NotImplementedError


class Feeds:
    """Copies feeds of requests for the service, and gives memory for joined feeds.

    Attributes:
        large: the bytes from which several threads copy arrays of an eighth of them, on average: each takes some µs.
    """

    large = 2 << 20
    _memory: Any  # FeedCopies or OrdinaryMemory

    @property
    def _threads(self) -> ParallelCopy | None:
        """The threads that copy large arrays."""
        return None

    def fill(self, to: NDArray[Any], *arrays: NDArray[Any]) -> None:
        """Copy ``arrays`` to ``to``, one after another. ``to`` is contiguous, and of the same type."""
        is_large = to.nbytes >= max(self.large, len(arrays) * self.large // 8) and not to.dtype.hasobject
        if is_large and self._threads is not None and all(array.flags.c_contiguous for array in arrays):
            self._threads.join(address_of(to), [(address_of(array), array.nbytes) for array in arrays])
            return
        items, start = to.reshape(-1), 0
        for array in arrays:
            items[start : start + array.size].reshape(array.shape)[...] = array  # without the interpreter lock
            start += array.size

    def pass_through(self, feed: Any) -> Any:
        """Return the feed of a waiting caller, with the caller's arrays.

        Raises ProviderRequestError, TypeError if no worker can take the feed.
        """
        raise NotImplementedError

    def copied(self, feed: Any, waits: Iterable[Callable[[], object]] = ()) -> tuple[Any, bool]:
        """Return a copy of a feed, and True if all of it was copied, like FeedCopies. Raises as above."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        array: NDArray[Any] = self._memory.empty(shape, dtype)
        return array

    def source(self) -> tuple[int, ...]:
        """Return an identity of the memory of :meth:`empty`. It changes when a session has lost its GPU."""
        return ()

    def close(self) -> None:
        """Free all unused memory."""
        if "_memory" in vars(self):
            self._memory.close()


def twice_lost(first: GPUError, error: WorkerLostError) -> WorkerLostError:
    """Return the error of a request whose runs lost two processes."""
    return WorkerLostError(
        f"two worker processes were lost while they ran this request: {error.cause}",
        evidence=[first.summary, error.summary],
        fixes=error.fixes,
        others=[first],
        worker=error.worker,
        device=error.device,
        cause=error.cause,
    )


def check(sessions_per_device: int, options: Mapping[str, Any]) -> None:
    """Raise ValueError or ProviderRequestError if no pool can do this."""
    if sessions_per_device < 1:
        raise ValueError(f"sessions_per_device must be at least 1, not {sessions_per_device}")
    if options.get("cuda_graph") or _has_graph(options.get("tuned")):
        raise ProviderRequestError(
            "a GPUSessionPool cannot replay CUDA graphs",
            evidence=["during a capture CUDA refuses GPU memory to all threads, and its other sessions need some"],
            fixes=[manual("leave out cuda_graph and records with a graph, or open a GPUSession in a process per GPU")],
            requested="cuda_graph",
        )


def _has_graph(tuned: Any) -> bool:
    """Return True if the caller's record has a CUDA graph. The sessions refuse a file that is no record."""
    if not isinstance(tuned, (str, os.PathLike)) or tuned == "now":
        return False
    try:
        return CAPTURE in options_of(read_record(tuned).named.settings)
    except (VoidRecordError, FileNotFoundError):
        return False


def options_of_others(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for all sessions after the first, if the first is on a GPU.

    The first session has warned of nodes on the CPU, and placement is the same for all. The others must not go to the
    CPU, since their requests would be much slower there than the rest.
    """
    changed = {**options, "allow_cpu": False}
    return changed if options.get("cpu_nodes", "warn") != "warn" else {**changed, "cpu_nodes": "allow"}


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call each of ``waits``. Then raise an interrupt, or else the first error, with the others attached."""
    errors: list[BaseException] = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - it is raised after the end of all waits
            errors.append(error)
    if not errors:
        return
    interrupt = next((error for error in errors if not isinstance(error, Exception)), None)
    first, *others = errors
    try:
        if interrupt is None and isinstance(first, GPUError):
            first.with_others((*first.others, *(other for other in others if isinstance(other, GPUError))))
        raise interrupt or first
    finally:
        del errors, interrupt, first, others  # Their tracebacks hold this frame.


def is_lost(session: Opened, error: BaseException) -> bool:
    """Return True if the error reports the loss of the GPU or its context, and the driver does not contradict it."""
    if isinstance(error, ProviderFailureError):
        is_loss = error.library == "CUDA" and error.status in [cuda_codes.name_of(code) for code in cuda_codes.LOST]
        refuses = lifetime.error_of(session) is not None
        return is_loss and (refuses or not lifetime.gpu_works(lifetime.device_of(session).ordinal))
    return isinstance(error, PoisonedContextError)
