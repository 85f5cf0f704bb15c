"""Read the fields of protobuf messages one by one, and copy only used fields.

onnx.load reads a whole model, weights included: for a ResNet-50 that takes as long as its session. The encoding:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from .files import FileContent

Extent: TypeAlias = tuple[int, int]  # start and end

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_DAMAGED = "it is damaged, or a file of another kind"
_TOO_MANY = "more fields than are to be read"
_BITS_OF_A_VARINT = 64


class TooManyFieldsError(ValueError):
    """There are more fields than the reader may read."""


class Reader:
    """A reader of the messages in ``data``, for at most ``most`` fields and numbers in all.

    Raises:
        ValueError, IndexError: from any method: the data are no message, or are cut off.
        TooManyFieldsError: from any method: there are more than ``most`` fields.
    """

    def __init__(self, data: bytes | FileContent, most: int) -> None:
        self._data = data
        self._left = most

    def fields(self, extent: Extent | None = None) -> Iterator[tuple[int, int | None, Extent]]:
        """Yield number, value and extent of the fields at ``extent``, or of all data. Only varints have a value."""
        data = self._data
        at, end = extent if extent is not None else (0, len(data))
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise TooManyFieldsError(_TOO_MANY)
            tag = data[at]
            if tag < 0x80:  # Nearly all tags and sizes have one byte; calls for them would take a third of the time.
                at += 1
            else:
                tag, at = _varint(data, at)
            if tag < 8:  # No field has number 0. Zeros are the end of a file that was not fully written.
                raise ValueError(_DAMAGED)
            kind = tag & 7
            value, start = None, at
            if kind == _LENGTH:
                size = data[at]
                if size < 0x80:
                    start = at + 1
                else:
                    size, start = _varint(data, at)
                at = start + size
            elif kind == _VARINT:
                value, at = _varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(_DAMAGED)
            if at > end:
                raise ValueError("it is cut off, or damaged")
            yield tag >> 3, value, (start, at)

    def numbers(self, value: int | None, extent: Extent) -> list[int]:
        """Return the numbers of a repeated field: a single number, or several packed ones."""
        if value is not None:
            return [value]
        at, end = extent
        values = []
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise TooManyFieldsError(_TOO_MANY)
            number, at = _varint(self._data, at)
            values.append(number)
        return values

    def text(self, extent: Extent) -> bytes:
        start, end = extent
        return self._data[start:end]


def _varint(data: bytes | FileContent, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and the position after it."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift = byte & 0x7F, 7
    while shift < _BITS_OF_A_VARINT:
        at += 1
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
        shift += 7
    raise ValueError(_DAMAGED)
