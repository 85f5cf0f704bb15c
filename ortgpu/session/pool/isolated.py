"""The workers of a pool with a process for each: started, watched, and replaced when they die."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...environment.child import kill_group, python_command, signal_name
from ...environment.packages.installed import locate_packages
from ...environment.packages.plugins import environ_of_child
from ...errors import ExecutionError, GPUError, ProviderRequestError, WorkerLostError, manual
from ...model.files import ModelSource
from ...process.background import Thread, cached_property, is_of_a_handler
from ...process.channel import Channel, PickledError, log_record
from ...process.threads import Notice, Outcome
from ...provider import living
from ...provider.devices import Device, DeviceRequest, as_request
from ...provider.interfaces import Value
from ...provider.options import Carried, carries_providers
from ...provider.runtime import load_runtime
from ...running.cudart import address_of
from ...running.pinned import OrdinaryMemory
from ...running.pipeline import mapping
from .shared_memory import Exchange, memory_file
from .workers import NotBegunError, Worker, check, named, options_of_others, wait_for_all

if TYPE_CHECKING:
    from ...running.copying import ParallelCopy

logger = logging.getLogger("ortgpu.pool")

# Seconds. A model of many gigabytes on a disk of the network takes minutes to open; more is a hang.
_OPENING = 600.0
# For the first run of a shape in a process, in which cuDNN and TensorRT may try many kernels.
_FIRST_RUN = 120.0
# For a process to end once it was told to, or has closed its channels. One that is stuck in the driver is left.
_DEATH = 5.0
_LOOK = 0.1  # between two looks at a process that nothing was heard of
# Between two processes of a worker that die before a first result: doubled each time, up to the second number.
_BACK_OFF = 0.1, 10.0
_GIVEN_UP = 30.0  # from a death on, in which no further process opens a session

# One more than the threads of a session in this process, since these copy to and from shared memory.
_THREADS_PER_DEVICE = 4

_HOST = 1, 3  # DLDeviceType: kDLCPU, kDLCUDAHost
_LARGE = 2 << 20  # bytes from which on threads copy an array, into memory that is used again
_NO_DEVICE = -1  # whose copying threads these are

_PROGRAM = f"from {__package__}.worker_process import main; main()"


@dataclass(frozen=True, slots=True)
class Opening:
    """The session that a worker process is to open.

    ``devices`` None: all that CUDA shows there; ``place`` is an index of them. Without a ``path``, the model is the
    ``size`` bytes under ``descriptor``.
    """

    path: str | None
    descriptor: int | None
    size: int
    devices: list[DeviceRequest] | None
    place: int
    options: bytes  # the pickled arguments of GPUSession
    log_level: int  # from which on this process logs what the other one has to say


@dataclass(slots=True)
class Declared:
    """An input or output of a model."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass(frozen=True, slots=True)
class Opened:
    """The session that a worker process has opened. ``chosen`` are the devices, as ordinals if the driver lists any."""

    device: Device
    declared: tuple[Sequence[Value], Sequence[Value]]  # inputs and outputs
    chosen: list[DeviceRequest]
    warnings: Sequence[Warning]


