"""Use a session in one way after a reset of the GPU, which the stub driver shows as another context.

Arguments: the model, the way, and the number of the context. Prints "ran", or the type of the exception, for this
session and for another one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

from ortgpu import GPUSession

model, way, context = sys.argv[1:]
array = np.ones(4, np.float32)
value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
session, other = GPUSession(model), GPUSession(model)
binding: Any = session.io_binding()
binding.bind_cpu_input("x", array)
binding.bind_output("y")


def run_async() -> None:
    ended = threading.Event()
    session.run_async(None, {"x": array}, lambda *_: ended.set(), None)
    ended.wait(30)


WAYS: dict[str, Callable[[], object]] = {
    "run": lambda: session.run(None, {"x": array}),
    "run_with_iobinding": lambda: session.run_with_iobinding(binding),
    "bind_cpu_input": lambda: binding.bind_cpu_input("x", array),
    "run_with_ort_values": lambda: session.run_with_ort_values(None, {"x": value}),
    "run_async": run_async,
    "run_on_device": lambda: session.run_on_device(None, {"x": array}),
    "map": lambda: list(session.map([{"x": array}])),
}


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return "ran"


os.environ["STUB_CUDA_CONTEXT"] = context
print(outcome(WAYS[way]), outcome(lambda: other.run(None, {"x": array})))
