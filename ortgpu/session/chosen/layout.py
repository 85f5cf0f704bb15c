"""The choice of channels-last images (NHWC) with fused biases, for models that run faster with them.

Measured on an H200 with the networks of torchvision, in batches of 64 (benchmarks/layouts.py measures again): ResNet,
ResNeXt, VGG, GoogLeNet, Inception, DenseNet and RegNet take 0.54 to 0.81 of the time. Networks with depthwise
convolutions (MobileNet, EfficientNet, ConvNeXt) take up to 2.6 times as long. Those that reshape or transpose inside
(ShuffleNet, ViT, Swin) take up to 1.8 times as long.

So the choice is narrow, and only for models that ONNX Runtime 1.31 converts in full. If it does not know the rank of an
image or the version of the operators, it leaves convolutions as they are (layout_transformation.cc). With fused biases
these give wrong results, since their output is cleared on another stream (cudaMemset in conv.cc). Constant weights are
converted when a session opens (PrePack in conv.cc). BatchNormalization in this layout takes images only
(batch_norm.cc). Convolutions of doubles do not open. Those of float16 with fused biases ended in an illegal instruction
(error 715, cuDNN 9.19).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import onnxruntime

from ...model.protobuf import Extent, Reader
from ...model.questions import STANDARD, matches
from ...model.structure import ModelSource
from ...provider.options import config_entry
from ...provider.requests import CPU, CUDA, ProviderList
from ...provider.runtime import load_runtime

_REASON = "batches of a ResNet-50 took 0.58 of the time on an H200, with results equal within the precision of TF32"
LAYOUT_OPTIONS = {"prefer_nhwc": ("1", _REASON), "fuse_conv_bias": ("1", _REASON)}

# The only capability and first release that were measured
_CAPABILITY = (9, 0)
_RELEASE = (1, 31)
_FEWEST_CONVOLUTIONS = 8
_FEWEST_CHANNELS = 4  # of a group

# Options of the caller that do not affect how convolutions are computed
_UNRELATED = frozenset(
    ("device_id", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream", "enable_cuda_graph")
)
# Entries of session options that keep weights unconverted, or with which nothing was measured
_CONTRARY_ENTRIES = ("session.disable_prepacking", "optimization.disable_specified_optimizers")

_OPERATOR_SETS = range(11, 22)  # Conv and the pools have other versions before and after

# Operators that are converted, with images as input and output
_CONVERTED = frozenset(("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "BatchNormalization"))
_SAME_RANK = frozenset(
    ("Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "Mul", "Add", "Concat", "Resize", "Slice", "Identity", "Dropout")
)
_BODY = _CONVERTED | _SAME_RANK | {"Shape", "Gather", "Unsqueeze", "Constant"}
# Allowed only after the last convolution
_HEAD = frozenset(("Flatten", "Reshape", "Squeeze", "ReduceMean", "Gemm", "MatMul", "Softmax"))
_OPERATORS = _BODY | _HEAD  # of a model that gains
# Operators whose attributes are read, and the attributes that matter
_READ_CLOSELY = _CONVERTED | {"Resize"}
_ATTRIBUTES = frozenset((b"group", b"pads", b"auto_pad", b"mode"))
_FLOAT = 1  # TensorProto.DataType
_RANK_OF_IMAGES = 4
_CHANNELS_OF_A_PICTURE = 3
# Fields of the file, a tenth of a second. DenseNet-201, the largest network measured, has a quarter of them.
_MOST_READ = 100_000
_SOON_SEARCHED = 1 << 20  # bytes, a tenth of a millisecond


def options_for_layout(
    model: ModelSource, requested: ProviderList, options: Any, capability: tuple[int, int] | None
) -> dict[str, tuple[str, str]]:
    """Return ``LAYOUT_OPTIONS`` if the session gains by them on a GPU of this capability, else nothing.

    ``requested`` and ``options``, which may be None, are what its caller asked for.
    """
    if capability != _CAPABILITY or load_runtime().release < _RELEASE:
        return {}
    if not {CUDA, CPU}.issuperset(requested.names) or not _UNRELATED.issuperset(requested.options_of(CUDA)):
        return {}
    if not gains_channels_last(model) or (options is not None and not _leave_it_open(options)):
        return {}
    return dict(LAYOUT_OPTIONS)


def _leave_it_open(options: Any) -> bool:
    if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL:
        return False
    if any(config_entry(options, key) not in (None, "", "0") for key in _CONTRARY_ENTRIES):
        return False
    return not options.optimized_model_filepath  # it would hold operators that only sessions with this layout have


def gains_channels_last(model: ModelSource) -> bool:
    """Return True if a model gains by channels-last images. False if the model cannot be read.

    Reads no weights. This takes a few milliseconds for a network whose session takes a hundred to open.
    """
    if isinstance(model, bytes) and len(model) <= _SOON_SEARCHED and model.count(b"Conv") < _FEWEST_CONVOLUTIONS:
        return False
    return matches(model, _model_gains, _MOST_READ)


# The numbers of fields are those of onnx.proto.


def _model_gains(reader: Reader) -> bool:
    graphs: list[Extent] = []
    versions: list[int] = []  # of the standard operators
    for number, _, extent in reader.fields():
        if number == 7:
            graphs.append(extent)
        elif number == 8:
            domain, version = _read_operator_set(reader, extent)
            versions += [version] if domain in STANDARD else []
        elif number == 25:  # a local function, which may have the name of an operator
            return False
    return len(graphs) == len(versions) == 1 and versions[0] in _OPERATOR_SETS and _graph_gains(reader, graphs[0])


def _graph_gains(reader: Reader, graph: Extent) -> bool:
    nodes: list[_Node] = []
    inputs: dict[bytes, int] = {}  # the rank of each
    constants: dict[bytes, _Tensor] = {}
    for number, _, extent in reader.fields(graph):
        if number == 1:
            node = _read_node(reader, extent)
            if node.operator not in _OPERATORS:
                return False
            nodes.append(node)
        elif number == 5:
            name, tensor = _read_initializer(reader, extent)
            constants[name] = tensor
        elif number == 11:
            name, element_type, rank = _read_input(reader, extent)
            if element_type != _FLOAT or rank is None:
                return False
            inputs[name] = rank
    for name in inputs:  # the caller may give another value
        constants.pop(name, None)
    return _nodes_gain(nodes, inputs, constants)


def _nodes_gain(nodes: list[_Node], inputs: dict[bytes, int], constants: dict[bytes, _Tensor]) -> bool:
    """Return True if there are enough convolutions, and ONNX Runtime can convert all of them.

    It must know the rank of their inputs. It does not know the rank after operators of the head, or after Unsqueeze
    with computed axes. Nodes are read in the order of the file, and a tensor used before its node is unknown.
    """
    fixed = {b"", *constants}  # b"": an input that is left out
    known = {*fixed, *inputs}
    images = {name for name, rank in inputs.items() if rank == _RANK_OF_IMAGES}
    convolutions, is_head = 0, False
    for node in nodes:
        if node.operator == "Resize" and node.attribute(b"mode").text not in (b"", b"nearest"):
            return False  # not measured
        if node.operator in _CONVERTED and not _is_padded_alike(node):
            return False
        is_known = known.issuperset(node.inputs)
        if node.operator in _HEAD:
            is_head, is_known = True, False
        elif node.operator == "Conv":
            if is_head or not is_known or not _convolution_gains(node, constants.get(node.inputs[1])):
                return False
            convolutions += 1
        elif node.operator in _CONVERTED and (not is_known or node.inputs[0] not in images):
            return False
        elif node.operator == "Unsqueeze":
            is_known = is_known and fixed.issuperset(node.inputs[1:])
        elif node.operator == "Constant":
            fixed.update(node.outputs)
        if is_known:
            known.update(node.outputs)
            if node.operator in _CONVERTED or (node.operator in _SAME_RANK and not images.isdisjoint(node.inputs)):
                images.update(node.outputs)
    return convolutions >= _FEWEST_CONVOLUTIONS


def _convolution_gains(node: _Node, weights: _Tensor | None) -> bool:
    """Return True for a convolution of images with constant weights and channels like those measured.

    It is neither depthwise nor nearly so, and its numbers of channels are even; three input channels are allowed too.
    """
    if weights is None or weights.element_type != _FLOAT or len(weights.shape) != _RANK_OF_IMAGES:
        return False
    outputs, inputs = weights.shape[:2]  # the input channels of a group
    if outputs % 2 != 0 or (inputs % 2 != 0 and inputs != _CHANNELS_OF_A_PICTURE):
        return False
    return node.attribute(b"group").integer in (0, 1) or inputs >= _FEWEST_CHANNELS


def _is_padded_alike(node: _Node) -> bool:
    """Return True if the padding is symmetric. Otherwise cuDNN's plans fail during a run (issue 26274)."""
    pads = node.attribute(b"pads").integers
    half = len(pads) // 2
    return pads[:half] == pads[half:] and node.attribute(b"auto_pad").text in (b"", b"NOTSET", b"VALID")


