"""The conversion of a model to float16 inside, for records of ``ortgpu.tune`` that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment.child_process import ChildProcess
from ..model.files import LARGE, ModelSource, source_of
from ..process.late import late
from .runtime import load_runtime

if TYPE_CHECKING:
    import onnx
else:
    onnx = late("onnx")

_LONGEST = 120.0  # seconds for the child process, including the import of onnx


def convert_to_float16(model: ModelSource) -> bytes:
    """Return a model with float16 inside. A child process converts it, in some seconds.

    Raises ChildFailedError, or any exception of :func:`halve`.
    """
    with ChildProcess(keeps_output=True) as child:
        half: bytes = child.ask(halve, source_of(model), timeout=_LONGEST)
    return half


def halve(model: bytes | str) -> bytes:
    """Return the model with float16 inside. Its inputs and outputs stay as they are.

    Raises any exception of onnxruntime.transformers for a model that it cannot convert.
    """
    load_runtime()  # ONNX Runtime may need libraries that this call loads first.
    from onnxruntime.transformers.float16 import convert_float_to_float16

    loaded = onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(model)
    converted = convert_float_to_float16(loaded, keep_io_types=True)
    if converted.ByteSize() > LARGE:
        raise ValueError(f"the model has {converted.ByteSize()} bytes in float16, and at most {LARGE} are converted")
    return bytes(converted.SerializeToString())
