"""ONNX Runtime's own collective operators, which exist in builds from source only."""

from __future__ import annotations

from ..runtime import load_runtime, why_no_module


def has_collective_ops() -> bool:
    """Whether the installed ONNX Runtime has com.microsoft:AllReduce, AllGather and AllToAll.

    It was built with NCCL and MPI then, which no published package is: False in those that were looked at, from 1.18
    to 1.31.1. Imports ``onnxruntime``.

    Raises:
        PackageError: it cannot be imported.
    """
    runtime = load_runtime()
    if runtime.module is None:
        raise why_no_module(runtime)
    from onnxruntime.capi import onnxruntime_pybind11_state as extension

    ask = getattr(extension, "has_collective_ops", None)
    return ask is not None and bool(ask())
