"""Threads and locks that do not hang after an interrupt or a fork.

A signal handler (Ctrl-C, a time limit) may raise after any call that Python code makes: also between ``acquire()`` and
``try``, and inside an ``__enter__`` written in Python. It cannot raise between an ``__enter__`` written in C and the
body of ``with``, nor between a step of a ``for`` over an iterator written in C and the body of the loop. So every lock
here is written in C and entered by ``with``, and threads wait only for such a lock or a SimpleQueue. Condition, Event,
Semaphore and Future enter their lock in Python, and an interrupt can leave it held for ever: no other thread may
depend on them.

A handler may also *use* the library, and so may a ``__del__``: the garbage collector calls it in any thread where a
container is made. Both come between two steps of the code that they interrupt, and that code may hold a lock. So a lock
is reentrant, and is taken together with ``this_thread.holds``::

    with this_thread.holds, self._lock:

Before a thread waits for another thread it asks :func:`may_wait`. A thread that holds a lock of the library does the
other thread's work itself instead, because the other thread may need the lock. Queues are changed by single steps of C,
without a lock.
``tests/process/test_locks.py`` tries it, and looks at each lock of the package.
"""

from __future__ import annotations

import _thread
import functools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

Result = TypeVar("Result")

AT_EXIT = 30.0  # The most seconds that the end of the interpreter waits for running work.

_LOOK = 0.005  # Seconds between two looks at a thread, in a wait with a limit.

logger = logging.getLogger("ortgpu")


class logged(ContextDecorator):  # noqa: N801 - used like contextlib.suppress
    """A context that logs all exceptions of its block, and raises none.

    Use it in threads that others wait for. No exception of the program's callback, log filter or warning may end them,
    not even SystemExit or KeyboardInterrupt. In the main thread an interrupt is raised.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return True
        if threading.current_thread() is threading.main_thread() and (
            not isinstance(error, Exception) or is_of_a_handler(error)
        ):
            return False
        log(logging.ERROR, self._what, exc_info=error)
        return True


def log(level: int, message: str, *arguments: object, name: str = "ortgpu", **options: Any) -> None:
    """Log a message from a thread that must go on, whatever the filters and handlers of the program raise."""
    try:
        logging.getLogger(name).log(level, message, *arguments, **options)
    except BaseException:  # noqa: BLE001, S110 - to log this is what failed
        pass


class _ThisThread(threading.local):
    """The locks of the library that the present thread holds.

    Attributes:
        holds: a lock that only this thread takes, before each other lock: a mark that no interrupt can leave behind.
        has_turn: such a mark of a slot that lasts for a whole run. The run itself may wait for threads without a slot.
    """

    if TYPE_CHECKING:
        holds: AbstractContextManager[bool]
        has_turn: AbstractContextManager[bool]

    def __getattr__(self, name: str) -> Any:
        if name not in ("holds", "has_turn"):
            raise AttributeError(name)
        # An __init__ would be unsafe, because a finalizer may interrupt it.
        return vars(self).setdefault(name, threading.RLock())


this_thread = _ThisThread()


class Owned(Protocol):
    """Turns of one thread, each for a whole run. ``owner`` and ``first`` are the ids of its thread and of the next."""

    owner: int
    first: int


owners: set[weakref.ref[Owned]] = set()


def may_wait() -> bool:
    """Return False in a signal handler or finalizer that came while this thread holds a lock or a turn."""
    return not holds_lock() and not _has_turn()


def _has_turn() -> bool:
    if this_thread.has_turn._is_owned():  # type: ignore[attr-defined]  # as Condition asks
        return True
    thread = threading.get_ident()
    for reference in owners.copy():  # Threads add and drop turns meanwhile.
        turn = reference()
        if turn is not None and turn.owner == thread:
            return True
    return False


def may_wait_for_runs() -> bool:
    """Return False also in a handler or finalizer that came while this thread waits for a turn before all others.

    Runs of other threads need that turn.
    """
    thread, turns = threading.get_ident(), [reference() for reference in owners.copy()]
    return may_wait() and all(turn is None or turn.first != thread for turn in turns)


def holds_lock() -> bool:
    """Return True in a signal handler or finalizer that came while this thread holds a lock of the library."""
    is_owned: bool = this_thread.holds._is_owned()  # type: ignore[attr-defined]  # as Condition asks
    return is_owned


def fork_safe_lock() -> AbstractContextManager[bool]:
    """Return a reentrant lock that a forked child finds free, whatever thread of its parent held it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # not in typeshed
    return lock


