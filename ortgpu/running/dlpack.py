"""ONNX Runtime's import of DLPack tensors, which differs between releases.

Until 1.31 the function is told whether the tensor is boolean, and expects booleans as bytes, as in DLPack before 0.8.
Since 1.32 it takes DLPack's own booleans and only the tensor.
"""

from __future__ import annotations

from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state as native

_from_dlpack = getattr(native.OrtValue, "from_dlpack", None)  # since 1.22
IS_TAKEN = _from_dlpack is not None
BOOLEANS_ARE_BYTES = "is_bool_tensor" in (getattr(_from_dlpack, "__doc__", None) or "")


def native_value(capsule: Any, *, is_bool: bool) -> Any:
    """Return ONNX Runtime's value over the memory of a tensor. Consumes the capsule."""
    assert _from_dlpack is not None, "asked for by IS_TAKEN before"
    return _from_dlpack(capsule, is_bool) if BOOLEANS_ARE_BYTES else _from_dlpack(capsule)
