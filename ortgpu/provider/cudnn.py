"""The operators that run on cuDNN, and the forms of each that need it.

Seen on a Hopper GPU (H100 or H200) on 2026-11-27 with onnxruntime-gpu 1.31.1, CUDA 13.0 and libcudnn hidden. There is a
model for each form (tests/support/cudnn_forms.py), and tests/gpu/test_cudnn.py repeats the measurement:

| operator | needs cuDNN |
|---|---|
| all other operators in CUDNN_OPERATORS | in every form |
| ArgMax, ArgMin | over another axis than the last |
| MaxPool | without dilations and a second output |
| ReduceMin, ReduceMax, ReduceProd, ReduceL1, ReduceL2, ReduceLogSumExp | unless nothing is reduced |
| ReduceMean, ReduceLogSum, ReduceSumSquare | unless the axes are the first or the last; on integers always |

ReduceSum, Softmax, LayerNormalization, ONNX's own Attention and others have kernels of their own for all forms.
GroupQueryAttention runs without the library, and fails with the option enable_cudnn=0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model.files import is_ort_format
from ..model.outline import GraphOutline
from ..process.late import late

if TYPE_CHECKING:
    import onnx
else:
    onnx = late("onnx")

_REDUCTIONS = frozenset(("ReduceMin", "ReduceMax", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"))
_REDUCTIONS_OF_MATRICES = frozenset(("ReduceMean", "ReduceLogSum", "ReduceSumSquare"))

# The CUDA kernels of these operators run on cuDNN in at least one form.
CUDNN_OPERATORS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        name
        for line in (
            "Conv ConvTranspose BatchNormalization InstanceNormalization LRN RNN GRU LSTM Einsum",
            "MaxPool AveragePool GlobalMaxPool GlobalAveragePool ArgMax ArgMin",
        )
        for name in line.split(" ")
    )
    | _REDUCTIONS
    | _REDUCTIONS_OF_MATRICES,
    "com.microsoft": frozenset({"FusedConv", "NhwcConv", "NhwcFusedConv", "Attention", "MultiHeadAttention"}),
    "com.ms.internal.nhwc": frozenset({"Conv", "ConvTranspose", "BatchNormalization", "FusedConv"}),
}

_FLOATS = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE and BFLOAT16 of TensorProto.DataType

Shape = Sequence["int | None"]


def cudnn_operators(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of the operators that may need cuDNN, sorted. ``operators``: type and domain."""
    by_domain = {"ai.onnx": CUDNN_OPERATORS[""], **CUDNN_OPERATORS}
    return tuple(sorted({op_type for op_type, domain in operators if op_type in by_domain.get(domain, ())}))


