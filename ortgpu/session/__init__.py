"""Sessions: from what a caller asked for to a verified GPUSession, and what becomes of it.

``from ortgpu.session import GPUSession`` imports ONNX Runtime; importing this package does not, since the guard, which
waits for ONNX Runtime, is part of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself would be most of the time of this import

if TYPE_CHECKING:
    from .gpu_session import GPUSession as GPUSession


def __getattr__(name: str) -> object:
    if name != "GPUSession":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .gpu_session import GPUSession

    return GPUSession
