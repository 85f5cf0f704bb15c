"""The smallest models that need what a fault takes away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.parser
from onnx import TensorProto, helper

OPSET = 17
IR_VERSION = 8
_BRANCH = f"""
<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>
branch (float[4] x, bool c) => (float[4] y) {{
    y = If (c) <
        then_branch = t () => (float[4] a) {{ a = Relu(x) }},
        else_branch = e () => (float[4] b) {{ b = Neg(x) }}
    >
}}
"""


class Models:
    """Model files in ``folder``: ``relu`` needs no library, ``matmul`` cuBLAS, ``conv`` cuDNN; ``branch`` has an If."""

    def __init__(self, folder: Path) -> None:
        self.relu = _save(folder / "relu.onnx", "Relu", [4])
        self.matmul = _save(folder / "matmul.onnx", "MatMul", [4, 4], weight=[4, 4])
        self.conv = _save(folder / "conv.onnx", "Conv", [1, 1, 8, 8], weight=[1, 1, 3, 3], pads=[1, 1, 1, 1])
        self.branch = folder / "branch.onnx"
        onnx.save(onnx.parser.parse_model(_BRANCH), str(self.branch))


def _save(path: Path, operator: str, shape: list[int], weight: list[int] | None = None, **attributes: Any) -> Path:
    initializers = []
    if weight:
        size = 1
        for dimension in weight:
            size *= dimension
        initializers.append(helper.make_tensor("w", TensorProto.FLOAT, weight, [0.5] * size))
    inputs = ["x", "w"] if weight else ["x"]
    node = helper.make_node(operator, inputs, ["y"], name=f"the_{operator.lower()}", **attributes)
    graph = helper.make_graph(
        [node],
        operator,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path
