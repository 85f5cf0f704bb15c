"""The arena of a session: the GPU memory that it holds, and how its free regions go back.

ONNX Runtime has no Python function for either. This module relies on two facts of its source (bfc_arena.cc and
inference_session.cc of 1.31.1). The arena refuses a request above its limit, and the error names the bytes that are
left. A run with the option ``memory.enable_memory_arena_shrinkage`` shrinks the arena even if the run has failed. A run
with the option ``terminate`` fails before its first node. On an idle session both take a tenth of a millisecond.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from ..provider.lifetime import device_of
from ..provider.options import config_entry
from ..provider.requests import CUDA
from ..provider.settings import CAPTURE, LIMIT
from .onnxruntimes import InferenceSession

if TYPE_CHECKING:
    from ..provider.devices import Device
    from ..provider.interfaces import VerifiedSession

logger = logging.getLogger("ortgpu")

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_REFUSAL = re.compile(r"Available memory of (\d+) is smaller than requested bytes of \d+")
_GRANULE = 256  # bytes: the arena's sizes are multiples of it
_UNLIMITED = (1 << 64) - 1
_SHARED = "session.use_env_allocators"  # an entry of the session's options
_OUTSIDE = ("gpu_external_alloc", "gpu_external_free")  # Each of these options replaces the arena.


def reserved_bytes(session: VerifiedSession) -> int | None:
    """Return the bytes of the device that the arena holds, whether they are in use or not.

    None if unknown: before ONNX Runtime 1.30, with a shared allocator or one of the caller's, and in a plugin.
    """
    return reserved_by(_inner_of(session), limit_of(session), device_of(session))


def reserved_by(inner: Any, limit: int | None, device: Device) -> int | None:
    """Return what :func:`reserved_bytes` returns, for the C++ session itself and the limit of its arena."""
    if limit is None or not hasattr(inner, "create_ortvalue_from_shape_and_type"):
        return None
    place = onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device()
    # The arena rounds its free bytes down. The largest possible request has eight-byte items and nearly 2**64 bytes.
    usable = limit // _GRANULE * _GRANULE
    items = (min(usable, _UNLIMITED - 2 * _GRANULE) // _GRANULE * _GRANULE + _GRANULE) // 8
    try:
        # The arena must not be empty: without a limit ONNX Runtime would look forever for a size that fits.
        value = inner.create_ortvalue_from_shape_and_type([1], np.float64, place)
        inner.create_ortvalue_from_shape_and_type([items], np.float64, place)
    except Exception as error:  # noqa: BLE001 - the refusal is the answer, and any other error is none
        match = _REFUSAL.search(str(error))
        return usable - int(match[1]) if match is not None else None
    del value
    return None


def shrink(session: VerifiedSession) -> None:
    """Give the arena's free regions back to the device. Runs of other threads keep their memory.

    The first region stays, and so do regions with a weight or a value of the caller's. Nothing happens while the
    session has captured CUDA graphs: their kernels use the addresses of free regions.
    """
    inner, device = _inner_of(session), device_of(session)
    if inner is None or _has_graphs(session):
        return
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(_SHRINKAGE, f"{'gpu' if device.is_gpu else 'cpu'}:{device.ordinal or 0}")
    options.terminate = True
    options.log_severity_level = 4  # The terminated run is no error.
    try:
        inner.run([output.name for output in inner.outputs_meta], {}, options)
    except Exception as error:  # noqa: BLE001 - a terminated run always fails
        if "terminate flag" not in str(error):
            logger.debug("the arena of a session was not shrunk: %s", str(error))


def _inner_of(session: VerifiedSession) -> Any:
    """Return the C++ session, also of a session that replays graphs. None while another thread opens it again."""
    return vars(session._sess).get("_inner", session._sess) if hasattr(session._sess, "__dict__") else session._sess


def _options_of(session: VerifiedSession) -> dict[str, str]:
    providers: dict[str, dict[str, str]] = InferenceSession.get_provider_options(session)
    return providers.get(CUDA, {})


def limit_of(session: VerifiedSession) -> int | None:
    """Return the bytes that the arena may hold. None if the session may have no arena of its own, or none now."""
    options, inner = _options_of(session), _inner_of(session)
    if inner is None or any(options.get(name, "0") != "0" for name in _OUTSIDE):
        return None
    if config_entry(inner.session_options, _SHARED) == "1":
        return None
    if not device_of(session).is_gpu:
        return _UNLIMITED
    return int(options[LIMIT]) if options.get(LIMIT, "").isdecimal() else None


def _has_graphs(session: VerifiedSession) -> bool:
    if _options_of(session).get(CAPTURE, "0") == "0":
        return False
    captures = getattr(session._sess, "captures", None)
    return captures is None or bool(captures)  # None: the caller captures, and nobody counts
