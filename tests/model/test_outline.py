"""The outline of a model has what onnx reads of it, without the values of large weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.model.outline import MOST_PARTS, UNREADABLE, Graph, GraphOutline, Value
from ortgpu.model.protobuf import TooManyFieldsError
from tests.support.networks import length_delimited, random_network

OF_ALL_KINDS = """
    <ir_version: 8, opset_import: ["": 17, "own": 1]>
    g (float[n, 3] x, string s, seq(float[2]) q, bool c) => (float[m] y)
    <float[2] w = {1, 2}>
    {
        [first] a = own.f (x)
        v = Constant <value = int64[2] {3, 4}> ()
        y = If (c) <
            then_branch = yes () => (float[k] b) <int64 i = {0}> { b = LRN <size = 5, alpha = 0.1, bias = 1.0> (a) },
            else_branch = no () => (float[k] d) { d = Transpose <perm = [1, 0]> (a) }
        >
    }
    <domain: "own", opset_import: ["": 17]>
    f (p) => (r) { r = Resize <mode = "nearest"> (p) }
"""


def told(graph: Graph) -> Any:
    return (
        [
            (node.name, node.operator, node.domain, node.inputs, node.outputs, list(map(told, node.graphs)))
            for node in graph.nodes
        ],
        [tuple(tensor[:3]) for tensor in graph.initializers],
        [value.name for value in graph.inputs],
        graph.outputs,
    )


def expected(graph: Any) -> Any:
    def inner(node: Any) -> Iterator[Any]:
        for attribute in node.attribute:
            yield from map(expected, [attribute.g] if attribute.HasField("g") else attribute.graphs)

    def text(name: str) -> bytes:
        return name.encode()

    nodes = [
        (text(node.name), text(node.op_type), text(node.domain), list(map(text, node.input)),
         list(map(text, node.output)), list(inner(node)))
        for node in graph.node
    ]  # fmt: skip
    if isinstance(graph, onnx.FunctionProto):
        return nodes, [], list(map(text, graph.input)), list(map(text, graph.output))
    return (
        nodes,
        [(text(tensor.name), tensor.data_type, list(tensor.dims)) for tensor in graph.initializer],
        [text(value.name) for value in graph.input],
        [text(value.name) for value in graph.output],
    )


@pytest.mark.parametrize("number", range(4))
def test_it_has_what_onnx_reads(number: int) -> None:
    model = onnx.load_from_string(random_network(number)) if number else onnx.parser.parse_model(OF_ALL_KINDS)
    outline = GraphOutline(model.SerializeToString())
    assert told(outline.graph) == expected(model.graph)
    assert list(map(told, outline.functions)) == list(map(expected, model.functions))
    assert outline.content.ir_version == model.ir_version
    assert outline.content.opsets == [(each.domain.encode(), each.version) for each in model.opset_import]


def test_attributes_types_and_shapes() -> None:
    outline = GraphOutline(onnx.parser.parse_model(OF_ALL_KINDS).SerializeToString())
    x, s, q, c = outline.graph.inputs
    assert (x, s) == (Value(b"x", [None, 3]), Value(b"s", []))
    assert (q, c) == (Value(b"q"), Value(b"c", []))
    _, constant, choice = outline.graph.nodes
    [tensor] = constant.attribute(b"value").tensors
    assert (tensor.data_type, tensor.shape) == (TensorProto.INT64, [2])
    yes, no = choice.graphs
    assert next(yes.nodes).attribute(b"size").integer == 5
    assert set(next(no.nodes).attributes) == {b"perm"}
    assert next(outline.functions[0].nodes).attribute(b"mode").text == b"nearest"
    operators = [(b"f", b"own"), *((name, b"") for name in (b"Constant", b"If", b"LRN", b"Transpose", b"Resize"))]
    assert list(outline.operators()) == operators


def test_a_large_weight_is_described_and_not_kept() -> None:
    model = onnx.parser.parse_model(
        "<ir_version: 8, opset_import: ['': 17]> g (float[n] x) => (float[n] x) { }".replace("'", '"')
    )
    array = np.ones((300, 100), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    outline = GraphOutline(model.SerializeToString())
    [weights] = outline.graph.initializers
    assert weights[:3] == (b"w", TensorProto.FLOAT, [300, 100])
    assert bytes(array[0, :2].data) not in outline.content.kept


def test_the_numbers_of_a_forest_of_trees_are_passed_over() -> None:
    """They are fields of their own, more than may be read. What comes after them is found."""
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["t"], domain="ai.onnx.ml", nodes_values=[1.0])
    model = helper.make_model(helper.make_graph([node, helper.make_node("Neg", ["t"], ["y"])], "forest", [], []))
    numbers = node.attribute.add(name="nodes_nodeids", type=onnx.AttributeProto.INTS).ints
    numbers.extend([1] * (10 * MOST_PARTS))
    node.attribute.add(name="n_targets", type=onnx.AttributeProto.INT, i=3)
    model.graph.node[0].CopyFrom(node)
    outline = GraphOutline(model.SerializeToString())
    assert list(outline.operators()) == [(b"TreeEnsembleRegressor", b"ai.onnx.ml"), (b"Neg", b"")]
    forest = next(outline.graph.nodes)
    assert forest.attribute(b"n_targets").integer == 3
    assert set(forest.attributes) == {b"nodes_values", b"nodes_nodeids", b"n_targets"}


def test_zeros_at_the_end_of_a_file_are_no_model() -> None:
    """A download that was interrupted can have its whole size."""
    data = random_network(1)
    for end in range(len(data) // 2, len(data), len(data) // 50):
        outline = GraphOutline(data[:end] + bytes(len(data) - end))
        with pytest.raises(ValueError, match="it is damaged"):
            list(outline.operators())


def test_a_damaged_model_raises_nothing_else() -> None:
    whole = onnx.load_from_string(random_network(0))
    for initializer in whole.graph.initializer:
        initializer.raw_data = initializer.raw_data[:8]  # a short file has as many places to cut as it has bytes
    data = whole.SerializeToString()
    random = np.random.default_rng(0)
    for at in range(0, len(data), 3):
        for damaged in (data[:at], data[:at] + random.bytes(2) + data[at + 2 :]):
            with contextlib.suppress(*UNREADABLE):
                told(GraphOutline(damaged).graph)


def test_a_model_of_very_many_parts_is_not_read_to_its_end() -> None:
    """Here 21 initializers have each of their 50,000 numbers in a field of its own."""
    model = onnx.load_from_string(random_network(0))
    tensor = b"\x08\x01\x10\x01" + b"\x25\x00\x00\x80\x3f" * 50_000
    with_it = model.graph.SerializeToString() + length_delimited(5, tensor) * 21
    model.ClearField("graph")
    outline = GraphOutline(model.SerializeToString() + length_delimited(7, with_it))
    with pytest.raises(ValueError, match="more fields than are to be read"):
        told(outline.graph)


def test_as_many_nodes_are_read_as_the_reader_may_read() -> None:
    node = length_delimited(1, length_delimited(4, b"Conv"))
    outline = GraphOutline(length_delimited(7, node * (MOST_PARTS + 10)))
    with pytest.raises(TooManyFieldsError, match="more nodes and initializers than are to be read"):
        list(outline.operators())
    outline.read(2 * MOST_PARTS)
    assert set(outline.operators()) == {(b"Conv", b"")}


class ReplacedAsItIsOpened(os.PathLike[str]):
    def __init__(self, path: Path, other: bytes) -> None:
        self._path, self._other, self._asked = path, other, 0

    def __fspath__(self) -> str:
        self._asked += 1
        if self._asked == 2:
            new = self._path.with_suffix(".new")
            new.write_bytes(self._other)
            new.replace(self._path)
        return str(self._path)


def test_the_outline_of_a_file_that_was_replaced_meanwhile_is_not_current(tmp_path: Path) -> None:
    """Of the file that it opens, or of the one that it asks for its time, whichever comes second."""
    path = tmp_path / "model.onnx"
    path.write_bytes(random_network(1))
    outline = GraphOutline(ReplacedAsItIsOpened(path, random_network(2)))
    read = told(outline.graph)
    assert not outline.is_current or read == told(GraphOutline(path).graph)
