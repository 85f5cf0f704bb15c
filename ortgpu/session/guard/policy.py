"""The rules by which the guard treats a session. ``onnxruntime`` must be imported already."""

from __future__ import annotations

import logging
from typing import Any, Literal

import onnxruntime

from ...environment.packages.plugins import listed_providers
from ...errors import GPUError, ProviderRequestError
from ...provider.options import carries_providers
from ...provider.requests import CPU, CUDA, TENSORRT, ProviderList, parse

logger = logging.getLogger("ortgpu")


Verdict = Literal["guarded", "cpu", "other", "carried"]


def judge(providers: Any, provider_options: Any, sess_options: Any = None) -> Verdict:
    """Return how the guard treats a session with these arguments.

    "guarded": the session is verified or refused. The arguments name CUDA or TensorRT, nothing, all that
    ``get_available_providers()`` returns in any order, or an unknown provider, or they are malformed. "cpu" and
    "other": the session passes, with the CPU alone or with other providers without CUDA. "carried": the SessionOptions
    carry providers, which ONNX Runtime uses if the arguments name none. Only the open session shows which.
    """
    if not providers and not provider_options and carries_providers(sess_options):
        return "carried"
    try:
        names = parse(providers, provider_options).names
    except ProviderRequestError:
        return "guarded"
    if not names or CUDA in names or any(name in names for name in TENSORRT):
        return "guarded"
    if names == (CPU,):
        return "cpu"
    available = set(onnxruntime.get_available_providers())
    if set(names) == available or not set(names) <= available | _known():
        return "guarded"
    return "other"


def attainable(providers: Any, provider_options: Any) -> tuple[Any, Any]:
    """Return both arguments without the providers that ONNX Runtime would leave out itself, if CUDA is among the rest.

    Libraries list every provider that they could use. A provider that this build lacks, or TensorRT without its
    libraries, is no reason to refuse a session that also names CUDA.
    """
    try:
        requested = parse(providers, provider_options)
    except ProviderRequestError:
        return providers, provider_options
    available = onnxruntime.get_available_providers()
    if CUDA not in requested.names or CUDA not in available:
        return providers, provider_options
    left_out = {name for name in requested.names if name not in available}
    if TENSORRT[0] in requested.names and not _tensorrt_is_loadable():
        left_out.add(TENSORRT[0])
    if not left_out:
        return providers, provider_options
    logger.info("left out of the providers of a session: %s", ", ".join(sorted(left_out)))
    names = tuple(name for name in requested.names if name not in left_out)
    return ProviderList(names, requested.options).as_arguments(), None


def _known() -> set[str]:
    """Return the names of the providers of all builds and of registered plugins."""
    return {*onnxruntime.get_all_providers(), *listed_providers()}


def _tensorrt_is_loadable() -> bool:
    from ...provider.runtime import load_runtime
    from ...provider.tensorrt import check_loadable

    library = load_runtime().provider_library
    try:
        if library is not None:
            check_loadable(library, in_wheels=False)  # not in wheels, where ONNX Runtime does not look
    except GPUError:
        return False
    return True
