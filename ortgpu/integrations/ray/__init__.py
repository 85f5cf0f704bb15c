"""GPU sessions in Ray's workers: batch inference, serving, and preflight over the nodes of a cluster.

    from ortgpu.integrations.ray import RayGPUSession    # for ray.data.Dataset.map_batches
    from ortgpu.integrations.ray import GPUDeployment    # for ray.serve.run
    from ortgpu.integrations.ray import open_session     # in an actor or a task of your own
    from ortgpu.integrations.ray import probe            # what a worker with a GPU would run into, raised here
    from ortgpu.integrations.ray import preflight        # whether GPUs of several nodes can work together

Each opens a verified GPUSession on the GPU that Ray assigned to the worker, and refuses where Ray assigned none: Ray
shows such a worker every GPU of the node, so that its session would be on GPU 0, beside the one that belongs there.
Which node, how many replicas, what happens to a worker that dies: all that is Ray's own business.

A part of a GPU (``num_gpus=0.5``) is Ray's book-keeping: several workers then share one GPU, and nothing divides its
memory. Give each session a ``gpu_mem_limit`` (an option of the CUDA provider). Several GPUs (``num_gpus=2``) for one
session are refused unless ``device`` says which of them it uses, counted among those assigned: a session uses one.

Errors arrive at the driver as themselves: ``except ortgpu.GPUError`` works around the consumption of a dataset, around
``handle.remote(...).result()``, and around ``ray.get``. What Ray raises is both Ray's exception and ours, with our
attributes; its text is Ray's, and ``error.cause`` is the original. What a Serve deployment runs into at its start is
in ``serve.status()`` only, as text, since Ray hands nothing else on: :func:`probe` before ``serve.run`` raises it.
"""

from __future__ import annotations

import importlib

from ...environment.packages.installer import read_installer
from ...errors import PackageError, shell

TYPE_CHECKING = False

if TYPE_CHECKING:
    from .batches import RayGPUSession as RayGPUSession
    from .preflighting import preflight as preflight
    from .serving import GPUDeployment as GPUDeployment
    from .serving import ServedGPUSession as ServedGPUSession
    from .workers import open_session as open_session
    from .workers import probe as probe

# name: the module of this package that has it, and what that needs of Ray
_HOMES = {
    "GPUDeployment": ("serving", "ray.serve"),
    "RayGPUSession": ("batches", "ray.data"),
    "ServedGPUSession": ("serving", "ray.serve"),
    "open_session": ("workers", "ray"),
    "preflight": ("preflighting", "ray"),
    "probe": ("workers", "ray"),
}

__all__ = sorted(_HOMES)  # for help() too, which shows nothing else that arrives later


def _require(module: str) -> None:
    """Raises PackageError, which is an ImportError, where a part of Ray is not installed. One that is, and is broken,
    raises what it raises: to install it would change nothing."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as cause:
        raise PackageError(
            f"{module} cannot be imported, and ortgpu.integrations.ray needs it",
            evidence=[f"there is no module {cause.name}"],
            fixes=[shell(f"{read_installer().install} 'ortgpu[ray]'")],
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
