"""The workers of a pool with a process for each. The processes are started, watched, and replaced when they die."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...environment.child_process import ChildFailedError
from ...errors import ExecutionError, GPUError, WorkerLostError, manual
from ...model.files import ModelSource
from ...process.background import Thread, log, logged
from ...process.channel import Channel, PickledError
from ...process.threads import Notice, Outcome
from ...provider import living
from ...provider.devices import Device, DeviceRequest, plain_request
from ...provider.interfaces import Value
from .launching import WARM, Deadlines, Launch, Opened, portable
from .serving import Service
from .shared_memory import Exchange
from .workers import NotBegunError, Worker, check, named, options_of_others, wait_for_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .host_feeds import ProcessFeeds
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

_MOST_SHAPES = 4096  # the most known shapes of a process

#: The function that a worker process calls: it opens the session and serves the channels.
SERVE = "ortgpu.session.pool.worker_process:serve"
_ALIVE = "ortgpu.session.pool.worker_process:is_alive"


class WorkerProcess:
    """One process of a worker, from its start to its end. Raises ExecutionError if it cannot be started."""

    def __init__(self, launch: Launch) -> None:
        self.child, channels = launch.start()
        self.exchanges = [Exchange(Channel(end), *files, copy=launch.feeds.fill) for end, files in channels]
        self._idle = list(self.exchanges)
        self.has_opened = False
        self.has_result = False
        self.shapes: set[object] = set()  # the shapes of feeds that have run
        self.reason: str | None = None  # the cause of its end, if more is known than its exit status
        self.must_answer = False  # True: it is killed if it does not answer within some seconds.
        self._is_lost = self._has_ended = False

    @property
    def is_ready(self) -> bool:
        """True while it can run requests."""
        return self.has_opened and not self._is_lost

    def borrow(self) -> Exchange:
        """Return an idle exchange, as soon as there is one. Raises NotBegunError if the process has ended."""
        while not self._has_ended:
            with suppress(IndexError):  # Finalizers may make more requests than there are exchanges.
                return self._idle.pop()
            time.sleep(_LOOK)
        raise NotBegunError

    def give_back(self, exchange: Exchange) -> None:
        exchange.drop_if_large(frees=True)
        self._idle.append(exchange)
        if self._has_ended:
            self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def kill(self, reason: str) -> None:
        self._is_lost = True
        self.child.kill(reason)

    def lose(self) -> None:
        """Send no more requests, and tell the process to end."""
        self._is_lost = True
        self.child.channel.shut()

    def wait(self) -> None:
        """Wait for the end, and close the channels. A lost process that does not end is killed or left."""
        try:
            while True:
                self.child.until = None
                if self.must_answer:  # Another thread sets this first.
                    self.child.until = time.monotonic() + _DEATH
                self.child.ask(_ALIVE)
        except ChildFailedError:
            pass  # The process ended, or did not answer.
        except BaseException as error:  # noqa: BLE001 - the process says why it ends
            self.reason = f"{type(error).__name__}: {getattr(error, 'summary', error)}"
        self._is_lost = True
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

    is_replaceable = True

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
        service.add(self)
        self._keeper.start()

    @property
    def process(self) -> WorkerProcess | None:
        """The present process, if it can run requests."""
        current = self._current
        return current if current is not None and current.is_ready else None

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
        return self._ask(output_names, feed, {_shapes_of(feed)}, self._launch.deadlines)

    def warm(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        arrays = {(place, name): array for place, feed in enumerate(feeds) for name, array in feed.items()}
        self._ask(WARM, arrays, {_shapes_of(feed) for feed in feeds}, (None, None))

    def _ask(
        self, names: Any, arrays: Mapping[Any, NDArray[Any]], shapes: set[object], deadlines: Deadlines
    ) -> list[NDArray[Any]]:
        process, is_read = self.process, False
        if process is None:
            raise NotBegunError
        exchange, seconds = process.borrow(), deadlines[0 if shapes <= process.shapes else 1]
        try:
            try:
                exchange.send((names, list(arrays)), list(arrays.values()))
                is_read = True
                answer, outputs = exchange.receive(seconds)
            except (EOFError, OSError) as error:
                exchange.channel.shut()  # A late answer must not be taken for the next request's.
                if isinstance(error, TimeoutError):
                    process.kill(f"its deadline of {seconds:g} s has passed")
                process.lose()
                is_read = is_read and not isinstance(error, ConnectionResetError)
                raise (self._lost(process) if is_read else NotBegunError()) from None
            if isinstance(answer, PickledError):
                raise answer.error()
            process.has_result = True
            process.shapes = shapes | (process.shapes if len(process.shapes) < _MOST_SHAPES else set())
            return [self._launch.feeds.copy_of(output) for output in outputs]
        finally:
            process.give_back(exchange)

    def replace(self, error: ExecutionError) -> None:
        process = self.process
        if process is not None:
            process.kill(f"a run failed there and succeeded elsewhere: {error.summary}")

    def begin_ending(self) -> None:
        self._is_ending = True
        self._ending.give()
        current = self._current
        if current is not None:
            if not self.runs:
                current.lose()
            elif current.has_opened:
                current.must_answer = True
                current.child.until = time.monotonic() + _DEATH

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
            process, error = self._live()
            if self._device is None:
                self.opened.fail(error)
                return
            if self._is_ending:
                return
            if process is not None and process.has_opened:
                died = time.monotonic()
            fruitless = 0 if process is not None and process.has_result else fruitless + 1
            self.last_error = error if isinstance(error, GPUError) else self._not_replaced(error)
            self.is_lost = time.monotonic() - died >= _GIVEN_UP
            end = "" if self.is_lost else "; another one is started"
            log(logging.WARNING, "%s%s", self.last_error.summary, end, name="ortgpu.pool")
            self._service.notice(self)
            if self.is_lost:
                return
            del process, error  # They must not live as long as the next process.
            if fruitless:
                self._ending.take(min(_BACK_OFF[0] * 2 ** (fruitless - 1), _BACK_OFF[1]))
            self.restarts += 1

    def _live(self) -> tuple[WorkerProcess | None, BaseException]:
        """Start a process and wait for its end. Return it, and the error that ended it or that kept it from opening."""
        process: WorkerProcess | None = None
        error: BaseException | None = None
        try:
            process = self._current = WorkerProcess(self._launch)
            if self._is_ending:
                process.lose()
            opening = self._launch.opening(self._devices, self._place, self._options)
            self._begin_with(process, process.child.ask(SERVE, opening, timeout=_OPENING))
        except ChildFailedError as failed:
            if process is not None and failed.timed_out:
                process.reason = f"it had no session after {_OPENING:g} s"
        except BaseException as raised:  # noqa: BLE001 - the caller raises it, or it is the last error of this worker
            error = raised.with_traceback(None)  # The traceback of this thread holds the process.
        if process is None:
            assert error is not None
            return None, error
        if not process.has_opened:
            process.kill("it opened no session")
        process.wait()
        return process, self._lost(process) if error is None else error

    def _begin_with(self, process: WorkerProcess, opened: Opened) -> None:
        is_first, self._device = self._device is None, opened.device
        process.has_opened = True
        if is_first:
            # Ordinals change when a GPU is gone. The next process must not go to the CPU.
            self._devices = [plain_request(opened.device) if opened.device.is_gpu else opened.chosen[self._place]]
            self._place = 0
            if opened.device.is_gpu:
                self._options = options_of_others(self._options)
            self.opened.give(opened)
        self._service.notice(self)
        if self._is_ending:
            process.lose()

    def _not_replaced(self, error: BaseException) -> WorkerLostError:
        fix = "open the model in a GPUSession, which shows what is wrong with it"
        return self._error(" cannot be replaced", f"{type(error).__name__}: {error}", fix)

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


def _shapes_of(feed: Mapping[str, NDArray[Any]]) -> object:
    return frozenset((name, array.shape) for name, array in feed.items())


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
    requested = named(devices)
    options = portable(options)
    usual, first = deadline
    deadlines = (usual, first or max(usual, _FIRST_RUN)) if usual is not None else (None, None)
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
