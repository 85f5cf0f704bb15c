"""``run_async`` of a GPUSession, which no thread of ONNX Runtime ever destroys.

ONNX Runtime calls the callback in a thread of the session's own, and drops it there. Were that the last that refers to
the session, its C++ part would be destroyed in a thread whose end that destruction waits for. So ONNX Runtime is given
an object that refers to nothing. All that belongs to a run is kept here until ONNX Runtime has dropped that object, and
is then dropped in a thread of ours.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..process.background import Thread, fork_safe_lock
from . import failures


class _Called:
    """ONNX Runtime calls it at the end of a run, and drops it."""

    __slots__ = ("__weakref__",)

    def __call__(self, results: Any, _: object, text: str) -> None:
        session, callback, data = _under_way[weakref.ref(self)][:3]
        if text:
            failures.note_text(session, text)
        callback(results, data, text)


_Reference = weakref.ref[_Called]

# What belongs to a run: session, callback, the caller's data, and what else no thread of ONNX Runtime may drop.
_under_way: dict[_Reference, tuple[Any, ...]] = {}

_lock = fork_safe_lock()
_dropped: tuple[int, SimpleQueue[_Reference]] | None = None  # with the process that has a thread for it


def run_async(
    session: Any, run: Callable[..., None], names: Any, feed: Any, callback: Any, data: Any, options: Any
) -> None:
    """Call ``run``, which is InferenceSession.run_async of ``session``, with the other arguments."""
    called = _Called()
    # A method that is written in C: no other Python code runs between the end of ``called`` and the moment when
    # ONNX Runtime's thread lets go of the interpreter, which is before it can be waited for.
    reference = weakref.ref(called, _queue().put)
    # Arrays too: what is called when one is collected is Python code. And the C++ session, which ``close`` gives up.
    arrays = tuple(feed.values()) if hasattr(feed, "values") else ()
    _under_way[reference] = session, callback, data, vars(session).get("_sess"), arrays
    run(names, feed, called, None, options)


def _queue() -> SimpleQueue[_Reference]:
    global _dropped
    with _lock:
        if _dropped is None or _dropped[0] != os.getpid():
            queue: SimpleQueue[_Reference] = SimpleQueue()
            Thread(functools.partial(_let_go, queue), "ortgpu-async").start()
            _dropped = os.getpid(), queue
        return _dropped[1]


def _let_go(dropped: SimpleQueue[_Reference]) -> None:
    while True:
        _under_way.pop(dropped.get(), None)
