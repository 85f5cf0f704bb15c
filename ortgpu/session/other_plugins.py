"""CUDA by plugins with a provider name of their own, such as ``cuda_ep``. Only SessionOptions can carry their devices.

Nothing of these plugins is known, so their libraries, options and operators are not checked. Two facts can be
verified: their provider is bound before the CPU, and this process has a CUDA context on the GPU.
"""

from __future__ import annotations

from typing import Any

import onnxruntime

from ..environment.gpu.cuda import CudaState, context_is_active
from ..environment.packages.plugins import list_other_cuda_plugins
from ..errors import ProviderFallbackError, manual, python
from ..provider.requests import CPU, CUDA, TENSORRT
from ..running.onnxruntimes import InferenceSession


def why_not_used(devices: tuple[Any, ...]) -> ProviderFallbackError:
    """Return the error of a session without devices in its options if only such a plugin has CUDA."""
    device = devices[0]
    name, library = device.ep_name, dict(device.ep_metadata).get("library_path")
    options = "options = onnxruntime.SessionOptions()"
    device_code = f"[each for each in onnxruntime.get_ep_devices() if each.ep_name == {name!r}][:1]"
    return ProviderFallbackError(
        f"CUDA is here as the plugin {name}, and the SessionOptions of this session do not carry its device",
        evidence=[
            f"registered: {library}",
            f"providers in this build: {', '.join(onnxruntime.get_available_providers())}",
        ],
        fixes=[
            python(f"{options}; options.add_provider_for_devices({device_code}, {{}})"),
            manual("and pass these options: GPUSession(model, options)"),
        ],
    )


def bound_plugin(bound: tuple[str, ...]) -> str | None:
    """Return the provider of such a plugin if a session is bound to it first; None also for an unrelated provider."""
    names = {device.ep_name for device in list_other_cuda_plugins()}
    if not {*names, CUDA, CPU, *TENSORRT}.issuperset(bound):
        return None
    return bound[0] if bound and bound[0] in names else None


def verified_ordinal(session: Any, name: str, cuda: CudaState) -> int:
    """Return the ordinal of the GPU that a session is on by the plugin ``name``.

    Raises ProviderFallbackError if the process has no CUDA context there.
    """
    ordinal = _ordinal_of(session, name)
    if cuda.devices is not None and context_is_active(ordinal) is False:
        raise ProviderFallbackError(
            f"ONNX Runtime bound {name}, and this process has no CUDA context on cuda:{ordinal}", bound=(name,)
        )
    return ordinal


def _ordinal_of(session: Any, name: str) -> int:
    """Return the ordinal by the options of the provider, or else by the memory of the device that its plugin lists."""
    device_id = InferenceSession.get_provider_options(session).get(name, {}).get("device_id", "")
    if device_id.isascii() and device_id.isdecimal():
        return int(device_id)
    device = next(candidate for candidate in list_other_cuda_plugins() if candidate.ep_name == name)
    memory = device.memory_info(onnxruntime.OrtDeviceMemoryType.DEFAULT)
    return int(memory.device_id) if memory is not None else 0
