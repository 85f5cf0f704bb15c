"""Which models run faster when the CUDA provider keeps images channels-last (NHWC) and adds biases inside convolutions.

Measured on an H200 with the networks of torchvision: with large batches ResNet, ResNeXt, VGG, GoogLeNet, Inception,
DenseNet and RegNet take 0.54 to 0.81 of the time. Those with depthwise convolutions (MobileNet, EfficientNet, ConvNeXt)
take up to 2.6 times as long, those that reshape or transpose on the way (ShuffleNet, ViT, Swin) up to 1.8 times.

What is chosen is therefore narrow. Nor does ONNX Runtime 1.31 open models with convolutions of doubles in this layout,
and where weights are computed and biases are not, it takes the weights to be in this layout already (PrePack in
conv.cc). Convolutions of float16 with their biases inside ended in an illegal instruction (error 715, cuDNN 9.19).
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import onnxruntime

from .models import open_model
from .protobuf import Bytes, Extent, fields, numbers
from .providers import CPU, CUDA, ProviderList

_REASON = "batches of a ResNet-50 took 0.58 of the time on an H200, with results equal within the precision of TF32"
LAYOUT_OPTIONS = {"prefer_nhwc": ("1", _REASON), "fuse_conv_bias": ("1", _REASON)}

# Where it was measured
_CAPABILITY = (9, 0)
_RELEASE = (1, 31)
_FEWEST_CONVOLUTIONS = 8
_FEWEST_CHANNELS = 4  # of a group

# What a caller can have set without a say in how convolutions are computed
_UNRELATED = frozenset(
    ("device_id", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream", "enable_cuda_graph")
)
_BODY = frozenset(
    name
    for line in (
        "Conv Relu LeakyRelu PRelu Clip Sigmoid Mul Add Concat MaxPool AveragePool GlobalMaxPool GlobalAveragePool",
        "BatchNormalization Resize Shape Slice Gather Unsqueeze Constant Identity Dropout",
    )
    for name in line.split(" ")
)
# Where no convolution comes after them
_HEAD = frozenset({"Flatten", "Reshape", "Squeeze", "ReduceMean", "Gemm", "MatMul", "Softmax"})
_FLOAT = 1  # TensorProto.DataType


def options_for_layout(
    model: str | bytes | os.PathLike[str], given: ProviderList, options: Any, capability: tuple[int, int] | None
) -> dict[str, tuple[str, str]]:
    """``LAYOUT_OPTIONS`` for a session that gains by them on a GPU of this capability, else nothing.

    ``given`` and ``options`` are what its caller asked for.
    """
    if capability != _CAPABILITY or _release() < _RELEASE:
        return {}
    if not {CUDA, CPU}.issuperset(given.names) or not _UNRELATED.issuperset(given.options_of(CUDA)):
        return {}
    if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL:
        return {}
    if options.optimized_model_filepath:  # it would hold operators that only sessions with this layout have
        return {}
    return dict(LAYOUT_OPTIONS) if gains_channels_last(model) else {}


def gains_channels_last(model: str | bytes | os.PathLike[str]) -> bool:
    """Whether a model is one of those that gain. False for what is no model: ONNX Runtime says what is wrong with it.

    Reads no weights: a few milliseconds for a network of which a session takes a hundred.
    """
    try:
        if isinstance(model, bytes):
            return _model_gains(model)
        with open_model(model) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _model_gains(content)
    except (OSError, ValueError, IndexError):
        return False


# Numbers of fields are those of onnx.proto


def _model_gains(data: Bytes) -> bool:
    graphs = (extent for number, _, extent in fields(data, (0, len(data))) if number == 7)
    graph = next(graphs, None)
    return graph is not None and _graph_gains(data, graph)


def _graph_gains(data: Bytes, graph: Extent) -> bool:
    given: set[bytes] = set()  # by the caller, or by a node
    groups: dict[bytes, int] = {}  # of each convolution, by the name of its weights
    initializers: list[Extent] = []
    is_head, is_clear = False, True  # clear without a look at the shapes of weights
    for number, _, extent in fields(data, graph):
        if number == 1:
            node = _read_node(data, extent)
            is_head = is_head or node.operator in _HEAD
            if node.operator not in _BODY and not (is_head and node.operator in _HEAD):
                return False
            if node.operator == "Conv":
                if is_head or node.spatial_dimensions not in (2, None):
                    return False
                groups[node.inputs[1]] = node.groups
                is_clear = is_clear and node.groups == 1 and node.spatial_dimensions is not None
            given.update(node.outputs)
        elif number == 5:
            initializers.append(extent)
        elif number == 11:
            name, element_type = _read_input(data, extent)
            if element_type != _FLOAT:
                return False
            given.add(name)
    if len(groups) < _FEWEST_CONVOLUTIONS or not given.isdisjoint(groups):
        return False
    return is_clear or _weights_do(groups, dict(_read_shape(data, extent) for extent in initializers))


def _weights_do(groups: dict[bytes, int], shapes: dict[bytes, list[int]]) -> bool:
    """Whether all convolutions are of images, and none is depthwise, or nearly so."""
    of_each = ((count, shapes.get(name, [])) for name, count in groups.items())
    return all(len(shape) == 4 and (count == 1 or shape[1] >= _FEWEST_CHANNELS) for count, shape in of_each)


class _Node(NamedTuple):
    operator: str
    inputs: list[bytes]
    outputs: list[bytes]
    groups: int
    spatial_dimensions: int | None  # where the node says it


def _read_node(data: Bytes, extent: Extent) -> _Node:
    operator, groups, spatial_dimensions = b"", 1, None
    inputs: list[bytes] = []
    outputs: list[bytes] = []
    attributes: list[Extent] = []
    for number, _, (start, end) in fields(data, extent):
        if number == 1:
            inputs.append(data[start:end])
        elif number == 2:
            outputs.append(data[start:end])
        elif number == 4:
            operator = data[start:end]
        elif number == 5:
            attributes.append((start, end))
        elif number == 7 and data[start:end] not in (b"", b"ai.onnx"):
            return _Node("", [], [], 1, None)  # of another domain
    if operator == b"Conv":
        for attribute in attributes:
            name, integer, integers = _read_attribute(data, attribute)
            if name == b"group":
                groups = integer
            elif name == b"kernel_shape":
                spatial_dimensions = integers
    return _Node(operator.decode(errors="replace"), inputs, outputs, groups, spatial_dimensions)


def _read_attribute(data: Bytes, extent: Extent) -> tuple[bytes, int, int]:
    """Name, ``i``, and how many ``ints``; the last two only of attributes that matter here."""
    name, integer, integers = b"", 0, 0
    for number, value, (start, end) in fields(data, extent):
        if number == 1:
            name = data[start:end]
            if name not in (b"group", b"kernel_shape"):
                break
        elif number == 3 and value is not None:
            integer = value
        elif number == 8:
            integers += len(numbers(data, value, (start, end)))
    return name, integer, integers


def _read_input(data: Bytes, extent: Extent) -> tuple[bytes, int | None]:
    """Name and element type; None for what is no tensor."""
    name, element_type = b"", None
    for number, _, (start, end) in fields(data, extent):
        if number == 1:
            name = data[start:end]
        elif number == 2:
            for _, _, tensor_type in (each for each in fields(data, (start, end)) if each[0] == 1):
                element_type = next((value for number, value, _ in fields(data, tensor_type) if number == 1), None)
    return name, element_type


def _read_shape(data: Bytes, extent: Extent) -> tuple[bytes, list[int]]:
    """Name and dimensions of an initializer."""
    name, dimensions = b"", list[int]()
    for number, value, (start, end) in fields(data, extent):
        if number == 1:
            dimensions += numbers(data, value, (start, end))
        elif number == 8:
            name = data[start:end]
    return name, dimensions


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
