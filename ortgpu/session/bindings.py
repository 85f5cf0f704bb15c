"""IOBindings whose failures are raised as those of their session.

They copy inputs to the GPU when they are bound, and outputs back, without any method of the session: a large input that
does not fit fails there, and so does everything after a sticky CUDA error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import onnxruntime

from . import failures

_METHODS = (
    "bind_cpu_input", "bind_input", "bind_output", "bind_ortvalue_input", "bind_ortvalue_output", "synchronize_inputs",
    "synchronize_outputs", "copy_outputs_to_cpu", "get_outputs", "get_outputs_as_ortvaluevector",
)  # fmt: skip


class Binding(onnxruntime.IOBinding):  # type: ignore[misc]  # ships no types
    """What ``GPUSession.io_binding`` returns."""

    _of: weakref.ref[Any]  # the session, which a binding does not keep


def explaining(binding: Any, session: Any) -> Any:
    """``binding`` of ``session``, whose failures are explained from now on; one of another class as it is."""
    if type(binding) is onnxruntime.IOBinding:
        binding.__class__ = Binding
        binding._of = weakref.ref(session)
    return binding


def _explaining(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(onnxruntime.IOBinding, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(onnxruntime.IOBinding, name)(self, *args, **kwargs)
        except Exception as error:
            session = self._of()
            if session is None:
                raise
            raise failures.explained(session, error)  # noqa: B904 - which sets the cause

    return call


for _name in _METHODS:
    if hasattr(onnxruntime.IOBinding, _name):
        setattr(Binding, _name, _explaining(_name))
