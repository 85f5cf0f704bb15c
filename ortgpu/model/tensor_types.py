"""NumPy types by ONNX Runtime's names of tensor types. Text is left out."""

from __future__ import annotations

import numpy as np

# Of the two types of 64 bits that C has on Linux NumPy means the first by int64, and ONNX Runtime's results have the
# second: they are equal, but their numbers are of different classes.
DTYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        "float": "f4", "double": "f8", "float16": "f2", "bool": "?", "int8": "i1", "int16": "i2", "int32": "i4",
        "int64": "q", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "Q",
    }.items()
}  # fmt: skip