class HostCopies:
    """Copies arrays of the host, large ones by several threads into memory that is used again. Threads may share it.

    ``limit`` is the most bytes to keep for later copies.
    """

    def __init__(self, limit: int) -> None:
        self._memory = OrdinaryMemory(limit)

    def of(self, feed: Any, waits: object = ()) -> tuple[Any, bool]:
        """Return a copy of a feed of arrays, and True, as FeedCopies does."""
        return {name: self.copy_of(array) for name, array in feed.items()}, True

    def copy_of(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.nbytes < _LARGE:
            return array.copy()
        copy = self._memory.empty(array.shape, array.dtype)
        self.fill(copy, array)
        return copy

    def fill(self, to: NDArray[Any], array: NDArray[Any]) -> None:
        """Copy ``array`` to ``to``, which is contiguous and of the same shape and type."""
        if array.nbytes < _LARGE or not array.flags.c_contiguous or self._threads is None:
            np.copyto(to, array)
        else:
            self._threads.copy(address_of(to), address_of(array), array.nbytes)

    @cached_property
    def _threads(self) -> ParallelCopy | None:
        arrival = locate_packages().onnxruntime.arrival
        if arrival is not None and arrival.way == "bundled plugin":
            return None  # its import opens the plugin, which may use CUDA, and the program must be able to fork
        if load_runtime().module is None:
            return None
        try:
            from ...running.copying import copy_threads, parallel_copy  # not above: it imports ONNX Runtime
        except (ImportError, OSError):  # too many files are open
            return None
        return parallel_copy(copy_threads(), _NO_DEVICE)

    def close(self) -> None:
        self._memory.close()


class Launch:
    """All that the processes of a pool are started with."""

    def __init__(self, model: ModelSource, channels: int, copies: HostCopies) -> None:
        self.channels = channels
        self.copies = copies
        self.path = None if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))
        self.size = 0
        self.descriptor: int | None = None
        self._environ = environ_of_child()
        if isinstance(model, bytes):
            self.size = len(model)
            self.descriptor = memory_file("ortgpu-model")
            try:
                with open(self.descriptor, "wb", closefd=False) as file:
                    file.write(model)
            except BaseException:  # no room
                self.close()
                raise

    def start(self) -> WorkerProcess:
        return WorkerProcess(self.channels, self._environ, self.descriptor, self.copies)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class WorkerProcess:
    """One process of a worker, from its start to its end. Raises OSError if it cannot be started.

    It writes 1 to ``begun[number]`` when it begins a request of ``exchanges[number]``.
    """

    def __init__(self, channels: int, environ: Mapping[str, str], descriptor: int | None, copies: HostCopies) -> None:
        with ExitStack() as opened, ExitStack() as theirs:
            ends = []
            for _ in range(1 + channels):
                ours, their = socket.socketpair()
                opened.callback(ours.close)
                theirs.callback(their.close)
                ends.append((ours, their.fileno()))
            page = memory_file("ortgpu-begun")
            theirs.callback(os.close, page)
            os.posix_fallocate(page, 0, mmap.PAGESIZE)
            self.begun = mmap.mmap(page, mmap.PAGESIZE)
            numbers = [page, *(number for _, number in ends)]
            self.child = subprocess.Popen(
                python_command(_PROGRAM, *map(str, numbers)),
                stdin=subprocess.DEVNULL,
                pass_fds=numbers if descriptor is None else [*numbers, descriptor],
                env=environ,
                start_new_session=True,
            )
            opened.pop_all()
        self._control, *others = (Channel(ours) for ours, _ in ends)
        self.exchanges = [Exchange(channel, copy=copies.fill) for channel in others]
        self._idle: LifoQueue[int] = LifoQueue()
        for number in range(channels):
            self._idle.put(number)
        self.has_opened = False
        self.has_result = False
        self.shapes: set[object] = set()  # of feeds that have run
        self._is_lost = False
        self._reason: str | None = None
        self._words: BaseException | None = None
        self._ended = threading.Event()

    @property
    def is_ready(self) -> bool:
        """True while it can run requests."""
        return self.has_opened and not self._is_lost

    def open(self, opening: Opening) -> Opened | BaseException | None:
        """Have it open its session. Return that, or what it raised. None: it died, or is killed as it took too long."""
        until = time.monotonic() + _OPENING
        try:
            self._control.send(opening)
            answer: object = None
            while not isinstance(answer, (Opened, PickledError)):
                answer, _ = self._control.receive(max(until - time.monotonic(), 0))
                _log(answer)
        except TimeoutError:
            self.kill(f"it had no session after {_OPENING:g} s")
            return None
        except (EOFError, ConnectionError):
            return None
        return answer.error() if isinstance(answer, PickledError) else answer

    def borrow(self) -> int:
        """Return the number of an idle exchange, as soon as there is one. The process may have ended by then."""
        return self._idle.get()

    def give_back(self, number: int) -> None:
        if self._ended.is_set():
            self.exchanges[number].close()
        self._idle.put(number)

    def kill(self, reason: str) -> None:
        if self.child.returncode is None:
            self._reason = self._reason or reason
            kill_group(self.child)
        self.lose()

    def lose(self) -> None:
        """Make no more requests of it, and tell it to end."""
        self._is_lost = True
        self._control.shut()

    def wait(self) -> None:
        """Wait for its end. One that was lost and does not end is killed; stuck in the driver, it is left."""
        with suppress(EOFError, OSError):  # its end, or it stopped amid a message
            while (is_there := self._control.has_message(_LOOK)) or self.child.poll() is None:
                if is_there:
                    said, _ = self._control.receive(_DEATH)
                    _log(said)
                    self._words = said.error() if isinstance(said, PickledError) else None
        self._is_lost = True
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(_DEATH)
        self.kill("it does not answer")

    def close(self) -> None:
        """End its channels."""
        for exchange in self.exchanges:  # a thread that waits for an answer closes its own
            exchange.channel.shut()
        self._ended.set()
        idle = []
        with suppress(Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for number in idle:
            self.give_back(number)
        self._control.close()

    def cause(self) -> str:
        """Say what ended it, once it has ended."""
        self._ended.wait(2 * _DEATH)
        code = self.child.returncode
        if self._reason is not None or code is None:
            return self._reason or "it does not answer"
        if self._words is not None:
            return f"{type(self._words).__name__}: {getattr(self._words, 'summary', self._words)}"
        return signal_name(-code) if code < 0 else f"exit status {code}"


def _log(said: object) -> None:
    if isinstance(said, logging.LogRecord):
        log_record(said)


class ProcessWorker(Worker):
    """Threads that serve requests by a worker process, and one that replaces that process when it dies."""

    def __init__(
        self,
        number: int,
        place: int,
        launch: Launch,
        devices: list[DeviceRequest] | None,
        options: Mapping[str, Any],
        deadline: float | None,
        tell: Callable[[ProcessWorker], None],
    ) -> None:
        super().__init__(place)
        self.number = number
        self.opened: Outcome[Opened] = Outcome()  # of the first process
        self.is_lost = False
        self._device: Device | None = None
        self._launch = launch
        self._devices, self._place, self._options = devices, 0 if devices else place, options
        self._deadline = deadline
        self._tell = tell  # that it is ready, or is not any more
        self._current: WorkerProcess | None = None
        self._ending = Notice()
        self._is_ending = False
        self._keeper = Thread(self._keep, f"ortgpu-keep-{number}")

    @property
    def process(self) -> WorkerProcess | None:
        """The present process, if it can run requests."""
        current = self._current
        return current if current is not None and current.is_ready else None

    @property
    def capacity(self) -> int:
        return len(self.threads) if self.process is not None else 0

    @property
    def state(self) -> str:
        return "ready" if self.process is not None else "replacing"

    @property
    def device(self) -> Device:
        assert self._device is not None
        return self._device

    @property
    def declared(self) -> tuple[Sequence[Value], Sequence[Value]]:
        return self.opened.result().declared

    @property
    def pid(self) -> int | None:
        current = self._current
        return current.child.pid if current is not None and current.child.returncode is None else None

    def begin(self) -> None:
        """Start the first process. :attr:`opened` says what became of it."""
        self._keeper.start()

    def run(self, output_names: Any, feed: Any) -> list[NDArray[Any]]:
        """Run a request in the process.

        Raises:
            NotBegunError: the process has not seen the request.
            WorkerLostError: the process died while it ran the request, or exceeded the deadline.
            Exception: as the session raises.
        """
        process = self.process
        if process is None:
            raise NotBegunError
        number = process.borrow()
        try:
            answer, outputs = self._ask(process, number, output_names, feed)
            if isinstance(answer, PickledError):
                raise answer.error()
            process.has_result = True
            results = [self._launch.copies.copy_of(output) for output in outputs]
            process.exchanges[number].drop_if_large()
            return results
        finally:
            process.give_back(number)

    def _ask(self, process: WorkerProcess, number: int, output_names: Any, feed: Any) -> tuple[Any, list[NDArray[Any]]]:
        """Return the answer to a request, with outputs that last until the next one."""
        shapes = seconds = None
        if self._deadline is not None:
            shapes = tuple((name, array.shape) for name, array in feed.items())
            seconds = self._deadline if shapes in process.shapes else max(self._deadline, _FIRST_RUN)
        exchange, process.begun[number] = process.exchanges[number], 0
        try:
            exchange.send((output_names, list(feed)), list(feed.values()))
            answer, outputs = exchange.receive(seconds)
        except (EOFError, OSError) as error:
            exchange.channel.shut()  # a late answer must not be taken for that of the next request
            if isinstance(error, TimeoutError):
                process.kill(f"its deadline of {self._deadline:g} s has passed")
            process.lose()
            raise (self._lost(process) if process.begun[number] else NotBegunError()) from None
        if answer is None:
            process.shapes.add(shapes)
        return answer, outputs

    def replace(self, error: ExecutionError) -> None:
        process = self.process
        if process is not None:
            process.kill(f"a run failed there and succeeded elsewhere: {error.summary}")

    def wait(self) -> None:
        super().wait()
        self._is_ending = True
        self._ending.give()
        if self._current is not None:
            self._current.lose()

    def close(self) -> None:
        if threading.current_thread() is not self._keeper:
            self._keeper.wait()
        self._current = None
        self._launch.close()

    # The thread that keeps a process running

    def _keep(self) -> None:
        fruitless = 0  # processes in a row that gave no result
        died = 0.0  # the time when the last one that had a session died
        while not self._is_ending:
            process, error = self._live()
            if process is not None:
                process.close()
            if self._device is None:
                self.opened.fail(self._explained(process, error) if error is None else error)
                return
            if self._is_ending:
                return
            if process is not None and process.has_opened:
                died = time.monotonic()
            fruitless = 0 if process is not None and process.has_result else fruitless + 1
            self.last_error = self._explained(process, error)
            self.is_lost = time.monotonic() - died >= _GIVEN_UP
            logger.warning("%s%s", self.last_error.summary, "" if self.is_lost else "; another one is started")
            self._tell(self)
            if self.is_lost:
                return
            del process, error  # not to be kept for as long as the next one lives
            if fruitless:
                self._ending.take(min(_BACK_OFF[0] * 2 ** (fruitless - 1), _BACK_OFF[1]))
            self.restarts += 1

    def _live(self) -> tuple[WorkerProcess | None, BaseException | None]:
        """Start a process and wait for its end. Return it, and the error if it could not open its session."""
        process: WorkerProcess | None = None
        answer: Opened | BaseException | None = None
        launch = self._launch
        try:
            process = self._current = launch.start()
            if self._is_ending:
                process.lose()
            options, level = pickle.dumps(self._options), logging.getLogger("ortgpu").getEffectiveLevel()
            answer = process.open(
                Opening(launch.path, launch.descriptor, launch.size, self._devices, self._place, options, level)
            )
            if isinstance(answer, Opened):
                self._begin_with(process, answer)
        except BaseException as raised:  # noqa: BLE001 - the caller raises it, or it is the last error of this worker
            answer = raised.with_traceback(None)  # of this thread, and it holds the process
        error = answer if isinstance(answer, BaseException) else None
        if process is not None:
            if error is not None:
                process.kill("it opened no session")
            process.wait()
        return process, error

    def _begin_with(self, process: WorkerProcess, opened: Opened) -> None:
        is_first, self._device = self._device is None, opened.device
        if is_first:
            # Ordinals change when a GPU is gone, and its successor must not go to the CPU.
            self._devices = [as_request(opened.device) if opened.device.is_gpu else opened.chosen[self._place]]
            self._place = 0
            if opened.device.is_gpu:
                self._options = options_of_others(self._options)
        process.has_opened = True
        if is_first:
            self.opened.give(opened)
        else:
            self._tell(self)

    def _explained(self, process: WorkerProcess | None, error: BaseException | None) -> GPUError:
        if error is None:
            assert process is not None
            return self._lost(process)
        if isinstance(error, GPUError):
            return error
        cause = f"{type(error).__name__}: {error}"
        return WorkerLostError(
            f"worker {self.number} on {self._device} cannot be replaced: {cause}",
            fixes=[manual("open the model in a GPUSession, which shows what is wrong with it")],
            worker=self.number,
            device=str(self._device),
            cause=cause,
        )

    def _lost(self, process: WorkerProcess) -> WorkerLostError:
        cause = process.cause()
        fix = "run the same feeds in a GPUSession in a process of its own, to see what ends it"
        if cause == "SIGKILL":
            fix = "look for the OOM killer in the kernel's log (dmesg): a machine out of memory kills like this"
        place = f"worker {self.number} on {self._device or 'no device yet'}"
        return WorkerLostError(
            f"{place}, process {process.child.pid}, was lost: {cause}",
            fixes=[manual(fix)],
            worker=self.number,
            device=str(self._device),
            cause=cause,
        )


def open_processes(
    workers: list[Worker],
    model: ModelSource,
    devices: str | Iterable[Device | DeviceRequest],
    sessions_per_device: int,
    options: Mapping[str, Any],
    deadline: float | None,
    copies: HostCopies,
    tell: Callable[[ProcessWorker], None],
) -> None:
    """Fill ``workers`` as open_sessions does, with a process for each session.

    The first process says which devices there are: this process must not use CUDA.
    """
    check(sessions_per_device, options)
    requested = named(devices)
    options = _portable(options)
    launch = Launch(model, -(-_THREADS_PER_DEVICE // sessions_per_device), copies)

    def add(place: int, devices: list[DeviceRequest] | None) -> ProcessWorker:
        worker = ProcessWorker(len(workers), place, launch, devices, options, deadline, tell)
        workers.append(worker)
        worker.begin()
        return worker

    first = add(0, requested)
    opened = first.opened.result()
    if opened.device.is_gpu:
        options = options_of_others(options)
    places = [place for _ in range(sessions_per_device) for place in range(len(opened.chosen))]
    others = [add(place, [opened.chosen[place]]) for place in places[1:]]
    wait_for_all(worker.opened.result for worker in others)
    for each in (first, *others):
        for warning in each.opened.result().warnings:
            warnings.warn(warning, stacklevel=living.stacklevel(None))
    for worker in (first, *others):
        worker.start(launch.channels)


def _portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as they pickle. Raises TypeError for one that does not."""
    carried = dict(options)
    if carried.get("sess_options") is not None:
        if carries_providers(carried["sess_options"]):
            raise TypeError("sess_options of a GPUSessionPool with isolate=True must carry no execution providers")
        carried["sess_options"] = Carried(carried["sess_options"])
    for name, value in carried.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise TypeError(f"{name} of a GPUSessionPool with isolate=True must pickle: {error}") from None
    return carried


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


def host_arrays(feed: Any) -> Any:
    """Return a feed as NumPy arrays, which share the memory of the given ones.

    Raises:
        ProviderRequestError: an entry is no array of numbers on the host.
        TypeError: the feed is no mapping.
    """
    return {name: _host_array(name, value) for name, value in mapping(feed).items()}


def _host_array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject and value.dtype.kind not in "SU":
            return np.asarray(value)  # a subclass may copy differently
        what = "text"
    elif hasattr(value, "__dlpack_device__") and type(value).__module__.partition(".")[0] != "onnxruntime":
        if int(value.__dlpack_device__()[0]) in _HOST:
            return np.from_dlpack(value)
        what = "on a GPU"
    else:
        what = f"a {type(value).__name__}"
    remedy = "pass a NumPy array of numbers, or use a pool without isolate, or a GPUSession"
    raise _refused(
        f"input {name!r} is {what}, and a pool with isolate=True takes arrays of numbers on the host", remedy
    )


def _refused(what: str, remedy: str) -> ProviderRequestError:
    return ProviderRequestError(what, fixes=[manual(remedy)], requested="isolate")
