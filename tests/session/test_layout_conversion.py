"""The layout NHWC is chosen only for networks in which ONNX Runtime converts every convolution.

Where it leaves one channels-first, the options chosen with that layout give wrong results: see
ortgpu/session/chosen/choose.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from tests.support.judged_models import gains_channels_last
from tests.support.networks import CHANNELS, CLASSES, SIZE, Network, random_network

CONVERTED = {"Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "BatchNormalization"}


def network_with(before: Callable[[Network], object] | None = None) -> Any:
    """Twelve convolutions behind what ``before`` adds."""
    network = Network(0)
    if before is not None:
        before(network)
    for _ in range(12):
        network.add("Relu", network.conv())
    return onnx.load_from_string(network.model())


def normalised(network: Network) -> None:
    """As torchvision's GoogLeNet begins: each channel by itself, then together again."""
    axis = network.constant(np.array([1]))
    channels = []
    for number in range(CHANNELS):
        network.add("Gather", "x", network.constant(np.array(number)), axis=1)
        network.add("Unsqueeze", network.current, axis)
        network.add("Mul", network.current, network.number(0.5))
        channels.append(network.add("Add", network.current, network.number(0.1)))
    network.add("Concat", *channels, axis=1)


def ranks_are_known(model: Any) -> bool:
    """Whether shape inference, whose code ONNX Runtime shares, knows all images as such."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    return all(ranks.get(node.input[0]) == 4 for node in graph.node if node.op_type in CONVERTED)


def opens(model: Any) -> bool:
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return True


@pytest.mark.parametrize("number", range(12))
def test_of_what_is_chosen_all_ranks_are_known(number: int) -> None:
    model = onnx.load_from_string(random_network(number))
    assert gains_channels_last(model.SerializeToString())
    assert ranks_are_known(model)


def test_images_that_are_normalised_channel_by_channel() -> None:
    model = network_with(normalised)
    assert opens(model)
    assert ranks_are_known(model)
    assert gains_channels_last(model.SerializeToString())


def _an_input_without_shape(model: Any) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def _unsqueezed_along_computed_axes(model: Any) -> None:
    added = [
        helper.make_node("Gather", ["x", "zero"], ["plane"], axis=1),
        helper.make_node("Shape", ["plane"], ["shape"]),
        helper.make_node("Slice", ["shape", "zeros", "ones"], ["batch"]),
        helper.make_node("Unsqueeze", ["plane", "batch"], ["image"]),
        helper.make_node("Conv", ["image", "weights"], ["x again"], pads=[1] * 4),
    ]
    for node in model.graph.node:
        node.input[:] = ["x again" if name == "x" else name for name in node.input]
    nodes = [*added, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    arrays = {
        "zero": np.array(0),
        "zeros": np.array([0]),
        "ones": np.array([1]),
        "weights": np.ones((CHANNELS, 1, 3, 3), np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())


def _reshaped_to_a_shape_that_is_computed(model: Any) -> None:
    """And listed behind the convolutions, which ONNX Runtime puts in order."""
    for node in model.graph.node:
        node.input[:] = ["image" if name == "x" else name for name in node.input]
    nodes = [("Shape", ["x"], ["shape"]), ("Add", ["shape", "zero"], ["same"]), ("Reshape", ["x", "same"], ["image"])]
    model.graph.node.extend(helper.make_node(*node) for node in nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))


@pytest.mark.parametrize(
    "change", [_an_input_without_shape, _unsqueezed_along_computed_axes, _reshaped_to_a_shape_that_is_computed]
)
def test_a_rank_that_is_not_known(change: Callable[[Any], None]) -> None:
    model = network_with()
    change(model)
    assert opens(model)
    assert not gains_channels_last(model.SerializeToString())


@pytest.mark.parametrize(("version", "chosen"), [(9, False), (11, True), (21, True), (22, False), (23, False)])
@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_versions_of_the_operators(domain: str, version: int, chosen: bool) -> None:
    model = network_with()
    model.opset_import[0].version = version
    for owner in (*model.opset_import, *model.graph.node):
        owner.domain = domain
    assert opens(model)
    assert gains_channels_last(model.SerializeToString()) == chosen


def test_no_version_of_the_operators() -> None:
    model = network_with()
    del model.opset_import[:]
    assert not gains_channels_last(model.SerializeToString())


def test_vectors_that_are_normalised() -> None:
    """As in networks that compare faces: behind the last layer."""
    network = Network(0)
    for _ in range(12):
        network.add("Relu", network.conv())
    network.add("Flatten", network.current)
    network.add("Gemm", network.current, network.weights(CHANNELS * SIZE**2, CLASSES))
    assert gains_channels_last(network.model())
    around_one = [network.weights(CLASSES, scale=0.1, around=1.0) for _ in range(4)]
    network.add("BatchNormalization", network.current, *around_one)
    assert opens(onnx.load_from_string(network.model()))
    assert not gains_channels_last(network.model())


def test_a_function_with_the_name_of_an_operator() -> None:
    model = network_with()
    node = helper.make_node("Transpose", ["a"], ["b"], perm=[0, 1, 3, 2])
    model.functions.append(helper.make_function("", "Relu", ["a"], ["b"], [node], list(model.opset_import)))
    assert not gains_channels_last(model.SerializeToString())


def test_a_graph_in_two_parts() -> None:
    """Protobuf makes one message of two that follow one another."""
    data = network_with().SerializeToString()
    last = helper.make_node("Transpose", ["x"], ["unused"], perm=[0, 1, 3, 2])
    assert gains_channels_last(data)
    assert not gains_channels_last(data + onnx.ModelProto(graph=onnx.GraphProto(node=[last])).SerializeToString())


def _sparse(model: Any) -> None:
    weights = model.graph.initializer[0]
    dense = numpy_helper.to_array(weights)
    values = numpy_helper.from_array(dense.ravel(), weights.name)
    places = numpy_helper.from_array(np.arange(dense.size))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, dense.shape))
    model.graph.initializer.remove(weights)


def _of_doubles(model: Any) -> None:
    weights = model.graph.initializer[0]
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights).astype(np.float64), weights.name))


def _of_another_name(model: Any) -> None:
    model.graph.initializer[0].name = "unused"


@pytest.mark.parametrize("change", [_sparse, _of_doubles, _of_another_name])
def test_weights_that_are_not_found_as_such(change: Callable[[Any], None]) -> None:
    model = network_with()
    change(model)
    assert not gains_channels_last(model.SerializeToString())


def _shared(model: Any) -> None:
    first, second = [node for node in model.graph.node if node.op_type == "Conv"][:2]
    second.input[1] = first.input[1]


def _returned(model: Any) -> None:
    weights = model.graph.initializer[0]
    model.graph.output.append(helper.make_tensor_value_info(weights.name, weights.data_type, weights.dims))


@pytest.mark.parametrize("change", [_shared, _returned])
def test_weights_with_another_use(change: Callable[[Any], None]) -> None:
    model = network_with()
    change(model)
    assert opens(model)
    assert gains_channels_last(model.SerializeToString())


@pytest.mark.parametrize("model", [None, 0, 3.5, ["model.onnx"]])
def test_what_is_no_path_is_left_to_onnx_runtime(model: Any) -> None:
    """0 would be the standard input, to be read and closed."""
    assert not gains_channels_last(model)