class _Attribute(NamedTuple):
    """The value of an attribute. Fields that it does not set keep these defaults."""

    integer: int = 0
    text: bytes = b""
    integers: Sequence[int] = ()


class _Node(NamedTuple):
    operator: str
    inputs: list[bytes]
    outputs: list[bytes]
    attributes: dict[bytes, _Attribute]  # of operators in _READ_CLOSELY

    def attribute(self, name: bytes) -> _Attribute:
        return self.attributes.get(name, _Attribute())


class _Tensor(NamedTuple):
    element_type: int | None
    shape: list[int]


def _read_operator_set(reader: Reader, message: Extent) -> tuple[bytes, int]:
    """Return domain and version."""
    domain, version = b"", 0
    for number, value, extent in reader.fields(message):
        if number == 1:
            domain = reader.text(extent)
        elif number == 2 and value is not None:
            version = value
    return domain, version


def _read_node(reader: Reader, message: Extent) -> _Node:
    operator = b""
    inputs: list[bytes] = []
    outputs: list[bytes] = []
    attributes: list[Extent] = []
    for number, _, extent in reader.fields(message):
        if number == 1:
            inputs.append(reader.text(extent))
        elif number == 2:
            outputs.append(reader.text(extent))
        elif number == 4:
            operator = reader.text(extent)
        elif number == 5:
            attributes.append(extent)
        elif number == 7 and reader.text(extent) not in STANDARD:
            return _Node("", [], [], {})
    name = operator.decode(errors="replace")
    read = attributes if name in _READ_CLOSELY else ()
    return _Node(name, inputs, outputs, dict(_read_attribute(reader, attribute) for attribute in read))


