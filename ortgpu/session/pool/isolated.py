"""The workers of a pool with a process for each. The processes are started, watched, and replaced when they die."""

from __future__ import annotations

import logging
import pickle
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...environment.child_process import ChildFailedError
from ...errors import ExecutionError, GPUError, WorkerLostError, manual
from ...model.files import ModelSource
from ...process.background import Thread, log, logged
from ...process.channel import Channel, PickledError, log_record
from ...process.parent import Answer
from ...process.parent import Request as Call
from ...process.threads import Notice, Outcome
from ...provider import living
from ...provider.devices import Device, DeviceRequest, plain_request
from ...provider.interfaces import Value
from .launching import Launch, Sockets, not_prepared, portable
from .messages import Opened, Opening, Warming
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
_LOOK = 0.1  # seconds between two looks at a silent process
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
    """One process of a worker, from its start to its end. Raises ExecutionError if it cannot be started.

    Before it reads a request of ``exchanges[number]``, the process writes 1 to ``begun[number]``.
    """

    def __init__(self, launch: Launch, feeds: ProcessFeeds) -> None:
        try:
            sockets = Sockets(launch.channels)
        except OSError as error:
            raise not_prepared(error) from None
        with sockets.theirs:
            try:
                self._process = launch.start(sockets.page, sockets.ends)
            except BaseException:
                for end in sockets.ours:
                    end.close()
                raise
        self.begun = sockets.begun
        self.exchanges = [Exchange(Channel(end), copy=feeds.fill) for end in sockets.ours]
        self._idle = list(range(launch.channels))
        self.has_opened = False
        self.has_result = False
        self.shapes: dict[object, None] = {}  # the shapes of all feeds that have run
        self._is_lost = self._has_ended = False
        self._reason: str | None = None
        self._words: BaseException | None = None
        self._asked: float | None = None  # the time of the question whether it is alive

    @property
    def child(self) -> subprocess.Popen[bytes]:
        return self._process.process

    @property
    def is_ready(self) -> bool:
        """True while it can run requests."""
        return self.has_opened and not self._is_lost

    def open(self, opening: Opening) -> Opened | BaseException | None:
        """Open the session in the process. Return it, or its error. None: the process died, or took too long."""
        try:
            opened: Opened = self._process.ask(SERVE, opening, timeout=_OPENING)
            return opened
        except ChildFailedError as error:
            if error.timed_out:
                self._reason = f"it had no session after {_OPENING:g} s"
            return None
        except BaseException as error:  # noqa: BLE001 - the session raised it
            return error.with_traceback(None)

    def borrow(self) -> int:
        """Return the number of an idle exchange, as soon as there is one. The process may have ended by then."""
        while True:
            with suppress(IndexError):  # Finalizers may make more requests than there are exchanges.
                return self._idle.pop()
            time.sleep(_LOOK / 10)

    def give_back(self, number: int) -> None:
        if self._has_ended:
            self.exchanges[number].close()
        self._idle.append(number)

    def has_run(self, shapes: object) -> None:
        if len(self.shapes) >= _MOST_SHAPES:
            self.shapes.clear()
        self.shapes[shapes] = None

    def kill(self, reason: str) -> None:
        self._is_lost = True
        if self._process.is_alive:
            self._reason = self._reason or reason
        self._process.kill(reason)

    def lose(self) -> None:
        """Send no more requests, and tell the process to end."""
        self._is_lost = True
        self._process.channel.shut()

    def ask_if_alive(self) -> None:
        """Ask the process for an answer. Without an answer within some seconds :meth:`wait` kills it."""
        self._asked = self._asked or time.monotonic()
        with suppress(OSError):
            self._process.channel.send(Call(pickle.dumps((_ALIVE, ()))), timeout=0)

    def wait(self) -> None:
        """Wait for the end. A lost process that does not end is killed; if it is stuck in the driver, it is left."""
        channel = self._process.channel
        with suppress(EOFError, OSError):  # The process ended, perhaps amid a message.
            while (is_there := channel.has_message(_LOOK)) or self._process.is_alive:
                if is_there:
                    self._hear(channel.receive(_DEATH)[0])
                elif self._asked is not None and time.monotonic() > self._asked + _DEATH:
                    self.kill("it does not answer")
                    break
        self._is_lost = True
        self._process.cause()  # This call kills a process that does not end.

    def _hear(self, said: object) -> None:
        if isinstance(said, Answer):
            self._asked = None
        elif isinstance(said, PickledError):
            self._words = said.error()
        elif isinstance(said, logging.LogRecord):
            log_record(said)

    def close(self) -> None:
        """Close the channels after the end of the process."""
        for exchange in self.exchanges:  # A thread that waits for an answer closes its own exchange.
            exchange.channel.shut()
        self._has_ended = True
        for number in list(self._idle):
            self.exchanges[number].close()
        self._process.channel.close()

    def cause(self) -> str:
        """Return the cause of its end, once :meth:`wait` knows it, or after some seconds."""
        until = time.monotonic() + 2 * _DEATH
        while not self._has_ended and time.monotonic() < until:
            time.sleep(_LOOK / 10)
        cause = self._process.cause()
        if self._reason is not None:
            return self._reason
        if self._words is not None:
            return f"{type(self._words).__name__}: {getattr(self._words, 'summary', self._words)}"
        return cause