def operators_needing_cudnn(outline: GraphOutline, operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the sorted names of the ``operators`` that need cuDNN in the forms of this model. Never raises.

    If the answer depends on a form, onnx infers the shapes of the model. Facts that a model does not tell are assumed
    to be as in most models.
    """
    candidates = cudnn_operators(operators)
    if _NEEDS_IT.keys().isdisjoint(candidates):
        return candidates
    needing: dict[str, bool] = {}
    for node in _nodes_of(outline):
        if node.operator in candidates and not needing.get(node.operator, False):
            needing[node.operator] = node.operator not in _NEEDS_IT or _NEEDS_IT[node.operator](node)
    # The model's file may lack an operator of the optimised model, or be unreadable.
    return tuple(name for name in candidates if needing.get(name, name not in _REDUCTIONS_OF_MATRICES))


@dataclass(frozen=True, slots=True)
class _Node:
    """A node with the facts that decide its form. None: unknown.

    ``shape`` is the shape of the first input. Empty ``axes`` reduce all axes.
    """

    operator: str
    attributes: Mapping[str, Any]
    outputs: int
    shape: Shape | None
    kind: int | None  # TensorProto.DataType of the first input
    axes: Sequence[int] | None


def _argument(node: _Node) -> bool:
    axis = node.attributes.get("axis", 0)
    is_last = axis == -1 or (node.shape is not None and axis % len(node.shape) == len(node.shape) - 1)
    return not is_last


def _pool(node: _Node) -> bool:
    return node.outputs < 2 and all(size == 1 for size in node.attributes.get("dilations", ()))


def _reduction(node: _Node) -> bool:
    return bool(node.axes) or not node.attributes.get("noop_with_empty_axes", 0)


def _reduction_of_matrix(node: _Node) -> bool:
    """Return True if the reduced axes are neither the first nor the last axes.

    Over the first or the last axes, the reduction is a sum of a matrix. Axes of size 1 do not count.
    """
    if not _reduction(node):
        return False
    if node.kind is not None and node.kind not in _FLOATS:
        return True
    if not node.axes or node.shape is None:
        return False
    reduced = {axis % len(node.shape) for axis in node.axes}
    is_reduced = [axis in reduced for axis, size in enumerate(node.shape) if size != 1]
    changes = sum(first != second for first, second in itertools.pairwise(is_reduced))
    return changes > 1


_NEEDS_IT: Mapping[str, Callable[[_Node], bool]] = {
    "ArgMax": _argument,
    "ArgMin": _argument,
    "MaxPool": _pool,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_REDUCTIONS_OF_MATRICES, _reduction_of_matrix),
}


def _nodes_of(outline: GraphOutline) -> Iterator[_Node]:
    """Yield the nodes of a model, of its subgraphs and of its functions. An unreadable model yields none."""
    if is_ort_format(outline.model):
        return
    proto = onnx.ModelProto()
    try:
        content = outline.content
        proto.ir_version = content.ir_version
        for domain, version in content.opsets:
            proto.opset_import.add(domain=domain, version=version)
        graph = proto.graph
        fields = {1: graph.node, 5: graph.initializer, 11: graph.input, 12: graph.output}
        messages = [(field, part) for number, field in fields.items() for part in content.graph.messages(number)]
        messages += [(graph.value_info, info) for info in content.infos]
        messages += [(proto.functions, function.message) for function in content.functions]
        for field, message in messages:
            field.add().ParseFromString(message)
        proto = onnx.shape_inference.infer_shapes(proto)
    except Exception:  # noqa: BLE001 - ONNX Runtime reports any fault of the model
        return
    for function in proto.functions:
        for node in function.node:
            yield _node(node, {}, {})
    yield from _nodes_of_graph(proto.graph, {}, {})


def _nodes_of_graph(graph: Any, outer_types: Mapping[str, Any], outer_constants: Mapping[str, Any]) -> Iterator[_Node]:
    types = {**outer_types, **{value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input)}}
    constants = {**outer_constants, **{tensor.name: tensor for tensor in graph.initializer}}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], entry.t) for entry in node.attribute if entry.name == "value")
        yield _node(node, types, constants)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes_of_graph(attribute.g, types, constants)


def _node(node: Any, types: Mapping[str, Any], constants: Mapping[str, Any]) -> _Node:
    attributes = {
        item.name: onnx.helper.get_attribute_value(item) for item in node.attribute if item.name in _READ_ATTRIBUTES
    }
    kind, shape, axes = None, None, attributes.get("axes", ())
    if node.input and node.input[0] in types:
        tensor = types[node.input[0]]
        kind = tensor.elem_type or None
        if tensor.HasField("shape"):
            shape = [size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim]
    if len(node.input) > 1 and node.input[1]:
        tensor = constants.get(node.input[1])
        axes = None if tensor is None else onnx.numpy_helper.to_array(tensor).ravel().tolist()
    return _Node(node.op_type, attributes, sum(map(bool, node.output)), shape or None, kind, axes)


_READ_ATTRIBUTES = ("axis", "axes", "dilations", "noop_with_empty_axes")
