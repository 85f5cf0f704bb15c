"""When a result counts as wrong beside that of plain ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortgpu.running.comparing import Comparison, compare

RIGHT = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100)


def test_an_error_that_is_everywhere_is_worse_than_one_in_a_single_value() -> None:
    """The largest difference is the same; the root mean square tells them apart."""
    single, everywhere = RIGHT.copy(), RIGHT + np.float32(1e-3)
    single[0, 0] += np.float32(1e-3)
    assert "typically" in str(compare(RIGHT, single, everywhere)[1])
    assert compare(RIGHT, everywhere, single)[1] is None


FLOAT16 = RIGHT.astype(np.float16)
ONES = np.ones(4, np.int64)


def verdict(right: Any, plain: Any, found: Any, tolerance: float | None = None) -> str | None:
    return compare(right, plain, found, tolerance)[1]


@pytest.mark.parametrize(
    ("plain_off", "ours_off", "is_right"),
    [(0.0, 5e-6, True), (0.0, 5e-5, False), (1e-3, 1.9e-3, True), (1e-3, 2.2e-3, False), (0.1, 0.19, True)],
)
def test_floats_may_be_twice_as_far_off_as_plains(plain_off: float, ours_off: float, is_right: bool) -> None:
    plain, ours = RIGHT * np.float32(1 + plain_off), RIGHT * np.float32(1 + ours_off)
    assert (verdict(RIGHT, plain, ours) is None) is is_right


def test_half_floats_are_compared_as_such() -> None:
    assert verdict(FLOAT16, FLOAT16, FLOAT16 * np.float16(1.003)) is None
    assert verdict(FLOAT16, FLOAT16, FLOAT16 * np.float16(1.01)) is not None
    assert verdict(RIGHT, RIGHT, RIGHT * np.float32(1.003)) is not None
    assert verdict(RIGHT, RIGHT, RIGHT * np.float32(1.003), 2e-2) is None


@pytest.mark.parametrize(
    ("right", "found"),
    [
        (RIGHT, RIGHT[:5]),
        (RIGHT, RIGHT.astype(np.float64)),
        (ONES, ONES.astype(np.int32)),
        (ONES, np.array([1, 1, 1, 2])),
        (RIGHT, np.where(RIGHT > 0.5, np.nan, RIGHT).astype(np.float32)),
        (RIGHT, np.where(RIGHT > 0.5, np.inf, RIGHT).astype(np.float32)),
        (np.array([np.inf, 1], np.float32), np.array([-np.inf, 1], np.float32)),
        (np.array([np.nan, 1], np.float32), np.array([1, 1], np.float32)),
        (np.array(["a"], object), np.array(["b"], object)),
        ([1], [2]),
    ],
)
def test_what_is_otherwise_is_wrong(right: Any, found: Any) -> None:
    assert verdict(right, right, found) is not None
    assert verdict(right, right, right) is None


def test_a_wrong_value_counts_unless_plains_is_wrong_there() -> None:
    plain = np.array([1, 1, 1, 9])
    assert verdict(ONES, plain, np.array([1, 1, 1, 5])) is None
    assert verdict(ONES, plain, np.array([1, 1, 2, 9])) is not None


def test_every_output_of_every_run_is_compared() -> None:
    wrong = RIGHT + np.float32(1)
    for runs in ([[RIGHT, wrong]], [[wrong, RIGHT]], [[RIGHT, RIGHT]] * 5 + [[RIGHT, wrong]]):
        comparison = Comparison(["first", "second"], [RIGHT, RIGHT], [RIGHT, RIGHT])
        comparison.add_all(runs)
        assert comparison.wrong is not None
        assert ("second" in comparison.wrong) is (runs[-1][1] is wrong)
        assert comparison.error is not None
        assert comparison.error > 0.5
    comparison = Comparison(["first", "second"], [RIGHT, RIGHT], [RIGHT, RIGHT])
    comparison.add_all([[RIGHT, RIGHT], [RIGHT.copy(), RIGHT]])
    assert (comparison.error, comparison.wrong) == (0.0, None)


def test_without_the_cpu_plains_results_are_the_right_ones() -> None:
    comparison = Comparison(["y"], None, [RIGHT])
    comparison.add_all([[RIGHT * np.float32(1.01)]])
    assert comparison.wrong is None
    comparison.add_all([[RIGHT * np.float32(1.03)]])
    assert comparison.wrong is not None
