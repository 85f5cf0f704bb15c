"""NumPy types by ONNX Runtime's names, against those of onnx itself."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ortgpu.model.tensor_types import DTYPES

NAMES = {"float": "FLOAT", "double": "DOUBLE"}  # ONNX Runtime's names are those of C++


@pytest.mark.parametrize("name", DTYPES)
def test_each_is_the_type_that_onnx_has_for_it(name: str) -> None:
    of_onnx = name.removeprefix("tensor(").removesuffix(")")
    number = onnx.TensorProto.DataType.Value(NAMES.get(of_onnx, of_onnx.upper()))
    assert onnx.helper.tensor_dtype_to_np_dtype(number) == DTYPES[name]


def test_every_number_of_numpy_is_there_and_text_is_not() -> None:
    kinds = {"f2", "f4", "f8", "?", *(f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8))}
    assert {np.dtype(kind) for kind in kinds} == set(DTYPES.values())
    assert len(DTYPES) == len(kinds)
    assert "tensor(string)" not in DTYPES


def test_integers_of_64_bits_have_the_class_of_onnx_runtimes_results() -> None:
    assert DTYPES["tensor(int64)"].type is np.longlong
    assert DTYPES["tensor(uint64)"].type is np.ulonglong
