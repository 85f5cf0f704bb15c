"""Inputs made up from what a session says of them, to run a model about which nothing else is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ortgpu.tensor_types import DTYPES


class InputDescription(Protocol):
    """What ``session.get_inputs()`` gives: ``type`` is ONNX Runtime's name, ``shape`` has names for free dimensions."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> Sequence[int | str | None]: ...


class UnknownInputError(ValueError):
    """No array can be made up for this kind of input."""


def batch_dimension(descriptions: Sequence[InputDescription]) -> str | None:
    """The name of the free dimension that comes first in the first input that has one, "" where it has no name.

    None: the first dimension of every input is fixed.
    """
    for description in descriptions:
        if description.shape and _is_free(description.shape[0]):
            return str(description.shape[0] or "")
    return None


def make_inputs(descriptions: Sequence[InputDescription], batch: int = 1) -> dict[str, NDArray[Any]]:
    """One array per input. Raises UnknownInputError for sequences, maps and rare types.

    The batch dimension, wherever its name stands, is ``batch`` long, every other free dimension 1.
    The values fit most models and mean nothing: floats in [0, 1), whole numbers 0 (a valid index anywhere) or 1 where
    the name says that it is a mask, True, and empty strings.
    """
    random = np.random.default_rng(0)
    name = batch_dimension(descriptions)
    return {each.name: _make(each, _shape_of(each.shape, name, batch), random) for each in descriptions}


def _is_free(size: int | str | None) -> bool:
    return not isinstance(size, int) or size < 0


def _shape_of(shape: Sequence[int | str | None], batch_name: str | None, batch: int) -> list[int]:
    """Without a name only the first dimension can be told to be the batch."""
    lengths = []
    for position, size in enumerate(shape):
        if isinstance(size, int) and not _is_free(size):
            lengths.append(size)
        else:
            named = str(size or "") == batch_name and (batch_name or position == 0)
            lengths.append(batch if named else 1)
    return lengths


def _make(description: InputDescription, shape: Sequence[int], random: np.random.Generator) -> NDArray[Any]:
    if description.type == "tensor(string)":
        return np.full(shape, "", dtype=np.object_)
    if description.type not in DTYPES:
        raise UnknownInputError(f"input {description.name!r} is a {description.type}, which cannot be made up")
    dtype = DTYPES[description.type]
    if dtype.kind == "f":
        return np.asarray(random.random(shape), dtype)
    if dtype.kind == "b" or "mask" in description.name.lower():
        return np.ones(shape, dtype)
    return np.zeros(shape, dtype)
