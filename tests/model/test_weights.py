"""The bytes of a model's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from ortgpu.model.files import stamp_of
from ortgpu.model.outline import GraphOutline
from ortgpu.model.weights import bytes_of_initializers, bytes_of_weights


def model_with(*tensors: onnx.TensorProto) -> bytes:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n"])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n"])],
        tensors,
    )
    data: bytes = onnx.helper.make_model(graph).SerializeToString()
    return data


@pytest.mark.parametrize("number", range(1, 24))  # those of onnx 1.18
def test_an_item_of_each_type_has_the_bits_that_its_name_says(number: int) -> None:
    name = onnx.TensorProto.DataType.Name(number)
    bits = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8, "STRING": 0, "COMPLEX64": 64, "COMPLEX128": 128, "BFLOAT16": 16}
    if name not in bits:
        digits = name.removeprefix("FLOAT").lstrip("UINT")
        bits[name] = int(digits.partition("E")[0])
    tensor = onnx.TensorProto(name="w", dims=[3, 8], data_type=number)
    assert bytes_of_initializers(GraphOutline(model_with(tensor))) == 24 * bits[name] // 8


def test_all_weights_of_a_file_count_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    halves, scalar = np.zeros((10, 10), np.float16), np.array(1, np.int64)
    path.write_bytes(model_with(onnx.numpy_helper.from_array(halves, "a"), onnx.numpy_helper.from_array(scalar, "b")))
    stamp = stamp_of(str(path))
    assert bytes_of_weights(str(path), stamp) == 200 + 8
    path.write_bytes(model_with())
    assert bytes_of_weights(str(path), stamp) is None
    assert bytes_of_weights(str(path), stamp_of(str(path))) == 0


def test_what_cannot_be_read_has_no_size() -> None:
    assert bytes_of_initializers(GraphOutline(b"no model")) is None
    assert bytes_of_weights(b"no model", stamp_of(b"no model")) is None
