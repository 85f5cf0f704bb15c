"""Inputs that are made up from the declarations of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.running.made_inputs import UnknownInputError, batch_dimension, make_inputs


def value(name: str, shape: list[Any], kind: str = "tensor(float)") -> Any:
    return SimpleNamespace(name=name, type=kind, shape=shape)


def shapes(values: list[Any], batch: int) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in make_inputs(values, batch).items()}


def test_the_batch_is_as_long_wherever_its_name_is() -> None:
    inputs = [value("a", ["n", 3, "w"]), value("b", [2, "n"]), value("c", ["m"]), value("d", [])]
    assert shapes(inputs, 8) == {"a": (8, 3, 1), "b": (2, 8), "c": (1,), "d": ()}
    assert batch_dimension(inputs) == "n"


@pytest.mark.parametrize("free", [None, "", -1])
def test_a_batch_without_a_name_is_the_first_axis(free: Any) -> None:
    inputs = [value("a", [free, 3, free]), value("b", [4, free])]
    expected = "-1" if free == -1 else ""
    assert batch_dimension(inputs) == expected
    if free != -1:
        assert shapes(inputs, 8) == {"a": (8, 3, 1), "b": (4, 1)}


def test_without_a_free_first_axis_there_is_no_batch() -> None:
    assert batch_dimension([value("a", [3, "n"]), value("b", [])]) is None
    assert shapes([value("a", [3, "n"])], 8) == {"a": (3, 1)}


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("ids", "tensor(int64)", 0),
        ("attention_mask", "tensor(int64)", 1),
        ("lengths", "tensor(int32)", 1),
        ("seq_len", "tensor(int32)", 1),
        ("flag", "tensor(bool)", True),
        ("text", "tensor(string)", ""),
    ],
)
def test_values_suit_the_name_and_the_type(name: str, kind: str, expected: Any) -> None:
    array = make_inputs([value(name, ["n", 2], kind)], 3)[name]
    assert array.shape == (3, 2)
    assert array.tolist() == [[expected] * 2] * 3


@pytest.mark.parametrize(("kind", "dtype"), [("float16", np.float16), ("float", np.float32), ("double", np.float64)])
def test_floats_differ_and_are_the_same_each_time(kind: str, dtype: Any) -> None:
    first, second = (make_inputs([value("x", [100], f"tensor({kind})")])["x"] for _ in range(2))
    assert first.dtype == dtype
    np.testing.assert_array_equal(first, second)
    assert 0 <= first.min() < first.max() <= 1


def test_what_cannot_be_made_up_is_said_so() -> None:
    with pytest.raises(UnknownInputError, match="is a seq"):
        make_inputs([value("x", [], "seq(tensor(float))")])
    with pytest.raises(UnknownInputError, match=r"'large' of 2 x 1073741824 would take 8\.0 GiB"):
        make_inputs([value("small", [1]), value("large", ["n", 1 << 30])], 2)
