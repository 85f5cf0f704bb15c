"""Threads that call what they are given, for as long as the process lives.

Those of concurrent.futures refuse all work from the moment the main thread has ended, and a program may go on in other
threads for as long as it likes: a server that is started in one, say. These end with the interpreter instead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")
Task = Callable[[], object]


class Threads:
    """Threads and what they have to do, in the order in which it came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []

    def start(self, count: int = 1, first: Task | None = None) -> None:
        """Further threads; each calls ``first`` when it begins. Raises RuntimeError where the system gives none."""
        for _ in range(count):
            # Daemons: whoever forgets to end them must not wait for them at the end of the program.
            name = f"{self._name}_{len(self.threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks, first), name=name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def put(self, task: Task) -> None:
        """Have a thread call ``task``, which must not raise."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Let the threads end when what they were given is done."""
        self._tasks.put(None)

    def wait(self) -> None:
        """Until the threads have ended."""
        for thread in self.threads:
            if thread.is_alive() and thread is not threading.current_thread():  # what it was given may wait
                thread.join()


class Executor(Threads):
    """As concurrent.futures.ThreadPoolExecutor, with up to ``most`` threads, which are started when they are needed.

    Where the system gives not even one, what is submitted is called at once: under a limit of the user or container,
    and, once the main thread has ended, in Python 3.12.0 to 3.12.2 (CPython pull request 117029).
    When nobody refers to it any more, its threads end with what they were given; so they do at the end of the program,
    which waits for them.
    """

    def __init__(self, most: int, name: str, first: Task | None = None) -> None:
        super().__init__(name)
        self._most = most
        self._first = first
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        weakref.finalize(self, _end, weakref.ref(self), self._tasks)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Raises RuntimeError: it is closed."""
        future: Future[Result] = Future()
        call = _Call(future, function, arguments)
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads have ended")
            if len(self.threads) < self._most:
                with contextlib.suppress(RuntimeError):
                    self.start(1, self._first)
            if self.threads:
                self.put(call)
                return future
        call()
        return future

    def together(self, function: Callable[[], object], count: int, elsewhere: Callable[[], object]) -> None:
        """Call ``function`` in this thread, and meanwhile ``elsewhere`` in up to ``count`` of these.

        For work that is divided while it is done: whoever comes when this thread has done what was left finds nothing
        to do, and nobody waits for it. What a call raised is raised here, when all have ended; so is what interrupts
        this thread meanwhile, however often: a KeyboardInterrupt, or what another handler of a signal raises.
        """
        others = _Others(elsewhere)
        raised = failure = None
        try:
            with self._lock:
                wanted = 0 if self._closed else count
                if len(self.threads) < self._most:
                    with contextlib.suppress(RuntimeError):  # the system gives no further one
                        self.start(min(wanted, self._most - len(self.threads)), self._first)
                for _ in range(min(wanted, len(self.threads))):
                    self.put(others)
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = error
        while True:
            try:
                failure = others.end()
                break
            except BaseException as error:  # noqa: BLE001 - an interrupt, and they still use what the caller gives up
                raised = error
        if raised is None:
            raised = failure
        if raised is not None:
            try:
                raise raised
            finally:
                del raised, failure  # they refer to this frame

    def close(self) -> None:
        """Wait until everything is done that was given. Closing twice is fine."""
        if os.getpid() != self._pid:
            return  # the threads stayed in the process that was forked, and one of them may have held the lock
        with self._lock:
            self._closed = True
        self.stop()
        self.wait()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Call:
    """A function to be called, and the future of its result."""

    def __init__(self, future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._future: Future[Any] | None = future
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        future, self._future = self._future, None
        assert future is not None
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = self._function(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - the future's to raise
            future.set_exception(error)
            del self, future  # the future holds the exception, and that this frame
        else:
            future.set_result(result)


class _Others:
    """A function that threads call until whoever asked for it has done the rest."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._lock = threading.Lock()
        self._begun = 0
        self._is_over = False
        self._ended: list[BaseException | None] = []  # what each that has ended raised
        self._end: SimpleQueue[None] = SimpleQueue()  # something for each, which an interrupt of `get` may lose

    def __call__(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._begun += 1
        assert self._function is not None
        failure = None
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - whoever asked for it raises it
            failure = error
        self._ended.append(failure)
        self._end.put(None)
        del failure, self  # it refers to this frame

    def end(self) -> BaseException | None:
        """Wait for those who have begun. What the first that failed raised. After an interrupt it is called again."""
        with self._lock:
            self._is_over = True
        while len(self._ended) < self._begun:
            self._end.get()
        failure = next((failure for failure in self._ended if failure is not None), None)
        self._begun = 0
        self._function = None  # whoever comes late keeps this, and must not keep arrays
        self._ended.clear()
        return failure


def _work(tasks: SimpleQueue[Task | None], first: Task | None) -> None:
    """The threads know nobody who gives them work, so that who is referred to by nobody else is let go."""
    if first is not None:
        first()
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds who gave it, and arrays
    tasks.put(None)  # for the next one


def _end(executor: weakref.ref[Executor], tasks: SimpleQueue[Task | None]) -> None:
    """Nobody refers to the executor any more, or the program has come to its end: then it waits, or ONNX Runtime would
    go on computing while the interpreter takes itself apart."""
    tasks.put(None)
    ending = executor()
    if ending is not None:
        ending.close()
