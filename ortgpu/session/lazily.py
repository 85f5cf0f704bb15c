"""The class GPUSession, or a stand-in that raises the reason if ONNX Runtime cannot be imported."""

from __future__ import annotations

from typing import Any

from ..errors import PackageError


def gpu_session_class() -> type[Any]:
    """Return GPUSession, or a stand-in that raises the PackageError where a session is opened."""
    try:
        from .gpu_session import GPUSession
    except PackageError:
        return _Unavailable
    return GPUSession


class _Unavailable:
    """A stand-in for GPUSession. Each use tries the import again, so that it notices a repaired environment."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from .gpu_session import GPUSession

        return GPUSession(*args, **kwargs)

    @classmethod
    def for_rank(cls, *args: Any, **kwargs: Any) -> Any:
        from .gpu_session import GPUSession

        return GPUSession.for_rank(*args, **kwargs)


_Unavailable.__name__ = _Unavailable.__qualname__ = "GPUSession"
