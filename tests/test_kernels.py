"""Which operators of those that handle shapes lack CUDA kernels, asked of the installed provider.

It places each on what is no shape, in every version and on every type, over libraries of CUDA that compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgpu import data_flow, placement
from tests.lab.fixtures import Lab
from tests.lab.installed import VERSION

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
        return {"value": helper.make_tensor("value", kind, [1], [1])}, [("s", INT64, SHAPE)], {}, kind
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
        "ScatterND": [data, ("i", INT64, ["k", 1]), ("u", kind, SHAPE)],
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


PLACE = """
import sys
from pathlib import Path
import onnxruntime
from ortgpu import preload
from ortgpu.placement import read_placement
from ortgpu.session_options import recording_options
preload()
onnxruntime.set_default_logger_severity(4)
on_gpu, on_cpu = [], []
for path in Path(sys.argv[1]).iterdir():
    try:
        providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(path, recording_options(), providers=providers)
    except Exception:
        continue  # a type that the operator does not take, or that no provider has a kernel for
    assert session.get_providers() == providers
    nodes = read_placement(session).nodes
    (on_gpu if all(node.provider == providers[0] for node in nodes) else on_cpu).append(path.stem)
report([sorted(on_gpu), sorted(on_cpu)])
"""


def test_which_operators_lack_kernels(lab: Lab, provider_library: str, tmp_path: Path) -> None:
    for name, content in models():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    machine = lab.machine_that_places(provider_library)
    on_gpu, on_cpu = machine.run(PLACE, argv=[str(tmp_path)], timeout=100).ok().json
    assert {name.partition(" ")[0] for name in on_gpu} == placement._SHAPE_OPERATORS - NOT_TRIED
    lacking = {name.partition(" ")[0] for name in on_cpu}
    release = tuple(map(int, str(VERSION).split(".")[:2]))
    may = data_flow.may_compute
    assert {name for name in lacking if not may([name], release)} == set(), on_cpu
    if not may([], release):  # else every operator is looked at
        assert lacking == data_flow._LACKING
