"""Whether the results of two sessions of a model agree."""

from __future__ import annotations

from typing import Any

import numpy as np

# Part of the largest value. The algorithms of cuDNN differ by rounding, and a search by time may choose other ones.
_TOLERANCE = 1e-2


def agree(found: Any, expected: Any) -> bool:
    """Return True if results are equal, or floats that differ by rounding. NaN equals NaN."""
    return len(found) == len(expected) and all(map(_agree, found, expected))


def _agree(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_agree(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return agree(found, expected)
    if hasattr(expected, "numpy"):  # an OrtValue
        found, expected = found.numpy(), expected.numpy()
    if not isinstance(expected, np.ndarray):
        return bool(found == expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.dtype.kind != "f":
        return bool((found == expected).all())
    is_finite = np.isfinite(expected)
    if not np.array_equal(found[~is_finite], expected[~is_finite], equal_nan=True):
        return False
    wide, exact = found[is_finite].astype(np.float64), expected[is_finite].astype(np.float64)
    largest = float(np.abs(exact).max(initial=0.0))
    return bool(np.abs(wide - exact).max(initial=0.0) <= _TOLERANCE * largest)  # False for NaN and inf