class ProcessWorker(Worker):
    """A worker process, and the thread that replaces it when it dies."""

    is_replaceable = True

    def __init__(
        self,
        number: int,
        place: int,
        launch: Launch,
        devices: list[DeviceRequest] | None,
        options: Mapping[str, Any],
        deadline: tuple[float | None, float],
        service: Service,
        feeds: ProcessFeeds,
    ) -> None:
        super().__init__(place, launch.channels)
        self.number = number
        self.opened: Outcome[Opened] = Outcome()  # the session of the first process
        self._device: Device | None = None
        self._launch = launch
        self._devices, self._place, self._options = devices, 0 if devices else place, options
        self._deadline, self._first = deadline
        self._service, self._feeds = service, feeds  # The worker notifies the service when it becomes ready or lost.
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
        return current.child.pid if current is not None and current.child.returncode is None else None

    def begin(self) -> None:
        """Start the first process. :attr:`opened` gets its session or its error."""
        self._keeper.start()

    def run(self, output_names: Any, feed: Any) -> list[NDArray[Any]]:
        """Run a request in the process.

        Raises:
            NotBegunError: the process has not seen the request.
            WorkerLostError: the process died while it had the request, or exceeded the deadline.
            Exception: the errors of the session.
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
            results = [self._feeds.copy_of(output) for output in outputs]
            process.exchanges[number].drop_if_large()
            return results
        finally:
            process.give_back(number)

    def warm(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        process = self.process
        if process is None:
            raise NotBegunError
        number = process.borrow()
        try:
            arrays = {(place, name): array for place, feed in enumerate(feeds) for name, array in feed.items()}
            answer, _ = self._ask(process, number, Warming(len(feeds)), arrays, is_limited=False)
            if isinstance(answer, PickledError):
                raise answer.error()
            process.exchanges[number].drop_if_large()
        finally:
            process.give_back(number)

    def _ask(
        self, process: WorkerProcess, number: int, output_names: Any, feed: Any, *, is_limited: bool = True
    ) -> tuple[Any, list[NDArray[Any]]]:
        """Return the answer to a request, with outputs that last until the next request."""
        shapes = seconds = None
        if self._deadline is not None and is_limited:
            shapes = tuple((name, array.shape) for name, array in feed.items())
            seconds = self._deadline if shapes in process.shapes else self._first
        exchange, process.begun[number] = process.exchanges[number], 0
        try:
            exchange.send((output_names, list(feed)), list(feed.values()))
            answer, outputs = exchange.receive(seconds)
        except (EOFError, OSError) as error:
            exchange.channel.shut()  # A late answer must not be taken for the next request's.
            if isinstance(error, TimeoutError):
                process.kill(f"its deadline of {seconds:g} s has passed")
            process.lose()
            raise (self._lost(process) if process.begun[number] else NotBegunError()) from None
        if answer is None and shapes is not None:
            process.has_run(shapes)
        return answer, outputs

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
                current.ask_if_alive()

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

    def _keep(self) -> None:
        with logged("a thread that replaces worker processes ended"):
            self._keep_on()

    def _keep_on(self) -> None:
        fruitless = 0  # number of consecutive processes without a result
        died = 0.0  # time of the last death of a process with a session
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
            end = "" if self.is_lost else "; another one is started"
            log(logging.WARNING, "%s%s", self.last_error.summary, end, name="ortgpu.pool")
            self._service.notice(self)
            if self.is_lost:
                return
            del process, error  # They must not live as long as the next process.
            if fruitless:
                self._ending.take(min(_BACK_OFF[0] * 2 ** (fruitless - 1), _BACK_OFF[1]))
            self.restarts += 1

    def _live(self) -> tuple[WorkerProcess | None, BaseException | None]:
        """Start a process and wait for its end. Return it, and its error if it could not open its session."""
        process: WorkerProcess | None = None
        answer: Opened | BaseException | None = None
        launch = self._launch
        try:
            process = self._current = WorkerProcess(launch, self._feeds)
            if self._is_ending:
                process.lose()
            answer = process.open(launch.opening(self._devices, self._place, self._options))
            if isinstance(answer, Opened):
                self._begin_with(process, answer)
        except BaseException as raised:  # noqa: BLE001 - the caller raises it, or it is the last error of this worker
            answer = raised.with_traceback(None)  # The traceback of this thread holds the process.
        error = answer if isinstance(answer, BaseException) else None
        if process is not None:
            if error is not None:
                process.kill("it opened no session")
            process.wait()
        return process, error

    def _begin_with(self, process: WorkerProcess, opened: Opened) -> None:
        is_first, self._device = self._device is None, opened.device
        if is_first:
            # Ordinals change when a GPU is gone. The next process must not go to the CPU.
            self._devices = [plain_request(opened.device) if opened.device.is_gpu else opened.chosen[self._place]]
            self._place = 0
            if opened.device.is_gpu:
                self._options = options_of_others(self._options)
        process.has_opened = True
        if is_first:
            self.opened.give(opened)
        self._service.notice(self)
        if self._is_ending:
            process.lose()

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
    service: Service,
    model: ModelSource,
    devices: str | Iterable[Device | DeviceRequest],
    sessions_per_device: int,
    options: Mapping[str, Any],
    session_class: Callable[[], Callable[..., OpenSession]],
    deadline: tuple[float | None, float | None],
    feeds: ProcessFeeds,
) -> None:
    """Add workers to a service, like open_sessions, with a process for each session.

    The first process lists the devices, since this process must not use CUDA.
    """
    check(sessions_per_device, options)
    requested = named(devices)
    options = portable(options)
    usual, first_run = deadline
    first_run = first_run or max(usual or 0, _FIRST_RUN)
    launch = Launch(model, session_class, -(-_THREADS_PER_DEVICE // sessions_per_device))

    def add(place: int, devices: list[DeviceRequest] | None) -> ProcessWorker:
        worker = ProcessWorker(
            len(service.workers), place, launch, devices, options, (usual, first_run), service, feeds
        )
        service.add(worker)
        worker.begin()
        return worker

    first = add(0, requested)
    opened = first.opened.result()
    if opened.device.is_gpu:
        options = options_of_others(options)
    places = [place for _ in range(sessions_per_device) for place in range(len(opened.chosen))]
    others = [add(place, [opened.chosen[place]]) for place in places[1:]]
    wait_for_all(worker.opened.result for worker in others)
    for process_worker in (first, *others):
        for warning in process_worker.opened.result().warnings:
            warnings.warn(warning, stacklevel=living.stacklevel(None))
