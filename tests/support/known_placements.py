"""Models whose placement is known: what ONNX Runtime keeps on the CPU in them, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, UINT8, STRING, BOOL = (
    TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.STRING, TensorProto.BOOL,
)  # fmt: skip


def _model(
    nodes: Sequence[Any],
    inputs: Sequence[tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[tuple[str, int]],
    initializers: dict[str, Any] | None = None,
    opset: int = 17,
) -> bytes:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [value(name, kind, list(shape)) for name, kind, shape in inputs],
        [value(name, kind, None) for name, kind in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (initializers or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return data


def all_on_cuda() -> bytes:
    return _model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
            helper.make_node("Erf", ["h"], ["r"], name="second"),
            helper.make_node("MatMul", ["r", "w"], ["y"], name="third"),
        ],
        [("x", FLOAT, [2, 8])],
        [("y", FLOAT)],
        {"w": np.ones((8, 8), np.float32)},
    )


def island() -> bytes:
    """GlobalLpPool, which has no CUDA kernel in any release, between operators that have one."""
    return _model(
        [
            helper.make_node("Neg", ["x"], ["a"], name="before"),
            helper.make_node("GlobalLpPool", ["a"], ["b"], name="island"),
            helper.make_node("Neg", ["b"], ["y"], name="after"),
        ],
        [("x", FLOAT, [1, 3, 8, 8])],
        [("y", FLOAT)],
    )


def strings() -> bytes:
    """Concat has a CUDA kernel, and none for strings."""
    return _model(
        [
            helper.make_node("Concat", ["x", "x"], ["y"], axis=0, name="join"),
            helper.make_node(
                "LabelEncoder",
                ["y"],
                ["z"],
                domain="ai.onnx.ml",
                keys_strings=["A", "B"],
                values_int64s=[1, 2],
                name="label",
            ),
        ],
        [("x", STRING, [2])],
        [("z", INT64)],
    )


def shapes() -> bytes:
    """x reshaped to half of its elements by two: everything but the Reshape only handles the shape."""
    return _model(
        [
            helper.make_node("Shape", ["x"], ["s"], name="shape"),
            helper.make_node("Gather", ["s", "zero"], ["n"], axis=0, name="rows"),
            helper.make_node("Mul", ["n", "two"], ["m"], name="twice"),
            helper.make_node("Unsqueeze", ["m", "axes"], ["u"], name="unsqueeze"),
            helper.make_node("Concat", ["u", "rest"], ["t"], axis=0, name="target"),
            helper.make_node("Reshape", ["x", "t"], ["r"], name="reshape"),
            helper.make_node("Relu", ["r"], ["y"], name="relu"),
        ],
        [("x", FLOAT, ["n", 8])],
        [("y", FLOAT)],
        {
            "zero": np.int64(0),
            "two": np.int64(2),
            "axes": np.array([0], np.int64),
            "rest": np.array([-1], np.int64),
        },
    )


def control_flow() -> bytes:
    """If on a computed condition, with a branch that has an island."""

    def branch(name: str, nodes: Sequence[Any]) -> Any:
        return helper.make_graph(list(nodes), name, [], [helper.make_tensor_value_info(f"{name}_y", FLOAT, None)])

    yes = branch("yes", [helper.make_node("GlobalLpPool", ["x"], ["yes_y"], name="in branch")])
    no = branch("no", [helper.make_node("GlobalAveragePool", ["x"], ["no_y"], name="other branch")])
    return _model(
        [
            helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0, name="total"),
            helper.make_node("Greater", ["total", "limit"], ["large"], name="large"),
            helper.make_node("If", ["large"], ["y"], then_branch=yes, else_branch=no, name="choose"),
        ],
        [("x", FLOAT, [1, 3, 8, 8])],
        [("y", FLOAT)],
        {"limit": np.float32(0)},
    )


def int8() -> bytes:
    """ConvInteger has no CUDA kernel; the Cast and Mul behind it have."""
    return _model(
        [
            helper.make_node("ConvInteger", ["x", "w"], ["c"], name="convolution"),
            helper.make_node("Cast", ["c"], ["f"], to=FLOAT, name="cast"),
            helper.make_node("Mul", ["f", "scale"], ["y"], name="scale"),
        ],
        [("x", UINT8, [1, 3, 8, 8])],
        [("y", FLOAT)],
        {"w": np.ones((4, 3, 3, 3), np.uint8), "scale": np.float32(0.5)},
    )


def mask() -> bytes:
    """Greater has CUDA kernels, and none for uint8; where it handles shapes it belongs on the CPU."""
    return _model(
        [
            helper.make_node("Greater", ["x", "limit"], ["large"], name="compare"),
            helper.make_node("Cast", ["large"], ["f"], to=FLOAT, name="cast"),
            helper.make_node("Neg", ["f"], ["y"], name="negative"),
        ],
        [("x", UINT8, [1, 3, 8, 8])],
        [("y", FLOAT)],
        {"limit": np.uint8(127)},
    )


def alone(op_type: str, opset: int) -> bytes:
    """One operator, in the version that it has in that opset."""
    return _model(
        [helper.make_node(op_type, ["x"], ["y"], name="alone")], [("x", FLOAT, [1, 4])], [("y", FLOAT)], opset=opset
    )


# Opset 22 gave these a new version, for the sake of bfloat16 alone. Of some, ONNX Runtime's page of kernels
# (docs/OperatorKernels.md) names the version before as the last one that has a CUDA kernel: Cos 7, Elu 6.
RENEWED_IN_22 = ("Cos", "Elu", "Sin", "Selu", "Softplus", "Softsign", "ThresholdedRelu", "HardSigmoid")

MODELS: dict[str, Callable[[], bytes]] = {
    "all_on_cuda": all_on_cuda,
    "island": island,
    "strings": strings,
    "shapes": shapes,
    "control_flow": control_flow,
    "int8": int8,
    "mask": mask,
}

FEEDS: dict[str, Callable[[], dict[str, Any]]] = {
    "all_on_cuda": lambda: {"x": np.ones((2, 8), np.float32)},
    "island": lambda: {"x": np.ones((1, 3, 8, 8), np.float32)},
    "strings": lambda: {"x": np.array(["A", "B"], dtype=object)},
    "shapes": lambda: {"x": np.ones((4, 8), np.float32)},
    "control_flow": lambda: {"x": np.ones((1, 3, 8, 8), np.float32)},
    "int8": lambda: {"x": np.ones((1, 3, 8, 8), np.uint8)},
    "mask": lambda: {"x": np.ones((1, 3, 8, 8), np.uint8)},
}
