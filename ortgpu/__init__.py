"""ONNX Runtime sessions that run on the GPU, or raise an exception that names the cause and a fix.

    from ortgpu import GPUSession          # a drop-in InferenceSession

GPUSession        a session on one GPU: run, map, batched; device, placement, memory
GPUSessionPool    sessions on several GPUs, or in processes of their own, behind one run
GPUError          the base class of all errors: summary, evidence, fixes, code
tune              find the fastest settings of a model on this GPU
diagnose          find the cause that keeps models off the GPU, as `ortgpu doctor` does
install, enforce  the same guarantee inside libraries that create their own sessions
sessions          the sessions of this process

``import ortgpu`` loads neither ONNX Runtime nor any CUDA library; every name arrives when it is first used.

PYTEST_DONT_REWRITE (tells pytest not to rewrite this file: it would warn that the module is imported already)
"""

from __future__ import annotations

import os as _os

TYPE_CHECKING = False  # The import of typing would take most of the time of this import.

if TYPE_CHECKING:
    from typing import Any

    from . import distributed as distributed
    from . import testing as testing
    from .diagnosis.diagnosing import Diagnosis as Diagnosis
    from .distributed.diagnosis.profiles import diagnose as diagnose
    from .environment.inspection import Environment as Environment
    from .environment.inspection import inspect_environment as inspect_environment
    from .errors import *  # noqa: F403 - a list here would repeat the catalogue
    from .provider.devices import Device as Device
    from .provider.living import SessionRecord as SessionRecord
    from .provider.living import sessions as sessions
    from .provider.placement import CPUNodesWarning as CPUNodesWarning
    from .provider.placement import PlacedNode as PlacedNode
    from .provider.placement import Placement as Placement
    from .provider.preloading import PreloadReport as PreloadReport
    from .provider.preloading import preload as preload
    from .session.fitting import Fit as Fit
    from .session.fitting import fit as fit
    from .session.gpu_session import GPUSession as GPUSession
    from .session.gpu_session_pool import GPUSessionPool as GPUSessionPool
    from .session.gpu_session_pool import LostDevice as LostDevice
    from .session.gpu_session_pool import WorkerHealth as WorkerHealth
    from .session.guard.guard import enforce as enforce
    from .session.guard.guard import install as install
    from .session.guard.guard import uninstall as uninstall
    from .session.models import GPUModels as GPUModels
    from .session.tune import tune as tune
    from .session.tuning.children import Tuning as Tuning

__version__ = "0.3.0"

_MODULES = ("distributed", "testing")
_HOMES = {
    "Device": "provider.devices",
    "Diagnosis": "diagnosis.diagnosing",
    "diagnose": "distributed.diagnosis.profiles",
    "Environment": "environment.inspection",
    "inspect_environment": "environment.inspection",
    "PlacedNode": "provider.placement",
    "Placement": "provider.placement",
    "GPUSessionPool": "session.gpu_session_pool",
    "LostDevice": "session.gpu_session_pool",
    "WorkerHealth": "session.gpu_session_pool",
    "PreloadReport": "provider.preloading",
    "preload": "provider.preloading",
    "CPUNodesWarning": "provider.placement",
    "enforce": "session.guard.guard",
    "install": "session.guard.guard",
    "uninstall": "session.guard.guard",
    "SessionRecord": "provider.living",
    "sessions": "provider.living",
    "GPUSession": "session.gpu_session",
    "GPUModels": "session.models",
    "Fit": "session.fitting",
    "fit": "session.fitting",
    "Tuning": "session.tuning.children",
    "tune": "session.tune",
}


def __getattr__(name: str) -> object:
    # `from ortgpu import *` and help() ask for __all__. Until then the list of errors is not loaded.
    if name == "__all__":
        return _public_names()
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = _load(name)
    except AttributeError as error:
        # An AttributeError would mean a missing name here, and `from ortgpu import ...` would say so.
        raise ImportError(f"ortgpu.{name} cannot be imported: {error}") from error
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return value


def _load(name: str) -> object:
    """Return a public name out of its module, or None if there is no such name."""
    if name == "GPUSession":
        from .session.lazily import gpu_session_class

        session_class = gpu_session_class()
        if session_class.__module__ == "ortgpu.session":
            globals()[name] = session_class
        return session_class
    # Not `from . import errors`: that would ask __getattr__ for a submodule that is not loaded yet.
    if name in _MODULES:
        return _module(name)
    home = _HOMES.get(name, "errors")
    module = _module(home)
    if home == "errors" and name not in module.__all__:
        return None
    globals()[name] = value = getattr(module, name)
    return value


def _module(name: str) -> Any:
    from importlib import import_module  # This import would take half of the time of `import ortgpu`.

    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("_")), *_public_names()})


def _public_names() -> list[str]:
    return sorted((*_HOMES, *_MODULES, *_module("errors").__all__))


if "ORTGPU_ENFORCE" in _os.environ:
    from .session.guard.startup._ortgpu_hook import is_wanted as _is_wanted

    if _is_wanted():
        import sys as _sys

        from .session.guard.guard import install as _install

        # `ortgpu exec` put this folder on the path. A search for the package onnxruntime must not find its stand-in.
        _startup = _os.path.join("session", "guard", "startup")
        _sys.path[:] = [entry for entry in _sys.path if not str(entry).endswith(_startup)]
        _install()
