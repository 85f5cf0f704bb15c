"""Models without the values of their weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.model.structure import without_weights
from tests.support.networks import random_network


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Strings go through a Reshape whose shape is an initializer, and are compared with one; weights are large."""
    nodes = [
        helper.make_node("Reshape", ["text", "shape"], ["column"], name="reshaped"),
        helper.make_node("Equal", ["column", "word"], ["found"], name="compared"),
        helper.make_node("Cast", ["found"], ["number"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["number", "weights"], ["result"], name="product"),
    ]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("text", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, ["n", 100_000])],
        [
            numpy_helper.from_array(np.ones((1, 100_000), np.float32), "weights"),
            numpy_helper.from_array(np.array([-1, 1], np.int64), "shape"),
            numpy_helper.from_array(np.array(["yes"], object), "word"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)


def test_all_but_large_weights_stays(model: onnx.ModelProto) -> None:
    expected = onnx.ModelProto()
    expected.CopyFrom(model)
    expected.graph.initializer[0].ClearField("raw_data")
    assert onnx.load_from_string(without_weights(model.SerializeToString())) == expected


@pytest.mark.parametrize("number", range(3))
def test_what_is_small_is_not_touched(number: int) -> None:
    network = onnx.load_from_string(random_network(number))
    network.graph.ClearField("initializer")
    data = network.SerializeToString()
    assert without_weights(data) == data