class attempt:  # noqa: N801 - it is called like a function
    """Take a lock for a ``with`` statement, unless another thread has it. Its value is True if the lock was taken."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._is_taken = False

    def __enter__(self) -> bool:
        self._is_taken = self._lock.acquire(blocking=False)
        return self._is_taken

    def __exit__(self, *_: object) -> None:
        if self._is_taken:
            self._lock.release()


class cached_property(functools.cached_property[Result]):  # noqa: N801 - it takes the place of that one
    """A cached_property without a lock, as since Python 3.12. Two threads may both make the value; the first stays."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Result:  # type: ignore[override]  # of no class
        if instance is None:
            return self  # type: ignore[return-value]  # for whoever looks at the class
        assert self.attrname is not None
        value: Result = vars(instance).setdefault(self.attrname, self.func(instance))
        return value


def uninterrupted(function: Callable[[], object]) -> None:
    """Call ``function`` in a thread that no interrupt reaches, wait for its end, and raise its exception.

    An interrupt of the wait is raised after that end. If the system gives no thread, this thread makes the call.
    """
    if sys.is_finalizing():  # Before Python 3.12 the thread would never run.
        function()
        return
    at_work = threading.Lock()
    at_work.acquire()
    errors: list[BaseException] = []
    is_started = False

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)
        finally:
            at_work.release()

    try:
        for _ in map(_thread.start_new_thread, (call,), ((),)):  # After this step of C the thread is waited for.
            is_started = True
            try:
                with at_work:
                    pass
            except BaseException:
                with at_work:
                    pass
                raise
    except RuntimeError:  # A limit of the container or the user: "can't start new thread".
        if is_started:
            raise
        function()
    if errors:
        try:
            raise errors.pop()
        finally:
            del errors  # The traceback of the error refers to this frame.


def is_of_a_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised ``error``, such as the handler of a time limit."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            codes.add(getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


class Thread(threading.Thread):
    """A daemon thread that is safe to start and to wait for when interrupts may come.

    The start of ``threading.Thread`` waits for an Event that the new thread sets before it runs anything, and until
    Python 3.13 a thread counts as ended after an interrupt of its ``join``.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        super().__init__(target=function, name=name, daemon=True)
        self._at_work = threading.Lock()
        self._at_work.acquire()

    def start(self, started: Callable[[Thread], object] | None = None) -> None:
        """Start the thread, then call ``started`` with it. No interrupt comes between the two.

        Raises RuntimeError if the system gives no thread, and at the end of the interpreter.
        """
        if sys.is_finalizing():
            raise RuntimeError("can't start a thread at the end of the interpreter")

        def start() -> None:
            super(Thread, self).start()
            if started is not None:
                started(self)

        uninterrupted(start)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._at_work.release()

    def is_this(self) -> bool:
        return self.ident == threading.get_ident()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end. Return False if it has not ended within ``timeout`` seconds."""
        if self.ident is None:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        while until is not None and self._at_work.locked():  # An interrupt must not leave the lock with this thread.
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK)
        with self._at_work:
            pass
        self.join()  # The thread is about to end.
        return True


class Task(Generic[Result]):
    """A function that runs in a thread of its own, started at once.

    The caller must wait for :meth:`result`: after a fork a forgotten thread is in no reliable state. If the system
    gives no further thread, the function has run when the task is made.
    """

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = Thread(self._run, name)
        try:
            self._thread.start()
        except RuntimeError:  # A limit of the container or the user: "can't start new thread".
            self._run()
        except BaseException:
            self._thread.wait()
            raise

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error

    def result(self) -> Result:
        """Wait for the end. Return the result, or raise the function's exception, or an interrupt of the wait."""
        try:
            self._thread.wait()
        except BaseException:
            self._thread.wait()
            raise
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # The traceback of the error refers to this frame.
        return self._results[0]
