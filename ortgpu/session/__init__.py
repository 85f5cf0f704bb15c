"""Sessions: from a caller's request to a verified GPUSession, and the runs and the end of that session.

``from ortgpu.session import GPUSession`` imports ONNX Runtime. Importing this package does not, because the guard is
part of it, and the guard waits until the program imports ONNX Runtime.
"""

from __future__ import annotations

TYPE_CHECKING = False  # Importing typing would take most of the time of this import.

if TYPE_CHECKING:
    from .gpu_session import GPUSession as GPUSession


def __getattr__(name: str) -> object:
    if name != "GPUSession":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .gpu_session import GPUSession

    return GPUSession
