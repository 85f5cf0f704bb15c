"""Rewrite a model with several copies of its nodes, as branches. A run computes one branch.

ONNX Runtime's Conv keeps one cuDNN plan for each *node* (conv.cc, 1.20 to 1.31). Copies of a node keep plans for
several shapes. A binary tree of ``If`` nodes has the copies as its branches. Boolean inputs choose the branch, and a
run computes no other. Weights stay outside of the branches and are shared.

This module imports ``onnx``, so other modules import it only to make branches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

_COPIES = ("MemcpyFromHost", "MemcpyToHost")  # ONNX Runtime adds these between devices, and again for each branch
_STANDARD = ("", "ai.onnx")

# For channels-last images, these operators transpose constant weights when the session opens, and keep the result. ONNX
# Runtime looks for constants in the graph of a node and in the graph around it, but not further out: with 1.31.1 MatMul
# packs weights outside of one If, but not outside of two. A node that finds only its biases takes the weights for
# channels-last already, and results are wrong (conv.cc, read in 1.20). So each branch has a copy of these weights.
_CHANNELS_LAST = "com.ms.internal.nhwc"
_TRANSPOSE_WEIGHTS = ("Conv", "ConvTranspose", "FusedConv")

# A smaller initialiser is copied into each branch. It may be a shape or a scalar that an operator on the GPU reads on
# the CPU, and outside of the branches ONNX Runtime would copy it between devices in each run. Weights are larger.
_SMALL = 256

# Copies of these operators would return other values, since each node keeps its own state.
STATEFUL = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout")
)


class NotBranchableError(ValueError):
    """The model cannot be rewritten; the message says why."""


def read_model(path: str) -> ModelProto:
    """Return a model. Its weights stay in their files."""
    return onnx.load(path, load_external_data=False)


def selectors(branches: int, taken: Collection[str] = ()) -> list[str]:
    """Return the names of the Boolean inputs that choose among ``branches``; none of them is in ``taken``."""
    prefix = "ortgpu_branch_bit_"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return [f"{prefix}{number}" for number in range(max(1, (branches - 1).bit_length()))]


def bits_of(branch: int, count: int) -> list[bool]:
    """Return the values of the ``count`` selectors that choose ``branch``; the first one is the lowest bit."""
    return [bool(branch >> number & 1) for number in range(count)]


def build_branches(
    model: ModelProto, branches: int, overridable: Collection[str] = ()
) -> tuple[ModelProto, list[str], int]:
    """Return a model with ``branches`` copies of the nodes of ``model``; a run takes one copy.

    Also return the names of its selectors, and the bytes of the weights that each branch copies.

    Args:
        model: the model that ONNX Runtime wrote after its optimisations. Its weights may be in other files.
        branches: the number of copies, at least two.
        overridable: the names of the initialisers that a run may replace by inputs.

    Raises:
        NotBranchableError: a node keeps a state, or the graph has sparse initialisers.
    """
    graph = model.graph
    if graph.sparse_initializer:
        raise NotBranchableError("it has sparse initializers")
    for node in _all_nodes(graph):
        if node.op_type in STATEFUL and node.domain in _STANDARD:
            raise NotBranchableError(f"its {node.op_type} nodes keep a state between runs")
    weights = {tensor.name for tensor in graph.initializer}
    computed = {name for node in graph.node for name in node.output}
    outputs = [value for value in graph.output if value.name in computed]  # Other outputs are inputs or initialisers.
    if not outputs:
        raise NotBranchableError("no node makes an output of it")
    direct_outputs = {value.name for value in graph.output} - computed
    inputs = [value for value in graph.input if value.name not in weights or value.name in overridable]
    fixed = {value.name for value in inputs}
    unchanged = fixed | direct_outputs
    copied = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL and _bytes_of(tensor) < _SMALL
    }
    for node in _all_nodes(graph):
        if node.domain == _CHANNELS_LAST and node.op_type in _TRANSPOSE_WEIGHTS:
            copied.update(node.input[1:])
    copied -= unchanged
    outside = [tensor for tensor in graph.initializer if tensor.name not in copied]
    inside = [tensor for tensor in graph.initializer if tensor.name in copied]
    shared = fixed.union(tensor.name for tensor in outside)
    chosen_by = selectors(branches, shared)
    source = _branch_source(graph, inside, outputs)

    prefix = "branch"
    while any(name.startswith(prefix) for name in shared):
        prefix += "_"
    copies = []
    for number in range(branches):
        copies.append(GraphProto())
        copies[-1].CopyFrom(source)
        copies[-1].name = f"{prefix}{number}"
        _add_prefix(copies[-1], f"{prefix}{number}/", shared)
    tree = _tree(copies, chosen_by, outputs, prefix)

    new = ModelProto()
    new.CopyFrom(_copy_properties(model))
    # Before version 4 each initialiser is an input, too.
    new.ir_version = max(model.ir_version, 4)
    new.graph.name = graph.name or "graph"
    new.graph.node.extend(tree)
    new.graph.initializer.extend(outside)
    new.graph.input.extend(inputs)
    new.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in chosen_by)
    new.graph.output.extend(graph.output)
    if not any(opset.domain in _STANDARD for opset in new.opset_import):
        new.opset_import.append(helper.make_opsetid("", 17))
    return new, chosen_by, sum(map(_bytes_of, inside))


def _copy_properties(model: ModelProto) -> ModelProto:
    """Return the opsets, functions and other properties of a model. Its graph may be too large for a copy."""
    properties = ModelProto()
    for field, value in model.ListFields():
        if field.name in ("graph", "training_info"):
            continue
        if isinstance(value, (int, str)):
            setattr(properties, field.name, value)
        else:
            getattr(properties, field.name).extend(value)
    return properties


def _branch_source(graph: GraphProto, inside: Iterable[TensorProto], outputs: Collection[ValueInfoProto]) -> GraphProto:
    """Return the nodes of a graph as a branch. The branch has no inputs and no copies between devices."""
    source = GraphProto()
    source.initializer.extend(inside)
    source.output.extend(outputs)
    computed = {output.name for output in outputs}
    originals: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in _COPIES and node.domain in _STANDARD and node.output[0] not in computed:
            originals[node.output[0]] = originals.get(node.input[0], node.input[0])
        else:
            source.node.append(node)
    if originals:
        _rename(source, originals)
    return source


def _add_prefix(graph: GraphProto, prefix: str, shared: Collection[str]) -> None:
    """Give each name of a graph and its subgraphs a prefix, except the names of shared values."""

    def new(name: str) -> str:
        return name if not name or name in shared else prefix + name

    for node in graph.node:
        node.name = prefix + node.name if node.name else ""
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
        for inner in _subgraphs(node):
            _add_prefix(inner, prefix, shared)
    for value in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        value.name = new(value.name)


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        if any(name in names for name in node.input):
            node.input[:] = [names.get(name, name) for name in node.input]
        for inner in _subgraphs(node):
            _rename(inner, names)
            for value in inner.output:
                value.name = names.get(value.name, value.name)


def _tree(
    copies: list[GraphProto], chosen_by: list[str], outputs: Collection[ValueInfoProto], prefix: str
) -> list[NodeProto]:
    """Return the node that chooses among the branches by all selectors; the last selector decides first."""
    graphs = copies
    for level, selector in enumerate(chosen_by):
        is_last = level == len(chosen_by) - 1
        joined = []
        for number in range(0, len(graphs), 2):
            pair = graphs[number : number + 2]
            if len(pair) == 1:  # Both values of the selector lead to this branch.
                joined.append(pair[0])
                continue
            chosen_outputs = [
                value.name if is_last else f"{prefix}_{level}_{number}/{position}"
                for position, value in enumerate(outputs)
            ]
            node = helper.make_node("If", [selector], chosen_outputs, f"{prefix}_{level}_{number}")
            for name, branch in (("else_branch", pair[0]), ("then_branch", pair[1])):
                attribute = node.attribute.add()
                attribute.name, attribute.type = name, AttributeProto.GRAPH
                attribute.g.CopyFrom(branch)
            if is_last:
                return [node]
            choice = GraphProto(name=node.name)
            choice.node.append(node)
            for name, value in zip(chosen_outputs, outputs, strict=True):
                choice.output.add().CopyFrom(value)
                choice.output[-1].name = name
            joined.append(choice)
        graphs = joined
    raise ValueError("at least two branches are needed")


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for inner in _subgraphs(node):
            yield from _all_nodes(inner)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _bytes_of(tensor: TensorProto) -> int:
    if tensor.data_location == TensorProto.EXTERNAL:
        return sum(int(entry.value) for entry in tensor.external_data if entry.key == "length")
    return int(tensor.ByteSize())
