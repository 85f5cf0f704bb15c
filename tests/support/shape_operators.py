"""Models with operators of those that handle shapes, on every type, and what is known of where their nodes belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgpu.provider import placement

NEWEST = 25  # opset, which onnx has to know
TYPES = (
    *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL"),
    *("INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"),
)
NOT_TRIED = frozenset(("Constant", "If", "Loop"))

ONE_AXIS, SHAPE, SCALAR = ["n"], ["k"], list[Any]()
INT64 = TensorProto.INT64


def node(op_type: str, kind: int, opset: int) -> tuple[dict[str, Any], list[tuple[str, int, Any]], dict[str, Any], int]:
    """Attributes, inputs, initializers and the type of the output, for an operator on that type."""
    data, twice = ("x", kind, ONE_AXIS), [("x", kind, ONE_AXIS), ("y", kind, ONE_AXIS)]
    axis = {"axes": np.array([0], np.int64)}
    if op_type in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Sum", "And", "Or", "Xor"):
        return {}, twice, {}, kind
    if op_type in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        return {}, twice, {}, TensorProto.BOOL
    if op_type == "Mod":
        is_whole = "int" in TensorProto.DataType.Name(kind).lower()
        return {"fmod": int(not is_whole)}, twice, {}, kind
    if op_type in ("Shape", "Size", "NonZero"):
        return {}, [data], {}, INT64
    if op_type in ("Unsqueeze", "Squeeze"):
        return {}, [("x", kind, [1])], axis, kind
    if op_type == "Cast":
        to = TensorProto.INT32 if kind == TensorProto.FLOAT else TensorProto.FLOAT
        return {"to": to}, [data], {}, to
    if op_type == "Slice":
        return {}, [data], {"starts": np.array([0], np.int64), "ends": np.array([1], np.int64)}, kind
    if op_type == "ConstantOfShape":
        ones: Any = [b"1" if kind == TensorProto.STRING else 1]
        return {"value": helper.make_tensor("value", kind, [1], ones)}, [("s", INT64, SHAPE)], {}, kind
    if op_type == "Split":
        return {"num_outputs": 1} if opset >= 18 else {}, [data], {}, kind
    inputs: dict[str, list[tuple[str, int, Any]]] = {
        "Gather": [data, ("i", INT64, SHAPE)],
        "Reshape": [data, ("s", INT64, SHAPE)],
        "Expand": [data, ("s", INT64, SHAPE)],
        "Tile": [data, ("s", INT64, [1])],
        "Range": [(name, kind, SCALAR) for name in "xyz"],
        "Where": [("c", TensorProto.BOOL, ONE_AXIS), *twice],
        "Clip": [data, ("low", kind, SCALAR), ("high", kind, SCALAR)],
        "ScatterND": [data, ("i", INT64, [1, 1]), ("u", kind, SHAPE)],
        "ScatterElements": [data, ("i", INT64, SHAPE), ("u", kind, SHAPE)],
        "Concat": twice,
    }
    return {"axis": 0} if op_type == "Concat" else {}, inputs.get(op_type, [data]), {}, kind


def models() -> Iterator[tuple[str, bytes]]:
    newest = min(NEWEST, onnx.defs.onnx_opset_version())
    for op_type in sorted(placement._SHAPE_OPERATORS - NOT_TRIED):
        versions = {onnx.defs.get_schema(op_type, opset, "").since_version for opset in range(13, newest + 1)}
        for opset in sorted(max(13, version) for version in versions):
            for name in TYPES:
                attributes, inputs, constants, output = node(op_type, getattr(TensorProto, name), opset)
                value = helper.make_tensor_value_info
                graph = helper.make_graph(
                    [helper.make_node(op_type, [*(each[0] for each in inputs), *constants], ["out"], **attributes)],
                    "one",
                    [value(*each) for each in inputs],
                    [value("out", output, None)],
                    [numpy_helper.from_array(array, each) for each, array in constants.items()],
                )
                opsets = [helper.make_opsetid("", opset)]
                made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
                yield f"{op_type} {opset} {name}", made.SerializeToString()


# Every type that onnx has, beside shapes in a second node of the same operator, named and unnamed


BOOLEAN = ("Not", "And", "Or", "Xor")
FRACTIONS = ("Sqrt", "Exp", "Log", "Reciprocal", "Floor", "Ceil", "Round")


def beside_shapes(op_type: str, kind: int, opset: int, *, to: int | None, parts: str, name: str) -> bytes:
    """A node of an operator on data ("d"), on shapes alone ("s"), on data and what is of a shape ("m")."""
    value = helper.make_tensor_value_info
    nodes, given, outputs, constants = list[Any](), dict[str, Any](), list[Any](), list[Any]()

    def made_of_shapes(label: str, wanted: int, shape: list[Any]) -> None:
        nodes.append(helper.make_node("Size" if shape == SCALAR else "Shape", ["v"], [f"{label}_s"]))
        nodes.append(helper.make_node("Cast", [f"{label}_s"], [label], to=wanted, name=f"made {label}"))
        given["v"] = value("v", TensorProto.FLOAT, ["any"])

    for part in parts:
        on = kind
        if part == "s":
            on = TensorProto.BOOL if op_type in BOOLEAN else TensorProto.FLOAT if op_type in FRACTIONS else INT64
        attributes, inputs, arrays, gives = node(op_type, on, opset)
        if op_type == "Cast":
            gives = attributes["to"] = to if to is not None else TensorProto.FLOAT
        takes = []
        for number, (each, wanted, shape) in enumerate(inputs):
            label = f"{part}_{each}"
            takes.append(label)
            if (part == "s" and shape != [1, 1]) or (part == "m" and number == len(inputs) - 1 > 0):
                made_of_shapes(label, wanted, shape)
            else:
                given[label] = value(label, wanted, shape)
        for each, array in arrays.items():
            takes.append(f"{part}_{each}")
            constants.append(numpy_helper.from_array(array, f"{part}_{each}"))
        nodes.append(helper.make_node(op_type, takes, [f"{part}_out"], name=name and f"{name} {part}", **attributes))
        outputs.append(value(f"{part}_out", gives, None))
    graph = helper.make_graph(nodes, "beside", list(given.values()), outputs, constants)
    opsets = [helper.make_opsetid("", opset)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def models_beside_shapes() -> Iterator[tuple[str, bytes]]:
    newest = min(NEWEST, onnx.defs.onnx_opset_version())
    kinds = [kind for kind in TensorProto.DataType.values() if kind != TensorProto.UNDEFINED]
    for op_type in sorted(placement._SHAPE_OPERATORS - NOT_TRIED - {"Shape", "Size"}):
        for kind in kinds:
            for to in (None, *kinds) if op_type == "Cast" and kind in (TensorProto.FLOAT, INT64) else (None,):
                for parts, name in (("s", "named"), ("d", "named"), ("m", "named"), ("ds", "")):
                    if parts != "s" or kind == TensorProto.FLOAT or to is not None:
                        label = f"{op_type} {kind} {to} {parts} {name}".strip()
                        yield label, beside_shapes(op_type, kind, newest, to=to, parts=parts, name=name)


def misjudged(found: Mapping[str, Any]) -> list[object]:
    """Of what logged_placement.py found, in which too much or too little was said to compute on the CPU."""
    wrong, tried = list[object](), Counter[tuple[str, bool]]()
    for name, (lacking, preferred, computing, refused) in found.items():
        op_type, kind, to, parts, *named = name.split()
        if kind == str(TensorProto.STRING) and not named:
            continue  # ONNX Runtime removes that of shapes: of which the placement speaks cannot be told
        if parts == "s":
            on_data = False
        elif named:
            on_data = any(f"named {part}" in {*preferred, *(node for _, node in lacking)} for part in "dm")
        else:  # what lacks a kernel beside what lacks one when it is on shapes alone
            alone = found[f"{op_type} {TensorProto.FLOAT} {to} s named"][0]
            count = [sum(operator == op_type for operator, _ in each) for each in (lacking, alone)]
            on_data = count[0] > count[1]
        tried[parts, on_data] += 1
        if refused != on_data or any(operator != op_type for operator, _ in computing):
            wrong.append((name, lacking, preferred, computing))
    assert min(tried[parts, on_data] for parts in ("d", "m", "ds") for on_data in (False, True)) > 20, tried
    assert tried["s", False] > 90, tried
    return wrong
