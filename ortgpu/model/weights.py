"""The size of a model's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .files import ModelSource, stamp_of
from .outline import UNREADABLE, GraphOutline

# Bits of an item by TensorProto.DataType in onnx.proto. Text has no fixed size.
_BITS: Mapping[int, int] = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
    17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4,
}  # fmt: skip


def bytes_of_weights(model: ModelSource, stamp: tuple[int, ...] | None) -> int | None:
    """Return the bytes of the initialisers of the main graph in their types in the file.

    None: the model cannot be read, is in ONNX Runtime's own format, or its file has changed since ``stamp``.
    """
    if stamp_of(model) != stamp:
        return None
    return bytes_of_initializers(GraphOutline(model))


def bytes_of_initializers(outline: GraphOutline) -> int | None:
    """Return the bytes of the initialisers of the main graph. None: the model cannot be read."""
    try:
        tensors = outline.graph.initializers
        return sum(math.prod(tensor.shape) * _BITS.get(tensor.data_type, 0) // 8 for tensor in tensors)
    except UNREADABLE:
        return None
