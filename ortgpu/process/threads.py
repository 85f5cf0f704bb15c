"""Threads that call what they are given, for as long as the process lives.

Those of concurrent.futures refuse all work from the moment the main thread has ended, and a program may go on in other
threads for as long as it likes: a server that is started in one, say. These end with the interpreter instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from .background import Thread

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

Result = TypeVar("Result")
Call = Callable[[], object]

logger = logging.getLogger("ortgpu")

# Seconds. Who takes the lock of a future holds it for microseconds, unless an interrupt left it held.
_PATIENCE = 0.2


class Outcome(Generic[Result]):
    """What comes of a call that one thread makes and others wait for. No interrupt of those that wait is in its way."""

    def __init__(self) -> None:
        self._begun = threading.Lock()
        self._pending = threading.Lock()
        self._pending.acquire()
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def begin(self) -> bool:
        """Take the right to make the call. Return False where that was done before, or it was cancelled."""
        return self._begun.acquire(blocking=False)

    def cancel(self) -> bool:
        """Let the call not be made. Return False where it has begun; else there is no result to wait for any more."""
        return self._begun.acquire(blocking=False)

    def give(self, result: Result) -> None:
        """Called once, by who made the call."""
        self._results.append(result)
        self._pending.release()

    def fail(self, error: BaseException) -> None:
        """Called instead of :meth:`give`, or when that was interrupted."""
        self._error = error
        if self._pending.locked():
            self._pending.release()

    def drop(self) -> None:
        """Called instead of :meth:`give`, by who finds that it was cancelled."""
        self._pending.release()

    def wait(self) -> None:
        """Wait until there is a result or an error, or it was dropped."""
        with self._pending:
            pass

    def result(self) -> Result:
        """Wait for the result, or raise the error."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # this frame is in its traceback
        return self._results[0]


class FutureOutcome(Outcome[Result]):
    """The outcome of a call for a caller, who waits for it by a Future.

    The lock of that is entered in Python: a ``future.result()`` that is interrupted may leave it held for ever. Who
    makes calls must not wait for it then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[Result] = Future()

    def begin(self) -> bool:
        return not self._is_free() or self.future.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        return self.future.cancel()

    def give(self, result: Result) -> None:
        super().give(result)  # first: a callback may raise anything
        self._tell(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._tell(self.future.set_exception, error)

    def _is_free(self) -> bool:
        lock = self.future._condition  # which wait() and as_completed() of the standard library take in the same way
        if lock.acquire(timeout=_PATIENCE):
            lock.release()
            return True
        return False

    def _tell(self, tell: Callable[[Any], None], what: object) -> None:
        def do() -> None:
            with contextlib.suppress(InvalidStateError):  # it was cancelled while nobody could ask it
                tell(what)

        if self._is_free():
            do()
        else:
            # The thread that holds the lock gives it free where it waits for the future again.
            with contextlib.suppress(RuntimeError):  # no further thread: the future stays without a result
                Thread(do, "ortgpu-future").start()


class Threads:
    """Threads and what they have to do, in the order in which it came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.threads: list[Thread] = []

    def start(self, count: int = 1, first: Call | None = None) -> None:
        """Further threads; each calls ``first`` when it begins. Raises RuntimeError where the system gives none."""
        for _ in range(count):
            # Daemons: whoever forgets to end them must not wait for them at the end of the program.
            thread = Thread(functools.partial(_work, self._calls, first), f"{self._name}_{len(self.threads)}")
            thread.start(self.threads.append)

    def put(self, call: Call) -> None:
        """Have a thread make ``call``. What that raises is logged."""
        self._calls.put(call)

    def stop(self) -> None:
        """Let the threads end when what they were given is done."""
        self._calls.put(None)

    def wait(self) -> None:
        """Until the threads have ended."""
        for thread in self.threads:
            if thread is not threading.current_thread():  # what it was given may wait
                thread.wait()


class Executor(Threads):
    """Up to ``most`` threads, which are started when they are needed, and calls with an :class:`Outcome`.

    Where the system gives not even one, what is asked for is called at once: under a limit of the user or container,
    and, once the main thread has ended, in Python 3.12.0 to 3.12.2 (CPython pull request 117029).
    When nobody refers to it any more, its threads end with what they were given; so they do at the end of the program,
    which waits for them.
    """

    def __init__(self, most: int, name: str, first: Call | None = None) -> None:
        super().__init__(name)
        self._most = most
        self._first = first
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        weakref.finalize(self, _end, weakref.ref(self), self._calls)

    def submit(self, outcome: Outcome[Result], function: Callable[..., Result], *arguments: Any) -> None:
        """Call ``function`` in a thread. Raises RuntimeError: it is closed."""
        call = _Call(outcome, function, arguments)
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads have ended")
            if len(self.threads) < self._most:
                with contextlib.suppress(RuntimeError):
                    self.start(1, self._first)
            if self.threads:
                self.put(call)
                return
        call()

    def close(self) -> None:
        """Wait until everything is done that was given. Closing twice is fine."""
        if os.getpid() != self._pid:
            return  # the threads stayed in the process that was forked, and one of them may have held the lock
        with self._lock:
            self._closed = True
        self.stop()
        self.wait()


class _Call:
    """A function to be called, and its outcome."""

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
                arguments = ()  # who waits for the result may count on their memory
                outcome.give(result)
        except BaseException as error:  # noqa: BLE001 - the outcome's to raise
            arguments = ()
            outcome.fail(error)
            del self, outcome  # the outcome holds the error, and that this frame


def _work(calls: SimpleQueue[Call | None], first: Call | None) -> None:
    """The threads know nobody who gives them work, so that who is referred to by nobody else is let go."""
    if first is not None:
        first()
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException:  # SystemExit, say, of a callback of a future: others wait for this thread
            logger.exception("what a thread was given raised")
        del call  # it holds who gave it, and arrays
    calls.put(None)  # for the next one


def _end(executor: weakref.ref[Executor], calls: SimpleQueue[Call | None]) -> None:
    """Nobody refers to the executor any more, or the program has come to its end: then it waits, or ONNX Runtime would
    go on computing while the interpreter takes itself apart."""
    calls.put(None)
    ending = executor()
    if ending is not None:
        ending.close()
