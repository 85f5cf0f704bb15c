"""Makes up inputs from a model's declarations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..model.tensor_types import DTYPES

if TYPE_CHECKING:
    from ..provider.interfaces import Value

_ONES = re.compile(r"mask|length|(?<![a-z])lens?(?![a-z])")  # Zeros make many models compute NaN or fail.
_MOST_BYTES = 4 << 30  # the limit of all made-up inputs together


class UnknownInputError(ValueError):
    """No array can be made up for this kind of input."""


def batch_dimension(descriptions: Sequence[Value]) -> str | None:
    """Return the name of the first free first dimension, "" if it has none. None if there is no such dimension."""
    for description in descriptions:
        if description.shape and _is_free(description.shape[0]):
            return str(description.shape[0] or "")
    return None


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an input. A sequence or a map has an empty shape, as in ONNX Runtime."""
    return value.shape if isinstance(value, np.ndarray) else ()


def make_inputs(descriptions: Sequence[Value], batch: int = 1) -> dict[str, NDArray[Any]]:
    """Make up an array for each input.

    The batch dimension has the length ``batch`` wherever its name appears; all other free dimensions are 1. The values
    suit most models: floats in [0, 1), True, empty strings, and integers 0, because 0 is a valid index. Integers are 1
    if the name suggests a mask or a sequence length.

    Raises:
        UnknownInputError: an input is a sequence, a map or of a rare type, or all need more than 4 GiB.
    """
    random = np.random.default_rng(0)
    batch_name = batch_dimension(descriptions)
    shapes = {description.name: _shape_of(description.shape, batch_name, batch) for description in descriptions}
    dtypes = {description.name: DTYPES.get(description.type, np.dtype(object)) for description in descriptions}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    if sum(sizes.values()) > _MOST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        shape = " x ".join(map(str, shapes[largest]))
        raise UnknownInputError(
            f"input {largest!r} of {shape} would take {sizes[largest] / (1 << 30):.1f} GiB, and cannot be made up"
        )
    return {description.name: _make(description, shapes[description.name], random) for description in descriptions}


def _is_free(size: int | str | None) -> bool:
    return not isinstance(size, int) or size < 0


def _shape_of(shape: Sequence[int | str | None], batch_name: str | None, batch: int) -> list[int]:
    """Return the shape of an input. A batch dimension without a name is recognised only in the first place."""
    lengths = []
    for position, size in enumerate(shape):
        if isinstance(size, int) and not _is_free(size):
            lengths.append(size)
        else:
            is_batch = str(size or "") == batch_name and (batch_name or position == 0)
            lengths.append(batch if is_batch else 1)
    return lengths


def _make(description: Value, shape: Sequence[int], random: np.random.Generator) -> NDArray[Any]:
    if description.type == "tensor(string)":
        return np.full(shape, "", dtype=np.object_)
    if description.type not in DTYPES:
        raise UnknownInputError(f"input {description.name!r} is a {description.type}, which cannot be made up")
    dtype = DTYPES[description.type]
    if dtype.kind == "f":
        return np.asarray(random.random(shape, np.float64 if dtype.itemsize == 8 else np.float32), dtype)
    if dtype.kind == "b" or _ONES.search(description.name.lower()):
        return np.ones(shape, dtype)
    return np.zeros(shape, dtype)
