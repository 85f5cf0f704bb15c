"""Whether the results of two sessions of a model agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from .comparing import compare

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
    if isinstance(expected, np.ndarray) and expected.dtype.kind == "f" and not expected.any():
        return np.array_equal(found, expected)  # Zeros have no largest value.
    return compare(expected, expected, found, _TOLERANCE)[1] is None
