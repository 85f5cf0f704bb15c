"""NumPy types by ONNX Runtime's names of tensor types. Text is left out."""

from __future__ import annotations

import numpy as np

# C has two types of 64 bits on Linux, long and long long. NumPy's int64 is long, and ONNX Runtime's results have long
# long: the dtypes are equal, but their scalars have different classes.
DTYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        "float": "f4", "double": "f8", "float16": "f2", "bool": "?", "int8": "i1", "int16": "i2", "int32": "i4",
        "int64": "q", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "Q",
    }.items()
}  # fmt: skip
