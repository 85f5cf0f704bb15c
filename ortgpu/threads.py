"""Threads that call what they are given, for as long as the process lives.

Those of concurrent.futures refuse all work from the moment the main thread has ended, and a program may go on in other
threads for as long as it likes: a server that is started in one, say. These end with the interpreter instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from .background import start

Result = TypeVar("Result")
Task = Callable[[], object]

logger = logging.getLogger("ortgpu")


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
            start(thread)
            self.threads.append(thread)

    def put(self, task: Task) -> None:
        """Have a thread call ``task``. What that raises is logged."""
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

    def close(self) -> None:
        """Wait until everything is done that was given. Closing twice is fine."""
        if os.getpid() != self._pid:
            return  # the threads stayed in the process that was forked, and one of them may have held the lock
        with self._lock:
            self._closed = True
        self.stop()
        self.wait()


class _Call:
    """A function to be called, and the future of its result."""

    def __init__(self, future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._future: Future[Any] | None = future
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        future, self._future = self._future, None
        arguments, self._arguments = self._arguments, ()
        assert future is not None
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = self._function(*arguments)
        except BaseException as error:  # noqa: BLE001 - the future's to raise
            del arguments
            future.set_exception(error)
            del self, future  # the future holds the exception, and that this frame
        else:
            del arguments  # who waits for the result may count on their memory
            future.set_result(result)


def _work(tasks: SimpleQueue[Task | None], first: Task | None) -> None:
    """The threads know nobody who gives them work, so that who is referred to by nobody else is let go."""
    if first is not None:
        first()
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException:  # SystemExit, say, of a callback of a future: others wait for this thread
            logger.exception("what a thread was given raised")
        del task  # it holds who gave it, and arrays
    tasks.put(None)  # for the next one


def _end(executor: weakref.ref[Executor], tasks: SimpleQueue[Task | None]) -> None:
    """Nobody refers to the executor any more, or the program has come to its end: then it waits, or ONNX Runtime would
    go on computing while the interpreter takes itself apart."""
    tasks.put(None)
    ending = executor()
    if ending is not None:
        ending.close()
