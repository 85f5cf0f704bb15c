"""Worker threads that take calls for as long as the process lives.

The threads of concurrent.futures refuse all work once the main thread has ended. A program, such as a server, may go on
in other threads then. The threads here end with the interpreter instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from .background import AT_EXIT, Thread, logged, may_wait, owners, this_thread

Result = TypeVar("Result")
Raised = TypeVar("Raised", bound=BaseException)
Call = Callable[[], object]

# Seconds. A thread holds the lock of a future for microseconds, unless an interrupt left it locked.
_PATIENCE = 0.2
_LONGEST_WAIT = 1.0  # seconds: see Turns.run


def drop_own_frames(error: Raised) -> Raised:
    """Remove the frames of this library from the traceback of an error, and return the error."""
    frames, kept = error.__traceback__, list[TracebackType]()
    while frames is not None:
        if str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0] != "ortgpu":
            kept.append(frames)
        frames = frames.tb_next
    for frame in reversed(kept):
        frames = TracebackType(frames, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = frames
    return error


class _Cancellable:
    # Returns the function to be called after the cancellation, or None.
    leave: Callable[[], Callable[[], object] | None] = staticmethod(lambda: None)

    def _tell_if(self, is_cancelled: bool) -> bool:
        leave = self.leave() if is_cancelled else None
        if leave is not None:
            leave()
        return is_cancelled


class Outcome(_Cancellable, Generic[Result]):
    """The result of a call that one thread makes and others wait for. Interrupts of the waiting threads do no harm."""

    def __init__(self) -> None:
        self._begun = threading.Lock()
        self._pending = threading.Lock()
        self._pending.acquire()
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def begin(self) -> bool:
        """Take the right to make the call. Return False if it was taken before, or the call was cancelled."""
        return self._begun.acquire(blocking=False)

    def cancel(self) -> bool:
        return self._tell_if(self._begun.acquire(blocking=False))

    def give(self, result: Result) -> None:
        """Set the result. The thread that made the call does this once."""
        self._results.append(result)
        self._pending.release()

    def fail(self, error: BaseException) -> None:
        """Set the error, instead of :meth:`give` or after an interrupt of it."""
        self._error = drop_own_frames(error)
        if self._pending.locked():
            self._pending.release()

    def drop(self) -> None:
        """Let the waiting threads go without a result, since the call was cancelled."""
        self._pending.release()

    def wait(self) -> None:
        with self._pending:
            pass

    def result(self) -> Result:
        with self._pending:  # This is wait() without its call, since each run comes here.
            pass
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # The traceback of the error refers to this frame.
        return self._results[0]


class RobustFuture(_Cancellable, Future[Result]):
    """A Future that calls every callback, whatever the others raise.

    After a SystemExit the standard library's Future skips the other callbacks, and raises it in the answering thread.
    """

    def cancel(self) -> bool:
        return self._tell_if(super().cancel())

    def _invoke_callbacks(self) -> None:
        callbacks: list[Any] = self._done_callbacks  # type: ignore[attr-defined]  # not in typeshed
        if not callbacks:  # Most futures have none.
            return
        thread = threading.get_ident()
        is_outermost = thread not in _in_callbacks
        _in_callbacks.add(thread)
        try:
            for callback in callbacks:
                with logged("a callback of a future raised"):
                    callback(self)
        finally:
            if is_outermost:
                _in_callbacks.discard(thread)


_in_callbacks: set[int] = set()  # The ids of threads.


def is_in_callback() -> bool:
    """Return True if this thread calls the callbacks of a RobustFuture."""
    return threading.get_ident() in _in_callbacks


class FutureOutcome(Outcome[Result]):
    """The outcome of a call for a caller that waits for a Future.

    A Future's lock is entered in Python: an interrupted ``future.result()`` may leave it held for ever. The thread
    that makes the call must not wait for it then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.future: RobustFuture[Result] = RobustFuture()

    def begin(self) -> bool:
        return not self._is_free() or self.future.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        return self.future.cancel()

    def give(self, result: Result) -> None:
        self._results.append(result)
        self._pending.release()
        if self._is_free():
            with contextlib.suppress(InvalidStateError):  # The future was cancelled while its lock was held.
                self.future.set_result(result)
        else:
            _tell_late(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self._is_free():
            with contextlib.suppress(InvalidStateError):
                self.future.set_exception(error)
        else:
            _tell_late(self.future.set_exception, error)

    def _is_free(self) -> bool:
        lock = self.future._condition  # The standard library's wait() takes it in the same way.
        if lock.acquire(timeout=_PATIENCE):
            lock.release()
            return True
        return False


def _tell_late(tell: Callable[[Any], None], what: object) -> None:
    """Tell a future in a new thread. The thread with its lock releases the lock when it waits for the future."""

    def do() -> None:
        with contextlib.suppress(InvalidStateError):
            tell(what)

    with contextlib.suppress(RuntimeError):  # Without a further thread the future gets no result.
        Thread(do, "ortgpu-future").start()


class Notice:
    """A notice that there is news. It stays until a thread takes it, and a second one before that changes nothing.

    Not a SimpleQueue: before Python 3.13 its ``get(timeout=...)`` never returns if a signal reaches the waiting thread
    when the time is over.
    """

    def __init__(self) -> None:
        self._absent = threading.Lock()
        self._absent.acquire()

    def give(self) -> None:
        try:
            self._absent.release()
        except RuntimeError:  # The notice is there already.
            pass

    def take(self, timeout: float | None = None) -> bool:
        """Wait for it, and take it. Return False if it did not come within ``timeout`` seconds."""
        return self._absent.acquire(timeout=-1 if timeout is None else timeout)


class Turns:
    """The turns of calls that one thread at a time makes, such as the runs of a session: first come, first served.

    A thread takes a turn at once if ``owner`` and ``first`` are 0: it takes ``lock`` in the step of a loop, and sets
    ``owner`` until the call has ended. Between the test of ``owner`` and ``first`` and the assignment of ``owner``, it
    calls only ``acquire`` in that step. So neither a signal nor another thread comes between them.

    Attributes:
        owner: the id of the thread that makes a call; 0 if the turn is free.
        first: the id of the thread that has the next turn; 0 if no thread waits.
        lock: held during each call.
    """

    __slots__ = ("__weakref__", "_next", "_started", "first", "lock", "owner")

    def __init__(self) -> None:
        self.owner = self.first = 0
        self.lock = threading.Lock()
        self._next = threading.Lock()  # held by the thread that has the next turn
        self._started: object = None  # names the call of start() that has the turn
        owners.add(weakref.ref(self, owners.discard))

    def run(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """Make a call as soon as it gets a turn, and return its result.

        A signal handler or finalizer amid a call of its thread makes the call within that turn. Amid other work it
        waits for a second at most, because the thread with the turn may wait for what this thread holds.
        """
        if self.owner == threading.get_ident():
            return call(*arguments, **named)
        return self._run(-1 if may_wait() else _LONGEST_WAIT / 2, call, arguments, named)

    def run_in_turn(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """Make a call as :meth:`run` does, and wait in any case. This thread must have no turn."""
        return self._run(-1, call, arguments, named)

    def start(self, name: object, call: Any, *arguments: Any) -> None:
        """Make a call as :meth:`run` does. Unless it raises, its turn lasts until it is given back by name."""
        longest = -1 if may_wait() else _LONGEST_WAIT / 2
        with this_thread.has_turn:  # A handler meanwhile must not wait for this thread.
            self._run(longest, call, arguments, {}, name)

    def give(self, name: object) -> None:
        """Give the turn of :meth:`start` back, if that call has one."""
        if self.owner == _STARTED and self._started is name:
            self.owner = 0
            self.lock.release()

    def _run(self, longest: float, call: Any, arguments: Any, named: Any, name: object = None) -> Any:
        """Wait twice for up to ``longest`` seconds, and make a call. -1: wait for a turn in any case."""
        thread, is_kept = threading.get_ident(), False
        owner = thread if name is None else _STARTED
        # A signal handler amid the wait of its own thread for the next turn goes ahead of that thread.
        for is_next in _waits(self._next, longest) if self.first != thread else (False,):
            in_line = is_next
            try:
                if in_line:
                    self.first = thread
                for is_taken in _waits(self.lock, longest):
                    try:
                        if is_taken:
                            self._started, self.owner = name, owner
                        if in_line:
                            in_line = False
                            self.first = 0
                            self._next.release()
                        result = call(*arguments, **named)
                        is_kept = name is not None
                        return result
                    finally:
                        if not is_kept and self.owner == owner and self._started is name:
                            self.owner = 0
                            self.lock.release()
            finally:
                if in_line:
                    self.first = 0
                    self._next.release()
        raise AssertionError("the loops end by their return")


_STARTED = -1  # the owner of a turn that a thread gives back later


def _waits(lock: threading.Lock, longest: float) -> Iterator[bool]:
    """Return an iterator that waits for a lock in its step, and yields whether it took the lock.

    An interrupt between ``acquire()`` and ``try`` would leave the lock held. This step is in C, and signals are seen
    after calls.
    """
    return iter(functools.partial(lock.acquire, timeout=longest), None)


class Slots:
    """Up to ``count`` threads at a time make a call, such as staged runs of one session."""

    def __init__(self, count: int) -> None:
        self._slots: SimpleQueue[bool] = SimpleQueue()
        for _ in range(count):
            self._slots.put(True)

    def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Make a call as soon as there is a slot, and return its result."""
        for slot in iter(self._slots.get, None):  # The step is in C: see _waits.
            try:
                with this_thread.has_turn:
                    return call(*arguments)
            finally:
                self._slots.put(slot)
        raise AssertionError("the loop ends by its return")


class Executor:
    """Up to ``most`` threads, started when needed, for calls with an :class:`Outcome`.

    If the system gives not even one thread, calls are made at once by the caller: under a limit of the user or
    container, and, once the main thread has ended, in Python 3.12.0 to 3.12.2 (CPython pull request 117029).
    Once nothing refers to the executor, its threads finish the queued calls and end. So they do at the end of the
    program: it waits for them for up to AT_EXIT seconds.
    """

    def __init__(self, most: int, name: str, first: Call | None = None) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.threads: list[Thread] = []
        self._most = most
        self._unstarted = list(range(most - 1, -1, -1))  # A caller pops a number in one step of C: no lock is needed.
        self._refused: list[int] = []  # The system did not give these threads.
        self._first = first
        self._closed = False
        self._pid = os.getpid()
        weakref.finalize(self, _end, weakref.ref(self), self._calls)

    def submit(self, outcome: Outcome[Result], function: Callable[..., Result], *arguments: Any) -> None:
        """Call ``function`` in a thread. Raises RuntimeError if the executor is closed."""
        call = _Call(outcome, function, arguments)
        if self._closed:
            raise RuntimeError("these threads have ended")
        with contextlib.suppress(IndexError):
            self._start(self._unstarted.pop())
        if self._has_no_thread():
            call()
        else:
            self._calls.put(call)
        if self._has_no_thread() or self._closed:  # This may have changed meanwhile, and the threads may have ended.
            self._make_left_calls()

    def _start(self, number: int) -> None:
        # Daemons: a forgotten thread must not keep the program from ending.
        thread = Thread(functools.partial(_work, self._calls, self._first), f"{self._name}_{number}")
        try:
            thread.start(self.threads.append)
        except BaseException as error:
            if thread not in self.threads:
                self._refused.append(number)
            if not isinstance(error, RuntimeError):
                raise

    def _has_no_thread(self) -> bool:
        """Return True if there is no thread, and no other caller is about to start one."""
        return len(self._unstarted) + len(self._refused) == self._most

    def stop(self) -> None:
        self._calls.put(None)

    def close(self, timeout: float | None = None) -> None:
        """Refuse further calls and wait until the submitted ones are done, if this thread may wait. Twice is fine."""
        if os.getpid() != self._pid:
            return  # The threads stayed in the parent process.
        self._closed = True
        self.stop()
        if not may_wait():
            return
        until = None if timeout is None else time.monotonic() + timeout
        for thread in list(self.threads):
            if thread is not threading.current_thread():  # A call may close its own executor.
                thread.wait(None if until is None else until - time.monotonic())

    def _make_left_calls(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                if call is None:
                    self._calls.put(None)
                    return
                call()


class _Call:
    def __init__(self, outcome: Outcome[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._outcome: Outcome[Any] | None = outcome
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        outcome, self._outcome = self._outcome, None
        arguments, self._arguments = self._arguments, ()
        assert outcome is not None
        try:
            if outcome.begin():
                result = self._function(*arguments)
                arguments = ()  # The waiting thread may need their memory.
                outcome.give(result)
        except BaseException as error:  # noqa: BLE001 - the outcome's to raise
            arguments = ()
            outcome.fail(error)
            del self, outcome  # The outcome holds the error, and the error holds this frame.


def _work(calls: SimpleQueue[Call | None], first: Call | None) -> None:
    """Make the queued calls. No reference to the executor is held here, so an unused executor is freed."""
    if first is not None:
        first()
    while (call := calls.get()) is not None:
        with logged("a call in a thread raised"):  # A callback may raise SystemExit, and others wait for this thread.
            call()
        del call  # The call refers to its sender and to arrays.
    calls.put(None)  # The next thread has to end too.


def _end(executor: weakref.ref[Executor], calls: SimpleQueue[Call | None]) -> None:
    """Let the threads end. At the end of the program wait for them: ONNX Runtime must not run on."""
    calls.put(None)
    ending = executor()
    if ending is not None:
        ending.close(AT_EXIT)
