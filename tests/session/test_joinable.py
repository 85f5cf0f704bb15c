"""Which models batched() takes: none whose items depend on each other, and all whose items do not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from ortgpu.errors import ProviderRequestError
from ortgpu.session.pool import joinable


def judged(text: str, count: int = 16) -> str:
    """Return "accepted", or the summary of the refusal."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> m {text}').SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(feed: Any) -> Any:
        return session.run(None, dict(feed))

    try:
        joinable.refuse_known(model)
        feed = joinable.example(session.get_inputs(), None, count)
        joinable.check(run, feed, [each.name for each in session.get_outputs()], made_up=True)
    except ProviderRequestError as error:
        return error.summary
    return "accepted"


REDUCTIONS = (
    "z = ReduceMax<keepdims=0>(x)",
    "z = ReduceMin<keepdims=0>(x)",
    "z = ReduceMean<keepdims=0>(x)",
    "z = ReduceL2<keepdims=0>(x)",
    "z = ReduceLogSumExp<keepdims=0>(x)",
    "a = Abs(x)  z = ReduceMax<keepdims=0>(a)",
    "n = IsNaN(x)  c = Cast<to=1>(n)  s = ReduceSum<keepdims=0>(c)  z = Add(s, one)",
)
USES = (
    "y = Div(x, z)",
    "y = Sub(x, z)",
    "g = Greater(z, limit)  f = Where(g, many, one)  y = Div(x, f)",
    "t = Mul(z, little)  y = Add(x, t)",
)
SHAPES = ("4", "16", "64", "3, 8, 8")
CONSTANTS = "<float one = {1}, float limit = {1.0001}, float many = {255}, float little = {0.001}>"


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_model_whose_items_depend_on_each_other_is_taken(reduction: str) -> None:
    taken = [
        (use, shape)
        for use, shape in itertools.product(USES, SHAPES)
        if judged(f"(float[n, {shape}] x) => (float[n, {shape}] y) {CONSTANTS} {{ {reduction}  {use} }}") == "accepted"
    ]
    assert taken == []


@pytest.mark.parametrize(
    "text",
    [
        "(uint8[n, 8] x) => (float[n, 8] y) <float one = {1}, float many = {255}, uint8 limit = {1}>"
        " { z = ReduceMax<keepdims=0>(x)  g = Greater(z, limit)  s = Where(g, many, one)  f = Cast<to=1>(x)"
        " y = Div(f, s) }",
        "(float[n, 8] x) => (float[n, 8] y) <float little = {0}> { z = ReduceMin<keepdims=0>(x)  l = Less(z, little)"
        " f = Cast<to=1>(l)  y = Add(x, f) }",
        "(float[n, 8] x) => (float[n, 8] y) <float far = {-900}> { z = ReduceMin<keepdims=0>(x)  l = Less(z, far)"
        " f = Cast<to=1>(l)  y = Add(x, f) }",
        "(int16[n, 8] x) => (float[n, 8] y) <float little = {0.00001}> { f = Cast<to=1>(x)  a = Abs(f)"
        " z = ReduceMax<keepdims=0>(a)  s = Add(z, little)  y = Div(f, s) }",
        "(uint16[n, 8] x) => (float[n, 8] y) <float limit = {255}, float many = {65535}> { f = Cast<to=1>(x)"
        " z = ReduceMax<keepdims=0>(f)  g = Greater(z, limit)  s = Where(g, many, limit)  y = Div(f, s) }",
        "(float[n, 8] x) => (uint8[n, 8] q) { q, s, z = DynamicQuantizeLinear(x) }",
    ],
    ids=["bytes", "one below zero", "one far below zero", "sound", "depth", "quantised"],
)
def test_what_shows_in_extremes_only_is_refused(text: str) -> None:
    assert judged(text) != "accepted"


def test_operators_with_one_scale_are_known_by_name() -> None:
    text = """(int64[n, 2] x) => (float[n, 2, 1] y) <float[3, 1] t = {0.1, 0.2, 0.3}> {
        e = Gather(t, x)  q, s, z = DynamicQuantizeLinear(e)  y = DequantizeLinear(q, s, z) }"""
    assert "DynamicQuantizeLinear of this model takes one scale for all items" in judged(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(float[16, 4] x) => (float[16, 4] y) { y = Relu(x) }", "input 'x' has a first axis of 16, which is not free"),
        (
            "(float[n, 4] x) => (float[n, 4] y, float[2] z) <float[2] c = {1, 2}> { y = Relu(x)  z = Neg(c) }",
            "output 'z' of 16 items has the shape (2,)",
        ),
        (
            "(float[n, 4] x) => (float[n, 4] y, float z) <float c = {1}> { y = Relu(x)  z = Neg(c) }",
            "output 'z' of 16 items has the shape ()",
        ),
    ],
    ids=["input", "output", "scalar output"],
)
def test_a_model_whose_first_axes_count_no_items_is_refused_by_name(text: str, says: str) -> None:
    assert says in judged(text)


def test_a_model_that_gives_all_items_the_same_outputs_shows_nothing() -> None:
    same = judged("(float[n, 4] x) => (bool[n, 4] y) { y = Equal(x, x) }")
    assert "every item gave the same outputs" in same


HEALTHY = {
    "relu": "(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }",
    "reciprocal": "(float[n, 4] x) => (float[n, 4] y) { y = Reciprocal(x) }",
    "softmax": "(float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis=-1>(x) }",
    "own extremes": "(float[n, 4] x) => (float[n, 4] y) <int64[1] a = {1}>"
    " { m = ReduceMax<axes=[1]>(x)  y = Div(x, m) }",
    "best": "(float[n, 4] x) => (int64[n] y) { y = ArgMax<axis=1, keepdims=0>(x) }",
    "product": "(float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }",
    "convolution": "(float[n, 1, 5, 5] x) => (float[n, 1, 3, 3] y)"
    " <float[1, 1, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { y = Conv(x, w) }",
    "pooling": "(float[n, 2, 4, 4] x) => (float[n, 2, 1, 1] y) { y = GlobalAveragePool(x) }",
    "indices": "(int64[n, 2] x) => (float[n, 2] y) <float[3] t = {1, 2, 3}> { y = Gather(t, x) }",
    "half": "(float16[n, 4] x) => (float16[n, 4] y) { y = Exp(x) }",
    "attention": "(float[n, 3, 4] x) => (float[n, 3, 4] y) { t = Transpose<perm=[0, 2, 1]>(x)  s = MatMul(x, t)"
    " p = Softmax<axis=-1>(s)  y = MatMul(p, x) }",
    "flags": "(bool[n, 4] x) => (bool[n, 4] y) { y = Not(x) }",
    "bytes": "(uint8[n, 4] x) => (float[n, 4] y) { y = Cast<to=1>(x) }",
    "sound": "(int16[n, 4] x) => (float[n, 4] y) { y = Cast<to=1>(x) }",
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("count", [2, 7, 64])
def test_models_of_independent_items_are_taken(name: str, count: int) -> None:
    found = judged(HEALTHY[name], count)
    assert found == "accepted" or (name in ("flags", "best") and "every item gave the same outputs" in found)


def test_neighbours_keep_integers_in_their_range() -> None:
    feed: dict[str, Any] = {"x": np.arange(10, dtype=np.int64).reshape(5, 2), "m": np.ones((5, 1), np.float32)}
    for change in range(5):
        neighbours = joinable._changed(feed, change, np.arange(5) % 2 == 1)
        assert 0 <= neighbours["x"].min() <= neighbours["x"].max() <= 9
        assert (neighbours["x"][::2] == feed["x"][::2]).all()
