"""Sessions that go out of scope while a ``run_async`` is under way: where their C++ sessions are destroyed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import onnxruntime

import ortgpu

KINDS = ("dropped", "finalized", "mapped", "in the callback", "in the data", "closed", "guarded")

SECONDS = 30  # until something that must come is given up


def drop_sessions(model: bytes | str, feed: dict[str, Any], count: int) -> dict[str, Any]:
    """``count`` sessions, of all KINDS in turn. The callback, in ONNX Runtime's thread, waits until its session is
    dropped: only what belongs to the run refers to it then."""
    destroyed: Counter[str] = Counter()
    errors: list[str] = []
    ran = 0
    for number in range(count):
        done, dropped = threading.Event(), threading.Event()
        inner = _start(number, model, feed, done, dropped, destroyed, errors)
        dropped.set()
        ran += done.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while inner() is not None and time.monotonic() < deadline:
            time.sleep(0.0001)
    gc.collect()
    return {"ran": ran, "destroyed": destroyed, "errors": errors, "sessions": len(ortgpu.sessions())}


def _start(
    number: int,
    model: bytes | str,
    feed: dict[str, Any],
    done: threading.Event,
    dropped: threading.Event,
    destroyed: Counter[str],
    errors: list[str],
) -> weakref.ref[Any]:
    kind = KINDS[number % len(KINDS)]
    if kind == "guarded":
        with ortgpu.enforce():
            session = onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
        assert isinstance(session, ortgpu.GPUSession)
    else:
        session = ortgpu.GPUSession(model)
    if kind == "mapped":
        list(session.map([feed] * 3))  # and has pinned memory now, where there is a GPU
    if kind == "finalized":
        weakref.finalize(session, time.sleep, 0.002)  # lets other threads have the interpreter in the middle of its end
    binding = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(next(iter(feed.values())))
    data = SimpleNamespace(session=session, binding=binding, value=value) if kind == "in the data" else None

    def callback(_: Any, data: Any, text: str) -> None:
        if text:
            errors.append(text)
        assert dropped.wait(SECONDS)
        done.set()

    def referring(results: Any, data: Any, text: str, session: Any = session, binding: Any = binding) -> None:
        callback(results, data, text)

    inner = session._sess
    chosen = referring if kind == "in the callback" else callback
    array = session.pinned_empty(next(iter(feed.values())).shape)  # which only the run refers to then
    array[:] = next(iter(feed.values()))
    session.run_async(None, dict.fromkeys(feed, array), chosen, data)
    if kind == "closed":
        session.close()

    def note(_: object) -> None:
        thread = threading.current_thread()
        destroyed["ONNX Runtime's" if isinstance(thread, threading._DummyThread) else thread.name] += 1

    return weakref.ref(inner, note)
