"""Modules that are imported at their first use, each with the reason.

    if TYPE_CHECKING:
        import onnx
    else:
        onnx = late("onnx")

So the head of a file shows all imports to readers, type checkers and tools that freeze programs.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

_DIAGNOSIS = "a session that opens needs no diagnosis"
_ENGINE = "it imports ONNX Runtime, whose absence is diagnosed first"
_NO_ENGINE = "it imports ONNX Runtime, and the program of an isolated pool does without"
_RARE = "few sessions use it"
_SLOW = "milliseconds that few programs spend"

# Modules of this package without its name
REASONS = {
    "inspect": _SLOW,
    "nccl.bindings.nccl": "an extra",
    "numpy": "its absence is diagnosed first",
    "onnx": "0.2 s, which a session that opens does without",
    "onnxruntime": "its absence is diagnosed first",
    "onnxruntime.capi.onnxruntime_inference_collection": "its absence is diagnosed first",
    "onnxruntime.capi.onnxruntime_pybind11_state": "its absence is diagnosed first",
    "platformdirs": "optional in a source tree, and only records use it",
    "sysconfig": _SLOW,
    "tempfile": _SLOW,
    ".cli.figures.plot": "it imports matplotlib, an extra",
    ".cli.divergence": "it imports NumPy, whose absence a session diagnoses",
    ".diagnosis.checks.classifier": _DIAGNOSIS,
    ".diagnosis.checks.model": _DIAGNOSIS,
    ".diagnosis.diagnosing": _DIAGNOSIS,
    ".diagnosis.facts": _DIAGNOSIS,
    ".distributed.diagnosis.training": "inference needs nothing of it",
    ".environment.packages.origin": "it imports importlib.metadata: 40 ms",
    ".model.branches": "it imports onnx",
    ".model.contents": _DIAGNOSIS,
    ".provider.float16": _RARE,
    ".provider.living": "the guard is light until a session is constructed",
    ".provider.runtime": "the guard is light until a session is constructed",
    ".running.device_arrays": _NO_ENGINE,
    ".running.feed_copies": _NO_ENGINE,
    ".running.graph_requests": _RARE,
    ".running.made_inputs": "it imports NumPy, whose absence a session diagnoses",
    ".running.onnxruntimes": _ENGINE,
    ".running.shape_plans": "it imports onnx",
    ".session.gpu_session": _ENGINE,
    ".session.guard.classes": "a program whose sessions are all on the CPU does without GPUSession",
    ".session.guard.verification": "the guard is light until a session is constructed",
    ".session.allowed_cpu": "imported while the driver initialises: neither waits for the other",
    ".session.opening": "imported while the driver initialises: neither waits for the other",
    ".session.placement_details": _RARE,
    ".session.pool.batching": _RARE,
    ".session.pool.sessions": _ENGINE,
    ".session.tuning.trial": _ENGINE,
    ".session.tuning.tuning": _ENGINE,
    ".session.verifying": "imported while the driver initialises: neither waits for the other",
}


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def late(name: str) -> ModuleType:
    """Return a module that is imported at the first use of an attribute. Only that use raises ImportError."""
    assert name.removeprefix("ortgpu") in REASONS, name
    return _Late(name)
