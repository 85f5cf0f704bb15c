"""IOBindings that raise the same typed errors as their session.

A binding copies inputs to the GPU and outputs back without any method of the session. It can therefore run out of GPU
memory or meet a sticky CUDA error by itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnxruntime

from . import failures

if TYPE_CHECKING:
    from ..provider.interfaces import Opened

_METHODS = (
    "bind_cpu_input", "bind_input", "bind_output", "bind_ortvalue_input", "bind_ortvalue_output", "synchronize_inputs",
    "synchronize_outputs", "copy_outputs_to_cpu", "get_outputs", "get_outputs_as_ortvaluevector",
)  # fmt: skip


class Binding(onnxruntime.IOBinding):  # type: ignore[misc]  # ships no types
    """The IOBinding that ``GPUSession.io_binding`` returns."""

    _of: weakref.ref[Opened]  # the session; weak, so that a binding does not keep it


def explaining(binding: Any, session: Opened) -> Any:
    """Make ``binding`` raise the typed errors of ``session``. Return it; a binding of another class stays as it is."""
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
