"""Compare results with the CPU's float32 results. Plain ONNX Runtime's distance from these sets the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Both are relative to the largest value of an output. A sum in another order stays below them: 4e-3 is four units in
# the last place of float16.
_FLOOR, _FLOOR_OF_FLOAT16 = 1e-5, 4e-3
# This limit is for models with float16 inside, and for comparisons with plain ONNX Runtime when the CPU takes too long.
# TF32 and float16 keep 10 bits, and the errors of layers add up: thirty layers stayed below this limit.
TOLERANCE = 2e-2
_TIMES_PLAIN = 2


class Comparison:
    """A comparison of results with the right ones: the CPU's in float32, or plain ONNX Runtime's if there are none.

    ``tolerance`` is the least allowed distance, even if plain ONNX Runtime's distance is small.

    Attributes:
        error: the largest distance of a result, relative to the largest value of the output. None: a result has another
            shape or type or is not finite, and so has no distance.
        wrong: the first fault of the results; None if there is none.
    """

    def __init__(
        self, names: Sequence[str], right: Sequence[Any] | None, plain: Sequence[Any], tolerance: float | None = None
    ) -> None:
        self._names, self._plain = names, plain
        self._right = plain if right is None else right
        self._tolerance = TOLERANCE if right is None and tolerance is None else tolerance
        self._accepted: list[bytes | None] = []
        self.error: float | None = 0.0
        self.wrong: str | None = None

    def add_all(self, several: Sequence[Sequence[Any]]) -> None:
        """Compare the results of runs up to the first wrong one. Exact copies of accepted results are skipped."""
        for outputs in several:
            bits = [
                output.tobytes() if isinstance(output, np.ndarray) and output.dtype != object else None
                for output in outputs
            ]
            if bits == self._accepted and None not in bits:
                continue
            for name, right, plain, other in zip(self._names, self._right, self._plain, outputs, strict=True):
                distance, wrong = compare(right, plain, other, self._tolerance)
                self.error = None if self.error is None or distance is None else max(self.error, distance)
                if wrong is not None:
                    self.wrong = self.wrong or f"output {name!r} {wrong}"
                    return
            self._accepted = bits


def compare(right: Any, plain: Any, found: Any, tolerance: float | None = None) -> tuple[float | None, str | None]:
    """Return the distance of a result from the right one, or None, and the fault of the result, or None.

    The distance of floats may be twice plain ONNX Runtime's. Other values must equal the right ones, except where plain
    ONNX Runtime's do not.
    """
    if not all(isinstance(array, np.ndarray) for array in (right, plain, found)):
        return 0.0, None if repr(right) == repr(found) else "is not a tensor, and differs"
    if (found.shape, found.dtype) != (plain.shape, plain.dtype):
        return None, f"has shape {found.shape} and type {found.dtype}, not {plain.shape} and {plain.dtype}"
    if right.shape != plain.shape:
        return compare(plain, plain, found, TOLERANCE if tolerance is None else tolerance)
    if plain.dtype.kind != "f":
        wrong = int(np.count_nonzero((found != right) & (plain == right)))
        return float(wrong > 0), f"differs in {wrong} of {plain.size} values" if wrong else None
    usual = np.isfinite(right) & np.isfinite(plain)
    odd = ~usual & ~_same(found, plain) & ~_same(found, right)
    if odd.any() or not np.isfinite(found[usual]).all():
        return None, "contains inf or NaN that plain ONNX Runtime's does not"
    floor = max(_FLOOR_OF_FLOAT16 if plain.dtype.itemsize == 2 else _FLOOR, tolerance or 0)
    right, plain, found = (array[usual].astype(np.float64) for array in (right, plain, found))
    theirs, ours = _distances(right, plain), _distances(right, found)
    for kind, their, our in zip(("", " typically"), theirs, ours, strict=True):
        allowed = max(_TIMES_PLAIN * their, floor)
        if our > allowed:
            return ours[0], f"is{kind} off by {our:.2g} of its largest value (limit {allowed:.2g})"
    return ours[0], None


def _same(one: Any, other: Any) -> Any:
    return (one == other) | (np.isnan(one) & np.isnan(other))


def _distances(right: Any, found: Any) -> tuple[float, float]:
    """Return the largest and the typical (root mean square) difference, relative to the largest value."""
    if not right.size:
        return 0.0, 0.0
    scale = float(np.abs(right).max()) or 1.0
    difference = np.abs(right - found)
    return float(difference.max()) / scale, float(np.sqrt(np.mean(difference**2))) / scale
