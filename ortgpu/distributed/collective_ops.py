"""ONNX Runtime's own collective operators, which exist in builds from source only."""

from __future__ import annotations

from ..provider.runtime import load_runtime


def has_collective_ops() -> bool:
    """Return True if the installed ONNX Runtime has com.microsoft:AllReduce, AllGather and AllToAll.

    These need a build with NCCL and MPI, which no published package from 1.22 to 1.31.1 is. Imports ``onnxruntime``.

    Raises:
        PackageError: ``onnxruntime`` cannot be imported.
    """
    runtime = load_runtime()
    found = runtime.has_collective_ops
    if found is None:
        from ..diagnosis import failure

        raise failure.why_no_module(runtime)
    return found
