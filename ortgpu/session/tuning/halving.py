"""Conversion of models to float16 inside, in a child process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...model.files import ModelSource
from ...process.late import late
from .children import LONGEST_START, Child

if TYPE_CHECKING:
    import onnx
else:
    onnx = late("onnx")

LARGE = 1 << 30  # bytes; larger models are neither converted nor inspected


def convert_to_float16(model: ModelSource) -> bytes:
    """Return a model with float16 inside. A child process converts it, in some seconds."""
    with Child() as child:
        half: bytes = child.ask(halve, source_of(model), timeout=LONGEST_START)
    return half


def source_of(model: ModelSource) -> bytes | str:
    """Return a model in a form that a child can open in any working directory."""
    return model if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))


def halve(model: bytes | str) -> bytes:
    """Return the model with float16 inside. Its inputs and outputs stay as they are.

    Raises any exception of onnxruntime.transformers for a model that it cannot convert.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    loaded = onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(model)
    converted = convert_float_to_float16(loaded, keep_io_types=True)
    if converted.ByteSize() > LARGE:
        raise ValueError(f"the model has {converted.ByteSize()} bytes in float16, and at most {LARGE} are converted")
    return bytes(converted.SerializeToString())
