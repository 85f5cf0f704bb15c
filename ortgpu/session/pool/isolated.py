"""The workers of a pool with a process for each. The processes are started, watched, and replaced when they die."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...environment.child_process import ChildFailedError, ChildProcess, not_started
from ...environment.packages.installed import locate_packages
from ...environment.packages.plugins import environ_of_child
from ...errors import GPUError, ProviderRequestError, WorkerLostError, manual
from ...model.contents import data_files
from ...model.files import ModelSource, source_of, stamp_of
from ...process.background import Thread, cached_property, is_of_a_handler, log, logged
from ...process.channel import Channel, PickledError, avoid_standard_streams, memory_file
from ...process.threads import Notice, Outcome
from ...provider import living
from ...provider.devices import Device, DeviceRequest, check_devices, plain_request
from ...provider.interfaces import Value
from ...provider.options import not_sent
from ...provider.runtime import load_runtime
from ...running.pinned import OrdinaryMemory
from ...running.pipeline import mapping
from . import worker_process
from .serving import Service
from .shared_memory import Exchange
from .worker_process import WARM, Opened
from .workers import Feeds, NotBegunError, Worker, check, options_of_others, wait_for_all

if TYPE_CHECKING:
    from ...running.copying import ParallelCopy
    from .sessions import OpenSession

# Seconds. A model of many gigabytes on a network disk takes minutes to open; a longer opening is a hang.
_OPENING = 600.0
# Seconds for the first run of a shape in a process: cuDNN and TensorRT may try many kernels.
_FIRST_RUN = 120.0
# Seconds for a process to answer, or to end when it must. A process that is stuck in the driver is left behind.
_DEATH = 5.0
_LOOK = 0.01  # seconds between two looks at the end of a process
# Seconds between two processes of a worker that die before a first result: doubled each time, up to the second number.
_BACK_OFF = 0.1, 10.0
_GIVEN_UP = 30.0  # If no new process opens a session in these seconds after a death, the worker is lost.

# A worker needs one thread more than a session in this process, since they copy to and from shared memory.
_THREADS_PER_DEVICE = 4

_HOST = 1, 3  # DLDeviceType: kDLCPU, kDLCUDAHost
_MOST_SHAPES = 4096  # the most known shapes of a process

SERVE: Any = worker_process.serve  # A worker process calls it first.

Deadlines = tuple[float | None, float | None]  # seconds for a run, and for the first run of a shape


class ProcessFeeds(Feeds):
    """Copies arrays of the host. Several threads copy a large array into reused memory. Threads may share the object.

    ``limit`` is the most bytes to keep for later copies.
    """

    def __init__(self, limit: int) -> None:
        self._memory = OrdinaryMemory(limit)

    def pass_through(self, feed: Any) -> dict[str, NDArray[Any]]:
        return {name: _host_array(name, value) for name, value in mapping(feed).items()}

    def copied(self, feed: Any, waits: Iterable[Callable[[], object]] = ()) -> tuple[Any, bool]:
        return {name: self.copy_of(array) for name, array in self.pass_through(feed).items()}, True

    def copy_of(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.nbytes < self.large:
            return array.copy()
        copy = self.empty(array.shape, array.dtype)
        self.fill(copy, array)
        return copy

    @cached_property
    def _threads(self) -> ParallelCopy | None:
        arrival = locate_packages().onnxruntime.arrival
        if arrival is not None and arrival.way == "bundled plugin":
            return None  # Importing the plugin may use CUDA, and the program must be able to fork.
        if load_runtime().module is None:
            return None
        try:
            from ...running.copying import copy_threads, parallel_copy  # Import it late: it imports ONNX Runtime.
        except (ImportError, OSError):  # too many files are open
            return None
        return parallel_copy(copy_threads(), -1)  # of no device


def _host_array(name: str, value: Any) -> NDArray[Any]:
    """Return a NumPy array over the memory of a value.

    Raises ProviderRequestError if it is no array of numbers on the host.
    """
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject and value.dtype.kind not in "SU":
            return np.asarray(value)  # A subclass may copy differently.
        what = "text"
    elif hasattr(value, "__dlpack_device__") and type(value).__module__.partition(".")[0] != "onnxruntime":
        if int(value.__dlpack_device__()[0]) in _HOST:
            return np.from_dlpack(value)
        what = "on a GPU"
    else:
        what = f"a {type(value).__name__}"
    raise ProviderRequestError(
        f"input {name!r} is {what}, and a pool with isolate=True takes arrays of numbers on the host",
        fixes=[manual("pass a NumPy array of numbers, or use a pool without isolate, or a GPUSession")],
        requested="isolate",
    )


class Launch:
    """The model, the arguments and the environment that all processes of a pool share.

    The files of the model stay open, so that a new process serves the same model even after a change of the path.
    Raises ExecutionError if there is no room for a model as bytes, or no more files can be open.
    """

    def __init__(
        self,
        model: ModelSource,
        session_class: Callable[[], Any],
        channels: int,
        deadlines: Deadlines,
        feeds: ProcessFeeds,
    ) -> None:
        self.channels, self.deadlines, self.feeds = channels, deadlines, feeds
        self.descriptors: list[int] = []
        self.environ = environ_of_child()
        files: list[tuple[str, tuple[int, ...] | None]] = []
        source = source_of(model)
        self.arguments = None if isinstance(source, bytes) else source, files, channels, session_class
        try:
            if isinstance(source, bytes):
                files.append(("", None))
                self.descriptors.append(memory_file("ortgpu-model"))
                with open(self.descriptors[0], "wb", closefd=False) as file:
                    file.write(source)
            else:
                for location in (source, *data_files(source)):
                    # The session raises the reason.
                    with suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
                        file_path = os.path.join(os.path.dirname(source), location)
                        opened = os.open(file_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                        self.descriptors.append(avoid_standard_streams(opened))
                        files.append((location, stamp_of(self.descriptors[-1])))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise not_started(error) from None
            raise

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class WorkerProcess:
    """One process of a worker, from its start to its end. Raises ExecutionError if it cannot be started."""

    def __init__(self, launch: Launch) -> None:
        self.exchanges: list[Exchange] = []
        numbers: list[int] = []  # the descriptors of the child
        with ExitStack() as failed, ExitStack() as theirs:
            try:
                for _ in range(launch.channels):
                    our, their = socket.socketpair()
                    failed.callback(our.close)
                    numbers.append(avoid_standard_streams(their.detach()))
                    theirs.callback(os.close, numbers[-1])
                    numbers.append(memory_file("ortgpu-arrays"))
                    failed.callback(os.close, numbers[-1])
                    self.exchanges.append(Exchange(Channel(our), numbers[-1], copy=launch.feeds.fill))
            except OSError as error:
                raise not_started(error) from None
            self.child = ChildProcess(environ=launch.environ, descriptors=[*numbers, *launch.descriptors])
            failed.pop_all()
        self._idle = list(self.exchanges)
        self.has_opened = False
        self.shapes: set[object] = set()  # the shapes of feeds that have run; empty: it has given no result
        self.reason: str | None = None  # the cause of its end, if more is known than its exit status
        self.is_lost = self._has_ended = False

    def borrow(self) -> Exchange:
        """Return an idle exchange, as soon as there is one. Raises NotBegunError if the process has ended."""
        while not self._has_ended:
            with suppress(IndexError):  # Finalizers may make more requests than there are exchanges.
                return self._idle.pop()
            time.sleep(_LOOK)
        raise NotBegunError

    def give_back(self, exchange: Exchange) -> None:
        exchange.end(frees=True)
        self._idle.append(exchange)
        if self._has_ended:
            self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def kill(self, reason: str) -> None:
        self.is_lost = True
        self.child.kill(reason)

    def lose(self) -> None:
        """Send no more requests, and tell the process to end."""
        self.is_lost = True
        self.child.channel.shut()

    def wait(self) -> None:
        """Wait for the end, and close the channels. A lost process that does not end is killed or left."""
        try:
            while True:
                self.child.ask(worker_process.is_alive)
        except ChildFailedError:
            pass  # The process ended, or did not answer.
        except BaseException as error:  # noqa: BLE001 - the process says why it ends
            self.reason = f"{type(error).__name__}: {getattr(error, 'summary', error)}"
        self.is_lost = True
        self.child.cause()  # This call kills a process that does not end.
        for exchange in self.exchanges:  # A thread that waits for an answer closes its own exchange.
            exchange.channel.shut()
        self._has_ended = True
        self._close_idle()
        self.child.channel.close()

    def cause(self) -> str:
        """Return the cause of its end, once :meth:`wait` knows it, or after some seconds."""
        until = time.monotonic() + 2 * _DEATH
        while not self._has_ended and time.monotonic() < until:
            time.sleep(_LOOK)
        return self.reason or self.child.cause()


class ProcessWorker(Worker):
    """A worker process, and the thread that starts it, and replaces it when it dies. It joins its service at once."""

    def __init__(
        self,
        service: Service,
        place: int,
        launch: Launch,
        devices: list[DeviceRequest] | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(place, launch.channels)
        self.number = len(service.workers)
        self.opened: Outcome[Opened] = Outcome()  # the session of the first process, or its error
        self._device: Device | None = None
        self._devices, self._place, self._options = devices, 0 if devices else place, options
        self._launch = launch
        self._service = service  # It is notified when this worker becomes ready or lost.
        self._current: WorkerProcess | None = None
        self._ending = Notice()
        self._is_ending = False
        self._keeper = Thread(self._keep, f"ortgpu-keep-{self.number}")
        service.workers.append(self)
        self._keeper.start()

    @property
    def process(self) -> WorkerProcess | None:
        """The present process, if it can run requests."""
        current = self._current
        return current if current is not None and current.has_opened and not current.is_lost else None

    @property
    def capacity(self) -> int:  # type: ignore[override]  # it changes when a process dies
        return self.most if self.process is not None else 0

    @property
    def state(self) -> str:
        if self.process is not None:
            return "ready"
        return "replacing" if self._keeper.is_alive() else "lost"

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
        child = current.child.process if current is not None else None
        return child.pid if child is not None and child.returncode is None else None

    def run(self, output_names: Any, feed: Any) -> list[NDArray[Any]]:
        return self._ask(output_names, [feed], self._launch.deadlines)

    def warm(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        self._ask(WARM, feeds, (None, None))

    def _ask(self, names: Any, feeds: Sequence[Mapping[str, NDArray[Any]]], deadlines: Deadlines) -> list[NDArray[Any]]:
        process, is_read = self.process, False
        if process is None:
            raise NotBegunError
        shapes = {frozenset((name, array.shape) for name, array in feed.items()) for feed in feeds}
        exchange, seconds = process.borrow(), deadlines[0 if shapes <= process.shapes else 1]
        try:
            try:
                arrays = [array for feed in feeds for array in feed.values()]
                exchange.send((names, [list(feed) for feed in feeds]), arrays)
                is_read = True
                answer, outputs = exchange.receive(seconds)
            except BaseException as error:
                is_interrupt = not isinstance(error, Exception) or is_of_a_handler(error)  # perhaps a TimeoutError
                if not is_interrupt and not isinstance(error, (EOFError, OSError)):
                    raise
                exchange.channel.shut()  # A late answer must not be taken for the next request's.
                if isinstance(error, TimeoutError) and not is_interrupt:
                    process.kill(f"its deadline of {seconds:g} s has passed")
                process.lose()
                if is_interrupt:
                    raise
                is_read = is_read and not isinstance(error, ConnectionResetError)
                raise (self._lost(process) if is_read else NotBegunError()) from None
            if isinstance(answer, PickledError):
                raise answer.error()
            process.shapes = shapes | (process.shapes if len(process.shapes) < _MOST_SHAPES else set())
            return [self._launch.feeds.copy_of(output) for output in outputs]
        finally:
            process.give_back(exchange)

    def replace(self, error: GPUError) -> bool:
        process = self.process
        if process is not None:
            process.kill(f"a run failed there and succeeded elsewhere: {error.summary}")
        return True

    def begin_ending(self) -> None:
        self._is_ending = True
        self._ending.give()
        current = self._current
        if current is not None:
            if not current.has_opened or not self.runs:
                current.lose()
            else:
                current.child.patience = _DEATH

    def kill(self) -> None:
        current = self._current
        if current is not None:
            current.kill("the pool was closed while it ran a request")

    def close(self, timeout: float | None) -> None:
        self.begin_ending()
        current = self._current
        if current is not None:
            current.lose()
        if not self._keeper.is_this() and not self._keeper.wait(4 * _DEATH if timeout is None else timeout):
            return
        self._current = None
        self._launch.close()

    # The thread that keeps a process running

    @logged("a thread that replaces worker processes ended")
    def _keep(self) -> None:
        fruitless = 0  # number of consecutive processes without a result
        died = 0.0  # time of the last death of a process with a session
        while not self._is_ending:
            error = self._live()
            if self._device is None:
                self.opened.fail(error)
                return
            if self._is_ending:
                return
            if self._current is not None and self._current.has_opened:
                died = time.monotonic()
            fruitless = 0 if self._current is not None and self._current.shapes else fruitless + 1
            if not isinstance(error, GPUError):
                fix = "open the model in a GPUSession, which shows what is wrong with it"
                error = self._error(" cannot be replaced", f"{type(error).__name__}: {error}", fix)
            self.last_error = error
            self.is_lost = time.monotonic() - died >= _GIVEN_UP
            end = "" if self.is_lost else "; another one is started"
            log(logging.WARNING, "%s%s", self.last_error.summary, end, name="ortgpu.pool")
            self._service.notice(self)
            if self.is_lost:
                return
            del error  # It must not live as long as the next process.
            if fruitless:
                self._ending.take(min(_BACK_OFF[0] * 2 ** (fruitless - 1), _BACK_OFF[1]))
            self.restarts += 1

    def _live(self) -> BaseException:
        """Start a process and wait for its end. Return the error that ended it or that kept it from opening."""
        self._current = None
        try:
            process = self._current = WorkerProcess(self._launch)
            if self._is_ending:
                process.lose()
            try:
                arguments = *self._launch.arguments, self._devices, self._place, self._options
                opened: Opened = process.child.ask(SERVE, *arguments, timeout=_OPENING)
                is_first, self._device = self._device is None, opened.device
                process.has_opened = True
                if is_first:
                    # Ordinals change when a GPU is gone. The next process must not go to the CPU.
                    is_gpu = opened.device.is_gpu
                    self._devices = [plain_request(opened.device) if is_gpu else opened.chosen[self._place]]
                    self._place = 0
                    if is_gpu:
                        self._options = options_of_others(self._options)
                    self.opened.give(opened)
                self._service.notice(self)
            except ChildFailedError as failed:
                if failed.timed_out:
                    process.reason = f"it had no session after {_OPENING:g} s"
            finally:
                if not process.has_opened:
                    process.kill("it opened no session")
                process.wait()
            return self._lost(process)
        except BaseException as error:  # noqa: BLE001 - the caller raises it, or it is the last error of this worker
            return error.with_traceback(None)  # The traceback of this thread holds the process.

    def _lost(self, process: WorkerProcess) -> WorkerLostError:
        cause = process.cause()
        fix = "run the same feeds in a GPUSession in a process of its own, to see what ends it"
        if cause == "SIGKILL":
            fix = "look for the OOM killer in the kernel's log (dmesg): a machine out of memory kills like this"
        return self._error(f", process {process.child.process.pid}, was lost", cause, fix)

    def _error(self, what: str, cause: str, fix: str) -> WorkerLostError:
        place = f"worker {self.number} on {self._device or 'no device yet'}"
        details: Any = {"worker": self.number, "device": str(self._device), "cause": cause}
        return WorkerLostError(f"{place}{what}: {cause}", fixes=[manual(fix)], **details)


def open_processes(
    service: Service,
    model: ModelSource,
    devices: str | Iterable[Device | DeviceRequest],
    sessions_per_device: int,
    options: Mapping[str, Any],
    session_class: Callable[[], Callable[..., OpenSession]],
    deadline: Deadlines,
    feeds: ProcessFeeds,
) -> None:
    """Add workers to a service, like open_sessions, with a process for each session.

    The first process lists the devices, since this process must not use CUDA.
    """
    check(sessions_per_device, options)
    requested = check_devices(devices)
    if type(options.get("sess_options")).__name__ == "SessionOptions":
        raise not_sent()
    for name, value in options.items():
        if getattr(value, "__module__", "") == "__main__":
            raise TypeError(f"{name} is of the main program, which worker processes do not import: move it to a module")
        try:
            pickle.dumps(value)
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise TypeError(f"{name} of a GPUSessionPool with isolate=True must pickle: {error}") from None
    usual, first = deadline
    deadlines = usual, first or (usual and max(usual, _FIRST_RUN))
    launch = Launch(model, session_class, -(-_THREADS_PER_DEVICE // sessions_per_device), deadlines, feeds)
    workers = [ProcessWorker(service, 0, launch, requested, options)]
    opened = workers[0].opened.result()
    if opened.device.is_gpu:
        options = options_of_others(options)
    places = [place for _ in range(sessions_per_device) for place in range(len(opened.chosen))]
    workers += [ProcessWorker(service, place, launch, [opened.chosen[place]], options) for place in places[1:]]
    wait_for_all(worker.opened.result for worker in workers)
    for worker in workers:
        for warning in worker.opened.result().warnings:
            warnings.warn(warning, stacklevel=living.stacklevel(None))
