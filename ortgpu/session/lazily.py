"""The class GPUSession, or a stand-in that raises the reason if ONNX Runtime cannot be imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PackageError
from ..process.late import late

if TYPE_CHECKING:
    from . import gpu_session
else:
    gpu_session = late("ortgpu.session.gpu_session")


def gpu_session_class() -> type[Any]:
    """Return GPUSession, or a stand-in that raises the PackageError where a session is opened."""
    try:
        return gpu_session.GPUSession
    except PackageError:
        return _Unavailable


class _Unavailable:
    """A stand-in for GPUSession. Each use tries the import again, so that it notices a repaired environment."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return gpu_session.GPUSession(*args, **kwargs)

    @classmethod
    def for_rank(cls, *args: Any, **kwargs: Any) -> Any:
        return gpu_session.GPUSession.for_rank(*args, **kwargs)


_Unavailable.__name__ = _Unavailable.__qualname__ = "GPUSession"
