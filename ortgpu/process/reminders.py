"""A thread that exists only while there is work for it, such as sessions that may become idle."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from .background import Thread, may_wait, this_thread


class Reminder:
    """Calls ``check`` of ``owner`` now and then, in a thread that ends once there is nothing to wait for.

    ``check`` returns the seconds until its next call, or None if there is nothing to wait for. The owner is held
    weakly, and the thread ends with it. ``thread`` is None while there is none.
    """

    def __init__(self, owner: Any, check: Callable[[Any], float | None], name: str) -> None:
        self._owner = weakref.ref(owner)
        self._check = check
        self._name = name
        self._lock = threading.RLock()
        self._ends: SimpleQueue[None] = SimpleQueue()
        self.thread: Thread | None = None
        self._pid = os.getpid()
        weakref.finalize(owner, self._ends.put, None).atexit = False

    def start(self) -> None:
        """Start the thread if there is none. If the process has reached its thread limit, ``check`` is not called."""
        if os.getpid() != self._pid:
            return  # The lock may be held for ever in a forked child.
        with this_thread.holds, self._lock:
            if self.thread is None:
                self.thread = thread = Thread(self._work, self._name)
                _started.add(self)
                try:
                    thread.start()
                except RuntimeError:  # A limit of the container or the user: "can't start new thread".
                    self.thread = None

    def stop(self) -> None:
        """End the thread and wait for its end. The thread itself does not wait, nor does a holder of a lock."""
        thread = self.thread
        if thread is not None and os.getpid() == self._pid:
            self._ends.put(None)
            if not thread.is_this() and may_wait():
                thread.wait()

    def _work(self) -> None:
        while True:
            with this_thread.holds, self._lock:
                owner = self._owner()
                seconds = self._check(owner) if owner is not None else None
                del owner
                if seconds is None:
                    self.thread = None
                    return
            try:
                self._ends.get(timeout=max(seconds, 0.001))
            except Empty:
                continue
            with this_thread.holds, self._lock:
                self.thread = None
                return


_started: weakref.WeakSet[Reminder] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Wait for the checks at work. If a thread is in ONNX Runtime when the interpreter ends, the process aborts."""
    for reminder in list(_started):
        reminder.stop()