def _read_attribute(reader: Reader, message: Extent) -> tuple[bytes, _Attribute]:
    name, integer, text, integers = b"", 0, b"", list[int]()
    for number, value, extent in reader.fields(message):
        if number == 1:
            name = reader.text(extent)
            if name not in _ATTRIBUTES:
                break
        elif number == 3 and value is not None:
            integer = value
        elif number == 4:
            text = reader.text(extent)
        elif number == 8:
            integers += reader.numbers(value, extent)
    return name, _Attribute(integer, text, integers)


def _read_input(reader: Reader, message: Extent) -> tuple[bytes, int | None, int | None]:
    """Return name, element type and rank, which are None if unknown or if the input is no tensor."""
    name, element_type, rank = b"", None, None
    for number, _, extent in reader.fields(message):
        if number == 1:
            name = reader.text(extent)
        elif number == 2:
            for _, _, tensor_type in (each for each in reader.fields(extent) if each[0] == 1):
                for inner, value, part in reader.fields(tensor_type):
                    if inner == 1:
                        element_type = value
                    elif inner == 2:
                        rank = sum(each[0] == 1 for each in reader.fields(part))
    return name, element_type, rank


def _read_initializer(reader: Reader, message: Extent) -> tuple[bytes, _Tensor]:
    name, element_type, shape = b"", None, list[int]()
    for number, value, extent in reader.fields(message):
        if number == 1:
            shape += reader.numbers(value, extent)
        elif number == 2:
            element_type = value
        elif number == 8:
            name = reader.text(extent)
    return name, _Tensor(element_type, shape)
