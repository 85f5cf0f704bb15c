"""A function in a thread of its own, and a lock that survives a fork."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


def start(thread: threading.Thread) -> None:
    """Raises RuntimeError where the system gives no thread, and at the end of the interpreter: before 3.12 Python would
    wait for ever until it runs."""
    if sys.is_finalizing():
        raise RuntimeError("can't start a thread at the end of the interpreter")
    thread.start()


class Task(Generic[Result]):
    """Starts at once. Whoever starts one waits for :meth:`result`: a thread that is left alone does not survive a fork
    in a state to rely on. Where the system gives no further thread, the function has run when the task is made."""

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            start(self._thread)
        except RuntimeError:  # "can't start new thread": a limit of the container or the user
            self._thread = None
            self._run()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Result:
        """Wait for the end; raises what the function raised, and, at the end too, an interrupt while it waits."""
        if self._thread is not None:
            # Not the thread itself: until Python 3.13 one whose join was interrupted counts as ended from then on.
            try:
                self._ended.wait()
            except BaseException:
                self._ended.wait()
                raise
            self._thread.join()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # this frame is in its traceback
        return self._results[0]


class ForkSafeLock:
    """A reentrant lock that a forked child finds free, whatever thread of its parent held it."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
