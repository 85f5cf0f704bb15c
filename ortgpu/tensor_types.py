"""ONNX Runtime's names of the tensors that NumPy has a type for, but for text."""

from __future__ import annotations

import numpy as np

DTYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        "float": "f4", "double": "f8", "float16": "f2", "bool": "?", "int8": "i1", "int16": "i2", "int32": "i4",
        "int64": "i8", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8",
    }.items()
}  # fmt: skip
