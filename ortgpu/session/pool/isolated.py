"""The workers of a pool with a process for each: started, watched, and replaced when they die."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.child import kill_group, python_command, signal_name
from ...environment.packages.plugins import environ_of_child
from ...errors import ExecutionError, GPUError, ProviderRequestError, WorkerLostError, manual
from ...model.files import ModelSource
from ...process.background import Thread, is_of_a_handler
from ...process.threads import Executor, Outcome
from ...provider import lifetime, living
from ...provider.devices import Device, DeviceRequest, as_request
from ...provider.interfaces import Value
from ...provider.options import Carried, carries_providers
from ...running.pinned import OrdinaryMemory
from ...running.pipeline import mapping
from .shared_memory import Channel, Exchange
from .workers import NotBegunError, Worker, check, named, one_of, options_of_others

logger = logging.getLogger("ortgpu.pool")

# Seconds. A model of many gigabytes on a disk of the network takes minutes to open; more is a hang.
_OPENING = 600.0
# For the first run of a shape in a process, in which cuDNN and TensorRT may try many kernels.
_FIRST_RUN = 120.0
# For a process to end once it was told to or killed. One that is stuck in the driver is left.
_DEATH = 5.0
# Between two processes of a worker that die before a first result: doubled each time, up to the second number.
_BACK_OFF = 0.1, 10.0
_OPENINGS = 9  # that may fail in a row, which takes half a minute, before a worker is given up

# One more than the threads of a session in this process, since these copy to and from shared memory.
_THREADS_PER_DEVICE = 4

_HOST = 1, 3  # DLDeviceType: kDLCPU, kDLCUDAHost
_LARGE = 1 << 20  # bytes of a copy whose memory is used again
_PIECE = 4 << 20  # bytes that a thread copies at least: waking it takes as long as a tenth of it
_COPY_THREADS = 8

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


@dataclass(frozen=True, slots=True)
class PickledError:
    """An exception on its way to another process."""

    data: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> PickledError:
        text = f"{type(error).__name__}: {error}"
        try:
            data = pickle.dumps(error)
            pickle.loads(data)  # noqa: S301 - our own: many exceptions pickle, and raise here
        except Exception:  # noqa: BLE001 - anything that its class may raise
            data = None
        return cls(data, text)

    def error(self) -> BaseException:
        with suppress(Exception):  # its module may be one that cannot be imported here
            if self.data is not None:
                error = pickle.loads(self.data)  # noqa: S301 - of a worker process
                if isinstance(error, BaseException):
                    return error
        return RuntimeError(self.text)


class HostCopies:
    """Copies arrays of the host, large ones by several threads into memory that is used again. Threads may share it.

    ``limit`` is the most bytes to keep for later copies.
    """

    def __init__(self, limit: int) -> None:
        self._memory = OrdinaryMemory(limit)
        self._most = min(_COPY_THREADS, len(os.sched_getaffinity(0)))
        self._threads = Executor(self._most - 1, "ortgpu-copy") if self._most > 1 else None

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
        count = min(self._most, array.nbytes // _PIECE)
        if self._threads is None or count < 2 or not array.flags.c_contiguous:
            np.copyto(to, array)  # releases the interpreter lock
            return
        pairs = list(zip(_pieces(to, count), _pieces(array, count), strict=True))
        outcomes: list[Outcome[None]] = [Outcome() for _ in pairs[1:]]
        for outcome, pair in zip(outcomes, pairs[1:], strict=True):
            try:
                self._threads.submit(outcome, np.copyto, *pair)
            except RuntimeError:  # the program ends, and they have
                np.copyto(*pair)
                outcome.give(None)
        np.copyto(*pairs[0])
        for outcome in outcomes:
            outcome.result()

    def close(self) -> None:
        self._memory.close()
        if self._threads is not None:
            self._threads.close()


def _pieces(array: NDArray[Any], count: int) -> list[NDArray[Any]]:
    return np.array_split(array.reshape(-1).view(np.uint8), count)


class _Client:
    """The end of a channel at which requests are made. The process writes 1 to ``begun[number]`` when it begins one."""

    def __init__(self, channel: Channel, begun: mmap.mmap, number: int, copies: HostCopies) -> None:
        self.exchange = Exchange(channel, copy=copies.fill)
        self._begun = begun
        self._number = number

    def run(self, output_names: Any, feed: Mapping[str, NDArray[Any]], timeout: float | None) -> list[NDArray[Any]]:
        """Return what lies in shared memory until the next run. Raises as :class:`Exchange`, or what the run raised."""
        self._begun[self._number] = 0
        try:
            self.exchange.send((output_names, list(feed)), list(feed.values()))
        except ConnectionError:
            raise EOFError from None
        answer, arrays = self.exchange.receive(timeout)
        if isinstance(answer, PickledError):
            raise answer.error()
        return arrays

    def has_begun(self) -> bool:
        """Return True if the process has begun the request that was sent last."""
        return bool(self._begun[self._number])


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
            self.descriptor = os.memfd_create("ortgpu-model")
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
    """One process of a worker, from its start to its end. Raises OSError if it cannot be started."""

    def __init__(self, channels: int, environ: Mapping[str, str], descriptor: int | None, copies: HostCopies) -> None:
        with ExitStack() as opened, ExitStack() as theirs:
            ends = []
            for _ in range(1 + channels):
                ours, their = socket.socketpair()
                opened.callback(ours.close)
                theirs.callback(their.close)
                ends.append((ours, their.fileno()))
            page = os.memfd_create("ortgpu-begun")
            theirs.callback(os.close, page)
            os.posix_fallocate(page, 0, mmap.PAGESIZE)
            begun = mmap.mmap(page, mmap.PAGESIZE)
            numbers = [page, *(number for _, number in ends)]
            self.child = subprocess.Popen(
                python_command(_PROGRAM, *map(str, numbers)),
                stdin=subprocess.DEVNULL,
                pass_fds=numbers if descriptor is None else [*numbers, descriptor],
                env=environ,
                start_new_session=True,
            )
            opened.pop_all()
        control, *others = (Channel(ours) for ours, _ in ends)
        self.control = control
        # Those that no thread uses
        self.clients = deque(_Client(channel, begun, number, copies) for number, channel in enumerate(others))
        self._all = tuple(self.clients)
        self.has_result = False
        self.shapes: set[object] = set()  # of feeds that have run
        self._reason: str | None = None
        self._ended = threading.Event()
        self._words: BaseException | None = None

    def open(self, opening: Opening) -> Opened:
        """Have it open its session. Raises what that raises, EOFError or TimeoutError."""
        self.control.send(opening)
        answer, _ = self.control.receive(_OPENING)
        if isinstance(answer, PickledError):
            raise answer.error()
        assert isinstance(answer, Opened)
        return answer

    def give_back(self, client: _Client) -> None:
        self.clients.append(client)
        if self._ended.is_set():
            self._close_clients()

    def end(self) -> None:
        """Tell it to end."""
        self.control.shut()

    def kill(self, reason: str) -> None:
        if self.child.returncode is None:
            self._reason = self._reason or reason
            kill_group(self.child)

    def wait(self) -> None:
        """Wait for its end."""
        self.child.wait()

    def close(self) -> None:
        """Read what it said at its end, and end its channels."""
        with suppress(Exception):  # mostly it said nothing
            answer, _ = self.control.receive(0.1)
            self._words = answer.error()
        for client in self._all:  # a thread that waits for an answer closes its own
            client.exchange.channel.shut()
        self._ended.set()
        self._close_clients()
        self.control.close()

    def _close_clients(self) -> None:
        with suppress(IndexError):
            while True:
                self.clients.pop().exchange.close()

    def cause(self) -> str:
        """Say what ended it, once it has ended."""
        self._ended.wait(_DEATH)
        code = self.child.returncode
        if self._reason is not None:
            return self._reason
        if self._words is not None:
            return f"{type(self._words).__name__}: {getattr(self._words, 'summary', self._words)}"
        if code is None:
            return "it does not answer, and cannot be killed"
        return signal_name(-code) if code < 0 else f"exit status {code}"


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
        self.process: WorkerProcess | None = None  # while it can run requests
        self._device: Device | None = None
        self._launch = launch
        self._devices, self._place, self._options = devices, 0 if devices else place, options
        self._deadline = deadline
        self._tell = tell  # that it is ready, or is not any more
        self._current: WorkerProcess | None = None
        self._ending: SimpleQueue[None] = SimpleQueue()
        self._is_ending = False
        self._keeper = Thread(self._keep, f"ortgpu-keep-{number}")

    @property
    def capacity(self) -> int:
        return len(self.threads) if self.process is not None else 0

    @property
    def state(self) -> str:
        if self.is_lost:
            return "lost"
        return "ready" if self.process is not None else "replacing" if self._device is not None else "opening"

    @property
    def device(self) -> Device:
        assert self._device is not None
        return self._device

    @property
    def declared(self) -> tuple[Sequence[Value], Sequence[Value]]:
        return self.opened.result().declared

    @property
    def pid(self) -> int | None:
        return self._current.child.pid if self._current is not None else None

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
        try:
            client = process.clients.pop() if process is not None else None
        except IndexError:  # it has just died
            client = None
        if process is None or client is None:
            raise NotBegunError
        try:
            results = self._run(process, client, output_names, feed)
        except (EOFError, TimeoutError) as error:
            client.exchange.close()
            if isinstance(error, TimeoutError):
                process.kill(f"its deadline of {self._deadline:g} s has passed")
            lost = self._lost(process)
            raise (lost if client.has_begun() else NotBegunError) from None
        except BaseException:
            process.give_back(client)
            raise
        process.give_back(client)
        return results

    def _run(self, process: WorkerProcess, client: _Client, output_names: Any, feed: Any) -> list[NDArray[Any]]:
        shapes = seconds = None
        if self._deadline is not None:
            shapes = tuple((name, array.shape) for name, array in feed.items())
            seconds = self._deadline if shapes in process.shapes else max(self._deadline, _FIRST_RUN)
        outputs = client.run(output_names, feed, seconds)
        process.has_result = True
        if self._deadline is not None:
            process.shapes.add(shapes)
        results = [self._launch.copies.copy_of(output) for output in outputs]
        for memory in (client.exchange.ours, client.exchange.theirs):
            memory.drop_if_large()
        return results

    def replace(self, error: ExecutionError) -> None:
        process = self.process
        if process is not None:
            process.kill(f"a run failed there and succeeded elsewhere: {error.summary}")

    def wait(self) -> None:
        super().wait()
        self._is_ending = True
        self._ending.put(None)
        if self._current is not None:
            self._current.end()

    def close(self) -> None:
        process = self._current
        if process is not None:
            try:
                process.child.wait(_DEATH)
            except subprocess.TimeoutExpired:
                process.kill("its pool was closed")
        is_gone = process is None or process.child.returncode is not None
        if is_gone and threading.current_thread() is not self._keeper:  # one that is stuck in the driver is left
            self._keeper.wait()
        self._current = None
        self._launch.close()

    # The thread that keeps a process running

    def _keep(self) -> None:
        fruitless = refused = 0  # processes in a row that gave no result, and that opened no session
        while not self._is_ending:
            process, error = self._live()
            has_opened = self.process is not None
            self.process = None
            if process is not None:
                process.close()
            if self._device is None:
                self.opened.fail(self._explained(process, error) if error is None else error)
                return
            if self._is_ending:
                return
            fruitless = 0 if process is not None and process.has_result else fruitless + 1
            refused = 0 if has_opened else refused + 1
            self.last_error = self._explained(process, error)
            self.is_lost = refused >= _OPENINGS
            logger.warning("%s%s", self.last_error.summary, "" if self.is_lost else "; another one is started")
            self._tell(self)
            if self.is_lost:
                return
            if fruitless:
                with suppress(Empty):
                    self._ending.get(timeout=min(_BACK_OFF[0] * 2 ** (fruitless - 1), _BACK_OFF[1]))
            self.restarts += 1

    def _live(self) -> tuple[WorkerProcess | None, BaseException | None]:
        """Start a process and wait for its end. Return it, and the error if it could not open its session."""
        process, error = None, None
        try:
            process = self._current = self._launch.start()
            if self._is_ending:
                process.end()
            self._open(process)
        except (EOFError, ConnectionError):  # it died: its end says why
            pass
        except BaseException as raised:  # noqa: BLE001 - the caller raises it, or it is the last error of this worker
            is_late = isinstance(raised, TimeoutError)
            if process is not None:
                process.kill(f"it had no session after {_OPENING:g} s" if is_late else "it opened no session")
            error = None if is_late else raised.with_traceback(None)  # of this thread, and it holds the process
        if process is not None:
            process.wait()
        return process, error

    def _open(self, process: WorkerProcess) -> None:
        launch = self._launch
        options = pickle.dumps(self._options)
        opening = Opening(launch.path, launch.descriptor, launch.size, self._devices, self._place, options)
        opened = process.open(opening)
        is_first, self._device = self._device is None, opened.device
        if is_first:
            # Ordinals change when a GPU is gone, and its successor must not go to the CPU.
            self._devices = [as_request(opened.device) if opened.device.is_gpu else opened.chosen[self._place]]
            self._place = 0
            if opened.device.is_gpu:
                self._options = options_of_others(self._options)
        self.process = process
        if is_first:
            self.opened.give(opened)
        else:
            self._tell(self)

    def _explained(self, process: WorkerProcess | None, error: BaseException | None) -> GPUError:
        if error is None:
            assert process is not None
            return self._lost(process)
        if isinstance(error, GPUError):
            return lifetime.fresh_copy(error)
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
    """Fill ``workers`` as open_workers does, with a process for each session.

    The first process says which devices there are: this process must not use CUDA.
    """
    if sys.platform != "linux":
        raise _refused(f"isolate=True works on Linux only, and this is {sys.platform}", "leave isolate out")
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
    errors: list[BaseException] = []
    for worker in others:
        try:
            worker.opened.result()
        except BaseException as error:  # noqa: BLE001 - raised when all have ended
            errors.append(error)
    if errors:
        try:
            raise one_of(errors)
        finally:
            del errors  # its traceback holds this frame
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
