"""The rules by which the guard treats a session. ``onnxruntime`` must be imported already."""

from __future__ import annotations

import logging
from typing import Any, Literal

import onnxruntime

from ...environment.packages.plugins import listed_accelerators, listed_providers
from ...errors import GPUError, ProviderRequestError
from ...provider.options import carries_providers
from ...provider.requests import CPU, CUDA, TENSORRT, ProviderList, parse

logger = logging.getLogger("ortgpu")


Verdict = Literal["guarded", "cpu", "other", "carried", "plugin"]


def judge(providers: Any, provider_options: Any, sess_options: Any = None) -> Verdict:
    """Return how the guard treats a session with these arguments.

    "guarded": the session is verified or refused. The arguments name CUDA or TensorRT, nothing, all that
    ``get_available_providers()`` returns in any order, or an unknown provider, or they are malformed. "cpu" and
    "other": the session passes, with the CPU alone or with other providers without CUDA. "carried": the SessionOptions
    carry providers, which ONNX Runtime uses if the arguments name none. "plugin": it would be "guarded", and ONNX
    Runtime may open it on another GPU provider that is registered. Of both, only the open session shows which.
    """
    if not providers and not provider_options and carries_providers(sess_options):
        return "carried"
    try:
        names = parse(providers, provider_options).names
    except ProviderRequestError:
        return "guarded"
    if names == (CPU,):
        return "cpu"
    available = set(onnxruntime.get_available_providers())
    guarded: Verdict = "plugin" if _may_open_on_plugin(names, available) else "guarded"
    if not names or CUDA in names or any(name in names for name in TENSORRT):
        return guarded
    if set(names) == available or not set(names) <= available | _known():
        return guarded
    return "other"


def _may_open_on_plugin(names: tuple[str, ...], available: set[str]) -> bool:
    """Return True if these name a registered GPU provider before CUDA. TensorRT does not count."""
    plugins = listed_accelerators() - {CUDA}
    if CUDA in names and CUDA in available:
        return not plugins.isdisjoint(set(names[: names.index(CUDA)]) - set(TENSORRT))
    return not plugins.isdisjoint(names)


def attainable(providers: Any, provider_options: Any) -> tuple[Any, Any]:
    """Return both arguments without what ONNX Runtime would leave out itself, if CUDA is among the rest."""
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
    return ProviderList(names, requested.options).as_arguments(), None


def _known() -> set[str]:
    return {*onnxruntime.get_all_providers(), *listed_providers()}


def _is_usable(tensorrt: str) -> bool:
    """Return False for a TensorRT that keeps a session from opening, which would open without it."""
    from ...provider.runtime import load_runtime
    from ...provider.tensorrt import check_loadable, check_plugin

    bridge = load_runtime().packages.onnxruntime.bridge
    try:
        if tensorrt in listed_providers():
            check_plugin(tensorrt)
        elif tensorrt == TENSORRT[0] and bridge is not None:
            check_loadable(bridge, in_wheels=False)  # not in wheels, where ONNX Runtime does not look
    except GPUError:
        return False
    return True
