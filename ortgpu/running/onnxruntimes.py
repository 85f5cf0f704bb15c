"""ONNX Runtime's InferenceSession, and the check that its own ``run`` lies behind our methods."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

from numpy import ndarray
from onnxruntime.capi import onnxruntime_pybind11_state as native

# Import it from the module that defines it, since a tracer may replace the public name by a function or a subclass.
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession as InferenceSession

from ..model.files import ModelSource

#: The results of a run: nearly all are tensors. A sequence is a list, a map a dict, as ONNX Runtime returns them; these
#: are left out, since each use of an array would need a cast.
Results = list[ndarray[Any, Any]]


def session_on_cpu(model: ModelSource, options: Any) -> Any:
    """Return a C++ session of a model on the CPU alone. Guards, tracers and ortgpu.sessions() do not see it.

    Raises:
        Exception: ONNX Runtime's own, if it refuses the model.
    """
    in_file = not isinstance(model, bytes)
    session = native.InferenceSession(options, os.fspath(model) if in_file else model, in_file, False)
    session.initialize_session(["CPUExecutionProvider"], [{}], set())
    return session


class LastOfOurs(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
    """The last class of this library before InferenceSession. Methods that ``super`` finds behind it are foreign."""


def gpu_session_class() -> type[LastOfOurs]:
    """Return GPUSession for modules that GPUSession itself imports. Its module must be imported already."""
    classes: list[type[LastOfOurs]] = LastOfOurs.__subclasses__()
    return classes[0]


def run_behind(session: InferenceSession) -> Callable[..., Results]:
    """Return the bound ``run`` that ``session`` has behind the methods of this library."""
    run: Callable[..., Results] = super(LastOfOurs, session).run
    return run


def onnxruntimes_method(session: InferenceSession, name: str) -> Any:
    """Return a method of ``InferenceSession`` as a function.

    None if a tracer replaced it, because a tracer must see each run, or if the class of ``session`` has another method
    of the name before it.
    """
    method = getattr(InferenceSession, name)
    if type(method) is not FunctionType or method.__globals__.get("__name__") != InferenceSession.__module__:
        return None
    behind = getattr(super(LastOfOurs, session), name)
    return method if getattr(behind, "__func__", None) is method else None


onnxruntimes_run = functools.partial(onnxruntimes_method, name="run")
