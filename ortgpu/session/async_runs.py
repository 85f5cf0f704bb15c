"""The ``run_async`` of a GPUSession. It keeps ONNX Runtime's threads from destroying the session.

ONNX Runtime calls the callback in one of the session's threads and drops it there. If that were the last reference to
the session, the thread would destroy the C++ session, and the C++ session would wait for that same thread. So ONNX
Runtime gets an object that refers to nothing. This module keeps all objects of a run until ONNX Runtime has dropped
that object. A thread of this library then drops the rest.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..process.background import Thread, fork_safe_lock, this_thread
from ..process.threads import Executor, Outcome
from . import failures

if TYPE_CHECKING:
    from ..process.threads import Turns
    from ..provider.interfaces import Opened


class _Called:
    """The callback that ONNX Runtime calls at the end of a run and then drops."""

    __slots__ = ("__weakref__",)

    def __call__(self, results: Any, _: object, text: str) -> None:
        reference = weakref.ref(self)
        session, callback, data, turns, name = _under_way[reference][:5]
        if turns is not None:  # The callback may start a run, so the turn ends before it.
            turns.give(name)
        session._gpu_runner.note_end()
        if text:
            failures.note_text(session, text)
        callback(results, data, text)


_Reference = weakref.ref[_Called]

# For each run: session, callback, the caller's data, turns, the name of its turn, and other objects that no thread of
# ONNX Runtime may drop.
_under_way: dict[_Reference, tuple[Any, ...]] = {}

_AT_A_TIME = 3  # runs: as many as ONNX Runtime makes in a session with four threads
_executors: weakref.WeakKeyDictionary[Opened, Executor] = weakref.WeakKeyDictionary()

_lock = fork_safe_lock()
_dropped: tuple[int, SimpleQueue[_Reference]] | None = None  # A thread of this process serves this queue.


def run_async(
    session: Opened,
    run: Callable[..., None],
    names: Any,
    feed: Any,
    callback: Any,
    data: Any,
    options: Any,
    turns: Turns | None,
) -> None:
    """Call ``run``, the InferenceSession.run_async of ``session``, with the other arguments, once there is a turn."""
    called = _Called()
    # SimpleQueue.put is written in C, so no Python code runs between the end of ``called`` and the moment when ONNX
    # Runtime's thread releases the interpreter lock.
    reference = weakref.ref(called, _queue().put)
    # Keep the arrays, because their collection may run Python code. Keep the C++ session, because ``close`` drops it.
    arrays = tuple(feed.values()) if hasattr(feed, "values") else ()
    name = object()
    _under_way[reference] = session, callback, data, turns, name, vars(session).get("_sess"), arrays
    if turns is not None:
        turns.start(name, run, names, feed, called, None, options)
    else:
        run(names, feed, called, None, options)


def run_here(
    run: Callable[..., Any],
    use_device: Callable[[], None] | None,
    names: Any,
    feed: Any,
    called: Any,
    _: None,
    options: Any,
) -> None:
    """Do what InferenceSession.run_async does, in this thread. ``use_device`` sets its device first."""
    results, text = list[Any](), ""
    try:
        if use_device is not None:
            use_device()
        results = run(names, feed, options)
    except Exception as error:  # noqa: BLE001 - the callback gets its text, as from ONNX Runtime
        text = str(error)
    called(results, None, text)


def run_in_thread(session: Opened, *arguments: Any) -> None:
    """Do what :func:`run_here` does, in one of the threads that the session gets for that."""
    executor = _executors.get(session) or _executors.setdefault(session, Executor(_AT_A_TIME, "ortgpu-async"))
    executor.submit(Outcome[None](), run_here, *arguments)


def _queue() -> SimpleQueue[_Reference]:
    global _dropped
    with this_thread.holds, _lock:
        if _dropped is None or _dropped[0] != os.getpid():
            queue: SimpleQueue[_Reference] = SimpleQueue()
            Thread(functools.partial(_let_go, queue), "ortgpu-async").start()
            _dropped = os.getpid(), queue
        return _dropped[1]


def _let_go(dropped: SimpleQueue[_Reference]) -> None:
    while True:
        _under_way.pop(dropped.get(), None)
