"""The workers of a service, which run its requests, as all of it but their two kinds sees them. How pools open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...diagnosis.messages import cuda_codes
from ...environment.gpu.cuda import initialise
from ...errors import (
    ExecutionError,
    GPUError,
    PoisonedContextError,
    ProviderFailureError,
    ProviderRequestError,
    WorkerLostError,
    manual,
)
from ...provider import lifetime
from ...provider.devices import Device, DeviceRequest, check_form, choose_visible, ordinal_of, plain_request
from ...provider.interfaces import Opened, Value
from ...provider.records import VoidRecordError, read_record
from ...provider.settings import CAPTURE, options_of

if TYPE_CHECKING:
    import numpy as np  # not above: a session diagnoses its absence
    from numpy.typing import NDArray


class NotBegunError(Exception):
    """A request did not reach the session of a worker, and can run on another one."""


class Worker:
    """A session that runs requests of a service: in this process, or in one of its own.

    Attributes:
        place: the index of its GPU among those of the pool.
        most: the number of requests that it can run at a time.
        capacity: the same, or 0 while it can run none.
        runs: the requests and batches that it runs, with the time at which each began.
        is_lost: it runs no more requests, for ``last_error``.
        restarts: the number of processes that were started in the place of one that died.
        is_replaceable: :meth:`replace` can be called.
    """

    capacity: int
    restarts = 0
    is_lost = False
    is_replaceable = False
    last_error: GPUError | None = None

    def __init__(self, place: int, most: int) -> None:
        self.place, self.most = place, most
        self.runs: dict[object, float] = {}

    @property
    def state(self) -> str:
        return "ready"

    @property
    def pid(self) -> int | None:
        """The process that its session is in."""
        return os.getpid()

    @property
    def device(self) -> Device:
        """The device of its session, once one was opened."""
        raise NotImplementedError

    @property
    def declared(self) -> tuple[Sequence[Value], Sequence[Value]]:
        """The inputs and outputs of the model."""
        raise NotImplementedError

    def run(self, output_names: Any, feed: Any) -> Any:
        """Run a request. Raises NotBegunError, WorkerLostError, or as the session raises."""
        raise NotImplementedError

    def warm(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        """Plan for the shapes of ``feeds``, as GPUSession.warm does. Raises what :meth:`run` raises."""
        raise NotImplementedError

    def has_lost(self, error: ExecutionError) -> bool:
        """Return True if ``error`` of a run says that the session, which goes on refusing, has lost its GPU."""
        return False

    def shares(self, error: ExecutionError) -> bool:
        """Return True if ``error``, which another session raised, ends this session too."""
        return False

    def refuse(self, error: ExecutionError) -> None:
        """Have the session refuse all further runs with ``error``."""

    def replace(self, error: ExecutionError) -> None:
        """Have another process take the place of this one, whose runs raise ``error`` where others succeed."""
        raise NotImplementedError

    def begin_ending(self) -> None:
        """Be told that the service ends. What runs may end."""

    def kill(self) -> None:
        """End what still runs, if that can be done."""

    def close(self, timeout: float | None) -> None:
        """Close the session, which runs nothing any more. Closing twice is fine."""
        raise NotImplementedError


class Feeds:
    """Makes the feeds of requests the service's own, and gives memory for joined ones."""

    def pass_through(self, feed: Any) -> Any:
        """Return the feed of a caller that waits for the result. Its arrays are the caller's.

        Raises ProviderRequestError, TypeError for what no worker can take.
        """
        raise NotImplementedError

    def copied(self, feed: Any, waits: Iterable[Callable[[], object]] = ()) -> tuple[Any, bool]:
        """Return a copy of a feed, and True if all of it was copied, as FeedCopies does. Raises as above."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        raise NotImplementedError

    def source(self) -> tuple[int, ...]:
        """Return what identifies the memory of :meth:`empty`. It changes when a session has lost its GPU."""
        return ()

    def close(self) -> None:
        """Free the memory that is not in use."""


def twice_lost(first: GPUError, error: WorkerLostError) -> WorkerLostError:
    """Return the error of a request that two processes were lost with."""
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
    """Raise ValueError or ProviderRequestError for what no pool can do."""
    if sessions_per_device < 1:
        raise ValueError(f"sessions_per_device must be at least 1, not {sessions_per_device}")
    if options.get("cuda_graph") or _has_graph(options.get("tuned")):
        raise ProviderRequestError(
            "a GPUSessionPool cannot replay CUDA graphs",
            evidence=[
                "while one is captured, CUDA refuses GPU memory to all threads, and its other sessions need some"
            ],
            fixes=[
                manual(
                    "leave cuda_graph, and a record that has a graph, out; or give each GPU a process with a GPUSession"
                )
            ],
            requested="cuda_graph",
        )


def _has_graph(tuned: Any) -> bool:
    """Return True if a record that the caller names has a CUDA graph. The sessions refuse what is no record."""
    if not isinstance(tuned, (str, os.PathLike)) or tuned == "now":
        return False
    try:
        return CAPTURE in options_of(read_record(tuned).named.settings)
    except (VoidRecordError, FileNotFoundError):
        return False


def named(devices: str | Iterable[Device | DeviceRequest]) -> list[DeviceRequest] | None:
    """Return the devices that a caller names; None for all. Raises TypeError, ProviderRequestError."""
    if isinstance(devices, str) and devices == "all":  # an array compares elementwise
        return None
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise TypeError(f'devices must be "all" or a sequence of devices, such as [0, 1], not {devices!r}')
    found: list[DeviceRequest] = [plain_request(device) for device in devices]
    if not found:
        raise _refused("devices names no GPU", found, "name at least one, or leave devices out for all")
    for device in found:
        check_form(device)
    return found


def choose_devices(devices: list[DeviceRequest] | None) -> list[DeviceRequest]:
    """Return the devices to open sessions on: ordinals if the driver lists any, else as they were named."""
    cuda = initialise()
    shown = cuda.devices
    if devices is None:
        return [device.ordinal for device in shown or ()] or [None]
    if shown:
        requests: list[DeviceRequest] = [choose_visible(device, cuda).ordinal for device in devices]
    else:  # a session raises the reason, or opens on the CPU
        requests = devices
    keys = [str(each).lower() if ordinal_of(each) is None else ordinal_of(each) for each in requests]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            what = f"devices names one GPU twice: as {devices[keys.index(key)]!r} and as {devices[position]!r}"
            raise _refused(what, devices, "name each GPU once; sessions_per_device opens several sessions on each")
    return requests


def _refused(what: str, devices: Sequence[DeviceRequest], remedy: str) -> ProviderRequestError:
    return ProviderRequestError(
        what, evidence=[f"devices={list(devices)!r}"], fixes=[manual(remedy)], requested=tuple(devices)
    )


def options_of_others(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the sessions after the first, if that is on a GPU.

    The first has warned of nodes on the CPU, and placement is the same for all. The others must not go to the CPU,
    where their share of the requests would hold up the rest.
    """
    changed = {**options, "allow_cpu": False}
    return changed if options.get("cpu_nodes", "warn") != "warn" else {**changed, "cpu_nodes": "allow"}


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call each of ``waits``. Then raise an interrupt, or else the first error, with the others attached."""
    errors: list[BaseException] = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - raised when all have ended
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
        del errors, interrupt, first, others  # their tracebacks hold this frame


def is_lost(session: Opened, error: BaseException) -> bool:
    """Return True if the error says that the GPU or its context is lost, and the driver does not contradict it."""
    if isinstance(error, ProviderFailureError):
        said = error.library == "CUDA" and error.status in [cuda_codes.name_of(code) for code in cuda_codes.LOST]
        refuses = lifetime.error_of(session) is not None
        return said and (refuses or not lifetime.gpu_works(lifetime.device_of(session).ordinal))
    return isinstance(error, PoisonedContextError)
