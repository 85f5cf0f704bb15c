"""Which results of two sessions agree: the plans of a session serve runs only if theirs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortgpu.running.results import agree

RIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
NOT_FINITE = np.array([np.nan, np.inf, -np.inf, 1], np.float32)


def values(*numbers: float) -> Any:
    return np.array(numbers, np.float32)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (RIGHT, RIGHT.copy()),
        (RIGHT * np.float32(1.005), RIGHT),
        (RIGHT + np.float32(0.009), RIGHT),
        (NOT_FINITE, NOT_FINITE.copy()),
        (np.arange(5), np.arange(5)),
        (np.array(["a", "b"], object), np.array(["a", "b"], object)),
        ([RIGHT, RIGHT], [RIGHT, RIGHT]),
        ({1: 0.5}, {1: 0.5}),
        (onnxruntime.OrtValue.ortvalue_from_numpy(RIGHT), onnxruntime.OrtValue.ortvalue_from_numpy(RIGHT)),
        (values(), values()),
    ],
)
def test_what_is_equal_but_for_rounding_agrees(found: Any, expected: Any) -> None:
    assert agree([found], [expected])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (RIGHT + np.float32(0.02), RIGHT),
        (-RIGHT, RIGHT),
        (RIGHT.reshape(4, 3), RIGHT),
        (RIGHT[:2], RIGHT),
        (RIGHT.astype(np.float64), RIGHT),
        (np.arange(5), np.arange(5, dtype=np.int32)),
        (np.array([0, 1, 2]), np.array([0, 1, 3])),
        (np.array(["a", "c"], object), np.array(["a", "b"], object)),
        (values(1, np.nan), values(1, 1)),
        (values(1, 1), values(1, np.nan)),
        (values(1, np.inf), values(1, -np.inf)),
        (values(1, np.nan), values(1, np.inf)),
        (values(0, np.nan), values(0, 0)),
        (values(0, np.inf), values(0, 0)),
        (values(0, 5), values(0, 0)),
        (values(0, 0.009), values(0, 0)),
        ({"map": np.arange(2000)}, {"map": np.where(np.arange(2000) == 1000, 0, np.arange(2000))}),
        ([RIGHT], [RIGHT, RIGHT]),
        ({1: 0.5}, {2: 0.5}),
        ({1: 0.5}, {1: 0.6}),
        (onnxruntime.OrtValue.ortvalue_from_numpy(RIGHT), onnxruntime.OrtValue.ortvalue_from_numpy(-RIGHT)),
        ("a", "b"),
    ],
)
def test_anything_else_does_not(found: Any, expected: Any) -> None:
    assert not agree([found], [expected])
    assert not agree([RIGHT, found], [RIGHT, expected])


def test_as_many_results_as_there_are() -> None:
    assert not agree([RIGHT], [RIGHT, RIGHT])
    assert not agree([RIGHT, RIGHT], [RIGHT])
    assert agree([], [])
