"""One small model for each operator that is said to need no cuDNN, with something to feed it."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

ROWS, COLUMNS = 33, 70

_random = np.random.default_rng(5)
_SIGNED: Any = _random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
_OTHER: Any = _random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
_POSITIVE: Any = np.abs(_SIGNED) + np.float32(0.1)
_WEIGHTS: Any = _random.standard_normal((COLUMNS, 40)).astype(np.float32)
_TRUTH = _SIGNED > 0
_ROW_NUMBERS = np.array([4, 0, 32, 7])


def _whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


_UNARY = [
    name
    for line in (
        "Relu LeakyRelu ThresholdedRelu Elu Selu Gelu Sigmoid HardSigmoid HardSwish Tanh Softplus Softsign Erf",
        "Neg Abs Exp Sin Cos Floor Ceil Round Sign Identity Flatten Transpose Shape",
    )
    for name in line.split(" ")
]

# Operator: what it takes, as a caller gives it, its constants, and its attributes
CASES: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    **{name: ([_SIGNED], [], {}) for name in _UNARY},
    **{name: ([_POSITIVE], [], {}) for name in ("Reciprocal", "Sqrt", "Log")},
    **{name: ([_SIGNED, _POSITIVE], [], {}) for name in ("Add", "Sub", "Mul", "Div", "PRelu")},
    **{
        name: ([_SIGNED, _OTHER], [], {})
        for name in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
    },
    **{name: ([_TRUTH, _OTHER > 0], [], {}) for name in ("And", "Or", "Xor")},
    "Not": ([_TRUTH], [], {}),
    "Where": ([_TRUTH, _SIGNED, _OTHER], [], {}),
    "Clip": ([_SIGNED], [np.float32(-0.5), np.float32(0.5)], {}),
    "MatMul": ([_SIGNED], [_WEIGHTS], {}),
    "Gemm": ([_SIGNED], [_WEIGHTS, _WEIGHTS[0]], {"alpha": 0.5}),
    "Reshape": ([_SIGNED], [_whole(COLUMNS, -1)], {}),
    "Squeeze": ([_SIGNED[:, None]], [_whole(1)], {}),
    "Unsqueeze": ([_SIGNED], [_whole(1)], {}),
    "Concat": ([_SIGNED, _OTHER], [], {"axis": 1}),
    "Split": ([_SIGNED], [_whole(30, 40)], {"axis": 1}),
    "Slice": ([_SIGNED], [_whole(2), _whole(-3), _whole(1), _whole(5)], {}),
    "Gather": ([_SIGNED, _ROW_NUMBERS], [], {"axis": 0}),
    "Expand": ([_SIGNED[:, None]], [_whole(ROWS, 3, COLUMNS)], {}),
    "Tile": ([_SIGNED], [_whole(2, 3)], {}),
    "Cast": ([_SIGNED], [], {"to": TensorProto.FLOAT16}),
    "Constant": ([], [], {"value": numpy_helper.from_array(_SIGNED)}),
    "ConstantOfShape": ([_whole(ROWS, 3)], [], {"value": numpy_helper.from_array(_SIGNED[0, :1])}),
}  # fmt: skip


def model_of(operator: str, *, domain: str = "") -> tuple[bytes, dict[str, Any]]:
    """The model, and what to feed it."""
    given, constants, attributes = CASES[operator]
    feed = {f"x{number}": array for number, array in enumerate(given)}
    weights = {f"c{number}": array for number, array in enumerate(constants)}
    outputs = [f"y{number}" for number in range(2 if operator == "Split" else 1)]
    node = helper.make_node(operator, [*feed, *weights], outputs, domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feed.items()
    ]
    graph = helper.make_graph(
        [node],
        operator,
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    domains = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model: bytes = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
    return model, feed
