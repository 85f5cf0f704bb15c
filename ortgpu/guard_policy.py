"""What an InferenceSession was asked for, and what the guard makes of it. Needs ``onnxruntime`` to be imported."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Literal

from .errors import GPUError, ProviderRequestError
from .providers import CPU, CUDA, TENSORRT, ProviderList, parse

logger = logging.getLogger("ortgpu")


Verdict = Literal["guarded", "cpu", "other"]


def judge(providers: Any, provider_options: Any) -> Verdict:
    """What the guard does with a session of these arguments.

    "guarded", it is opened and verified, or refused: CUDA or TensorRT, nothing, exactly what
    ``get_available_providers()`` returns, names that no provider has, malformed lists. "cpu" and "other", it passes:
    the CPU alone; other providers without CUDA.
    """
    try:
        names = _parse(providers, provider_options).names
    except ProviderRequestError:
        return "guarded"
    if not names or CUDA in names or any(name in names for name in TENSORRT):
        return "guarded"
    if names == (CPU,):
        return "cpu"
    available = _available()
    if names == available or not set(names) <= {*available, *_known()}:
        return "guarded"
    return "other"


def attainable(providers: Any, provider_options: Any) -> tuple[Any, Any]:
    """The two arguments without what ONNX Runtime would leave out itself, as long as CUDA is among the rest.

    Libraries list every provider that they could use. What this build does not have, and TensorRT where its libraries
    are not installed, is no reason to refuse a session that names CUDA as well; nor is a provider named twice.
    """
    try:
        requested = _parse(providers, provider_options)
    except ProviderRequestError:
        return providers, provider_options
    available = _available()
    if CUDA not in requested.names or CUDA not in available:
        return providers, provider_options
    left_out = {name for name in requested.names if name not in available}
    if TENSORRT[0] in requested.names and not _tensorrt_is_loadable():
        left_out.add(TENSORRT[0])
    if left_out:
        logger.info("left out of the providers of a session: %s", ", ".join(sorted(left_out)))
    names = tuple(name for name in requested.names if name not in left_out)
    return ProviderList(names, requested.options).as_arguments(), None


def _parse(providers: Any, provider_options: Any) -> ProviderList:
    """As :func:`providers.parse`, but of a provider that is named again the first counts, as for ONNX Runtime."""
    if isinstance(providers, (list, tuple)) and not (provider_options and len(provider_options) != len(providers)):
        first: dict[Any, int] = {}
        for index, entry in enumerate(providers):
            name = entry[0] if isinstance(entry, tuple) and entry else entry
            first.setdefault(name if isinstance(name, str) else index, index)
        providers = [providers[index] for index in first.values()]
        if isinstance(provider_options, (list, tuple)) and provider_options:
            provider_options = [provider_options[index] for index in first.values()]
    return parse(providers, provider_options)


def _available() -> tuple[str, ...]:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    return tuple(onnxruntime.get_available_providers())


def _known() -> set[str]:
    """Names that any build has, and those of plugins that were registered."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    built: Any = getattr(onnxruntime, "get_all_providers", tuple)()
    plugged: Any = getattr(onnxruntime, "get_ep_devices", tuple)()
    return {*built, *(device.ep_name for device in plugged)}


def _tensorrt_is_loadable() -> bool:
    from .runtime import load_runtime
    from .tensorrt import check_loadable

    library = load_runtime().provider_library
    try:
        if library is not None:
            check_loadable(library, in_wheels=False)  # where ONNX Runtime would not find it: it is slow to start
    except GPUError:
        return False
    return True
