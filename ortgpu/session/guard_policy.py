"""The guard's rules for sessions. ``onnxruntime`` must be imported already."""

from __future__ import annotations

import logging
from collections.abc import Collection
from types import FrameType
from typing import Any, Literal

import onnxruntime

from ..environment.packages.plugins import listed_accelerators, listed_providers
from ..errors import GPUError, ProviderRequestError
from ..provider.options import carries_providers
from ..provider.requests import CPU, CUDA, TENSORRT, ProviderList, parse, suggest
from ..provider.runtime import load_runtime
from ..provider.tensorrt import check_loadable, check_plugin

logger = logging.getLogger("ortgpu")

_BACKEND = "onnxruntime.backend.backend"
_WORDS = ("cuda", "cudnn", "tensorrt", "trt", "nvidia")  # A name with one of these may mean CUDA or TensorRT.

Verdict = Literal["guarded", "cpu", "other", "carried", "plugin"]


def judge(providers: Any, provider_options: Any, sess_options: Any = None) -> Verdict:
    """Return how the guard treats a session with these arguments.

    "guarded": the session is verified or refused. The arguments name CUDA or TensorRT (also misspelt), or nothing, or
    all of ``get_available_providers()`` in any order, or hold an entry that is no name. "cpu": the session passes, with
    the CPU alone. "other": it passes, with providers that have nothing to do with CUDA, known or not; ONNX Runtime
    checks their form. "carried": the SessionOptions carry providers. ONNX Runtime uses these if the arguments name
    none. "plugin": it would be "guarded", but ONNX Runtime may open it on another registered GPU provider. For
    "carried" and "plugin", only the open session shows the provider.
    """
    if not providers and not provider_options and carries_providers(sess_options):
        return "carried"
    names = _names_in(providers)
    if names == (CPU,):
        return "cpu"
    available = set(onnxruntime.get_available_providers())
    guarded: Verdict = "plugin" if _may_open_on_plugin(names, available) else "guarded"
    if not names or set(names) == available or any(_is_of_cuda(name, available) for name in names):
        return guarded
    return "other"


def _names_in(providers: Any) -> tuple[str, ...]:
    """Return the names in an argument of any form, without repetitions; nothing if an entry is no name."""
    if isinstance(providers, str):
        return (providers,) if providers else ()
    entries = list(providers) if isinstance(providers, Collection) else []
    names = [entry[0] if isinstance(entry, (tuple, list)) and entry else entry for entry in entries]
    return tuple(dict.fromkeys(names)) if all(isinstance(name, str) for name in names) else ()


def _is_of_cuda(name: str, available: set[str]) -> bool:
    """Return True for CUDA and TensorRT, and for an unknown name that may mean them."""
    if name in (CUDA, *TENSORRT):
        return True
    known_names = {*available, *_known()}
    if name in known_names:
        return False
    return any(word in name.lower() for word in _WORDS) or suggest(name, {*known_names, CUDA, *TENSORRT}) in (
        CUDA,
        *TENSORRT,
    )


def is_of_backend_on_cpu(caller: FrameType) -> bool:
    """Return True if the caller is ``onnxruntime.backend.prepare(model, device="CPU")``. It names all providers."""
    return caller.f_globals.get("__name__") == _BACKEND and caller.f_locals.get("device") == "CPU"


def _may_open_on_plugin(names: tuple[str, ...], available: set[str]) -> bool:
    """Return True if these name a registered GPU provider before CUDA. TensorRT does not count."""
    plugins = listed_accelerators() - {CUDA}
    if CUDA in names and CUDA in available:
        return not plugins.isdisjoint(set(names[: names.index(CUDA)]) - set(TENSORRT))
    return not plugins.isdisjoint(names)


def attainable(providers: Any, provider_options: Any) -> tuple[Any, Any]:
    """Return both arguments without the providers that ONNX Runtime would leave out, if CUDA is among the rest."""
    try:
        requested = parse(providers, provider_options)
    except ProviderRequestError:
        return providers, provider_options
    available = onnxruntime.get_available_providers()
    if CUDA not in requested.names or CUDA not in available:
        return providers, provider_options
    left_out = {name for name in requested.names if name not in available}
    left_out.update(name for name in TENSORRT if name in requested.names and not _is_usable(name))
    if not left_out:
        return providers, provider_options
    logger.info("left out of the providers of a session: %s", ", ".join(sorted(left_out)))
    names = tuple(name for name in requested.names if name not in left_out)
    return ProviderList(names, requested.options).provider_arguments(), None


def _known() -> set[str]:
    return {*onnxruntime.get_all_providers(), *listed_providers()}


def _is_usable(tensorrt: str) -> bool:
    """Return False for a TensorRT provider that keeps a session from opening."""
    bridge = load_runtime().packages.onnxruntime.bridge
    try:
        if tensorrt in listed_providers():
            check_plugin(tensorrt)
        elif tensorrt == TENSORRT[0] and bridge is not None:
            check_loadable(bridge, in_wheels=False)  # ONNX Runtime does not look into wheels.
    except GPUError:
        return False
    return True
