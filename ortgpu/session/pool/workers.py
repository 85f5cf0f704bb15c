"""The sessions of a pool with the threads that call them, opened together and closed together."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...environment.gpu.cuda import initialise
from ...errors import GPUError, ProviderRequestError, manual
from ...model.files import ModelSource
from ...process.background import Task
from ...process.threads import Threads
from ...provider import living as registry
from ...provider.devices import Device, DeviceRequest, as_request, check_form, choose_visible, ordinal_of

if TYPE_CHECKING:
    from typing import Protocol

    from ...running.plain_runs import RunningSession

    class PoolSession(RunningSession, Protocol):
        """A session of a pool, which is a GPUSession."""

        @property
        def device(self) -> Device: ...


# With fewer, a GPU waits while inputs and outputs are copied: ResNet-50 needs three to come to its limit on an H200.
_THREADS_PER_DEVICE = 3


class Worker(Threads):
    """A session and the threads that call it. ``place`` is the index of its GPU among those of the pool."""

    def __init__(self, session: PoolSession, place: int) -> None:
        super().__init__(f"ortgpu-pool-{place}")
        self.session = session
        self.place = place
        self.assigned: deque[Any] = deque()  # requests for which threads were woken
        self.busy = 0  # running requests

    @property
    def capacity(self) -> int:
        """The number of requests that it can run at a time."""
        return len(self.threads)


def open_workers(
    workers: list[Worker],
    model: ModelSource,
    devices: str | Iterable[Device | DeviceRequest],
    sessions_per_device: int,
    options: dict[str, Any],
    session_class: Callable[[], Callable[..., PoolSession]],
) -> None:
    """Fill ``workers`` with one worker for each session, going round the devices ``sessions_per_device`` times.

    The first session opens in this thread, so that its warnings name the caller and a general fault is diagnosed only
    once. The others then open at the same time, in threads. After an error the caller stops the workers that exist.

    Raises:
        TypeError, ValueError: an argument is invalid.
        GPUError, Exception: as GPUSession raises. ``workers`` then has the sessions that are open.
    """
    if sessions_per_device < 1:
        raise ValueError(f"sessions_per_device must be at least 1, not {sessions_per_device}")
    if options.get("cuda_graph"):
        raise ProviderRequestError(
            "a GPUSessionPool cannot replay CUDA graphs",
            evidence=[
                "while one is captured, CUDA refuses GPU memory to all threads, and its other sessions need some"
            ],
            fixes=[
                manual("leave cuda_graph out, or give each GPU a process, with a GPUSession(cuda_graph=True) in it")
            ],
            requested="cuda_graph",
        )
    chosen = _choose(devices)
    places = [place for _ in range(sessions_per_device) for place in range(len(chosen))]
    opened: dict[int, PoolSession] = {}  # filled by threads: an interrupt here loses no session
    try:
        _open_sessions(opened, functools.partial(session_class(), model), [chosen[place] for place in places], options)
    finally:
        workers += [Worker(opened[number], places[number]) for number in sorted(opened)]
    for worker in workers:
        worker.start(-(-_THREADS_PER_DEVICE // sessions_per_device))


def stop(workers: Sequence[Worker], pid: int) -> None:
    """End the threads of all workers, then close their sessions. Does nothing in a child forked from ``pid``."""
    if os.getpid() == pid:
        for worker in workers:
            worker.stop()
        try:
            for worker in workers:
                worker.wait()
        finally:  # after an interrupt the threads end all the same
            for worker in workers:
                worker.session.close()


def _choose(devices: str | Iterable[Device | DeviceRequest]) -> list[DeviceRequest]:
    """Return the devices to open sessions on: ordinals if the driver lists any, else as they were named."""
    everything = isinstance(devices, str) and devices == "all"  # an array compares elementwise
    if not everything and (isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable)):
        raise TypeError(f'devices must be "all" or a sequence of devices, such as [0, 1], not {devices!r}')
    named: list[DeviceRequest] = [] if everything else [as_request(device) for device in devices]
    if not everything and not named:
        raise _refused("devices names no GPU", named, "name at least one, or leave devices out for all")
    for device in named:
        check_form(device)
    cuda = initialise()
    shown = cuda.devices
    if everything:
        return [device.ordinal for device in shown or ()] or [None]
    if shown:
        requests: list[DeviceRequest] = [choose_visible(device, cuda).ordinal for device in named]
    else:  # a session raises the reason, or opens on the CPU
        requests = named
    keys = [str(each).lower() if ordinal_of(each) is None else ordinal_of(each) for each in requests]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            what = f"devices names one GPU twice: as {named[keys.index(key)]!r} and as {named[position]!r}"
            raise _refused(what, named, "name each GPU once; sessions_per_device opens several sessions on each")
    return requests


def _refused(what: str, devices: Sequence[DeviceRequest], remedy: str) -> ProviderRequestError:
    return ProviderRequestError(
        what, evidence=[f"devices={list(devices)!r}"], fixes=[manual(remedy)], requested=tuple(devices)
    )


def _open_sessions(
    opened: dict[int, PoolSession],
    open_session: Callable[..., PoolSession],
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
    # The first session has warned of nodes on the CPU, and placement is the same for all. If it is on a GPU, the others
    # must not go to the CPU, where their share of the requests would hold up the rest.
    options = {**options, "allow_cpu": False}
    if options.get("cpu_nodes", "warn") == "warn":
        options["cpu_nodes"] = "allow"
    tasks = [Task(functools.partial(open_one, number), f"ortgpu-open-{devices[number]}") for number in others]
    errors: list[BaseException] = []
    for task in tasks:
        try:
            task.result()
        except BaseException as error:  # noqa: BLE001 - raised when all have ended
            errors.append(error)
    if errors:
        try:
            raise _one_of(errors)
        finally:
            del errors, task, tasks  # its traceback holds this frame
    for number in others:
        registry.attribute(opened[number], to=opened[0])


def _one_of(errors: Sequence[BaseException]) -> BaseException:
    """Return the error to raise: an interrupt if there is one, else the first error with the others attached."""
    interrupt = next((error for error in errors if not isinstance(error, Exception)), None)
    first, *others = errors
    if interrupt is None and isinstance(first, GPUError):
        first.with_others((*first.others, *(other for other in others if isinstance(other, GPUError))))
    return interrupt or first
