"""GPU sessions in Ray's workers: batch inference, serving, and preflight over the nodes of a cluster.

Each session is a verified GPUSession on the GPU that Ray assigned to its worker. It is an error if Ray assigned none,
since Ray shows such a worker every GPU of the node: its session would be on GPU 0, another worker's. Nothing divides
the memory of a GPU that several workers share (``num_gpus=0.5``): give each session a ``gpu_mem_limit``.

Errors keep their type on the way to the driver: the raised object is both Ray's exception and ours, with our
attributes. Its text is Ray's, and ``error.cause`` is the original, also of a WorkerLostError with an attribute of
that name.
"""

from __future__ import annotations

import importlib

from ...environment.packages.installer import install_extra
from ...errors import PackageError, shell

TYPE_CHECKING = False

if TYPE_CHECKING:
    from .serving import GPUDeployment as GPUDeployment
    from .serving import ServedGPUSession as ServedGPUSession
    from .workers import RayGPUSession as RayGPUSession
    from .workers import open_session as open_session
    from .workers import preflight as preflight
    from .workers import probe as probe

# Each name has the module of this package that defines it, and the module of Ray that it needs.
_HOMES = {
    "GPUDeployment": ("serving", "ray.serve"),
    "RayGPUSession": ("workers", "ray.data"),
    "ServedGPUSession": ("serving", "ray.serve"),
    "open_session": ("workers", "ray"),
    "preflight": ("workers", "ray"),
    "probe": ("workers", "ray"),
}

__all__ = sorted(_HOMES)  # help() shows no other lazy names.


def _require(module: str) -> None:
    """Raise PackageError if a part of Ray is not installed. A broken installation raises its own error."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as cause:
        raise PackageError(
            f"{module} cannot be imported, and ortgpu.integrations.ray needs it",
            evidence=[f"there is no module {cause.name}"],
            fixes=[shell(install_extra("ray"))],
        ) from cause


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, needed = _HOMES[name]
    _require(needed)
    globals()[name] = value = getattr(importlib.import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("_")), *__all__})
