"""The class GPUSession, also where ONNX Runtime cannot be imported: there, making one raises the reason."""

from __future__ import annotations

from typing import Any

from ..errors import PackageError


def gpu_session_class() -> type[Any]:
    """``ortgpu.session.GPUSession``, or a class in its place whose constructor raises the :class:`PackageError`.

    An application can so import the name anywhere and handle the error where it makes the session.
    """
    try:
        from .gpu_session import GPUSession
    except PackageError:
        return _Unavailable
    return GPUSession


class _Unavailable:
    """Stands in for GPUSession; every use tries the import again, so that a mended environment is noticed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from .gpu_session import GPUSession

        return GPUSession(*args, **kwargs)

    @classmethod
    def for_rank(cls, *args: Any, **kwargs: Any) -> Any:
        from .gpu_session import GPUSession

        return GPUSession.for_rank(*args, **kwargs)


_Unavailable.__name__ = _Unavailable.__qualname__ = "GPUSession"
