"""ONNX Runtime's own session, which GPU tests and benchmarks compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def plain_session(
    model: str,
    device: str = "cuda",
    ordinal: int = 0,
    options: Mapping[str, str] | None = None,
    *,
    sess_options: Any = None,
) -> Any:
    """ONNX Runtime's own session, known to be on the device; with further options of the CUDA provider."""
    import onnxruntime

    names = PLAIN_PROVIDERS if device == "cuda" else PLAIN_PROVIDERS[1:]
    if names[0] not in onnxruntime.get_available_providers():  # CUDA comes as a plugin
        from ortgpu.provider.runtime import open_provider

        open_provider()
    given = {**({"device_id": str(ordinal)} if ordinal else {}), **(options or {})}
    of_each = [given] + [{}] * (len(names) - 1) if given and device == "cuda" else None
    session = onnxruntime.InferenceSession(model, sess_options, names, of_each)
    if session.get_providers()[0] != names[0]:
        raise RuntimeError("the plain session is on the CPU: there is nothing to compare with")
    return session
