"""Models whose large weights ONNX Runtime takes from where they are, past its parser.

To parse a file is to copy every weight in pieces of a few KiB, and once more into a tensor; on the way to the GPU each
is read a third time. Given the structure of a model as bytes, and tensors in the place of its large weights, which are
the file as the system maps it, ONNX Runtime copies each weight once, to the GPU or into memory of its own: a ResNet-50
opens on an H200 in 0.7 of the time. Nothing is read of the file when the session is made. The mapping ends with it,
since it holds the tensors (Graph::InjectExternalInitializedTensors in graph.cc).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime

from . import dlpack
from .model_structure import Model, MovedTensor, open_model, with_values_elsewhere
from .models import LARGEST, is_ort_format
from .runtime import load_runtime
from .session_options import recording_options
from .signal_handlers import is_of_a_handler

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RELEASES = ((1, 31),)  # in which nothing was read afterwards; a test shows whether that is so in another one
_FEWEST_BYTES = 8 << 20  # of a model: below, there is little to gain
_LARGE = 64 << 10  # bytes of an initializer
_MADV_POPULATE_READ = 22  # of <linux/mman.h>, since Linux 5.14

# By TensorProto.DataType, those that NumPy has and hands over
_DTYPES = {
    number: np.dtype(kind)
    for number, kind in {
        1: "f4", 2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 10: "f2", 11: "f8", 12: "u4", 13: "u8",
    }.items()
}  # fmt: skip


class Weights(NamedTuple):
    """What one session is to be made with; of no use afterwards."""

    structure: bytes
    options: Any


def weights_in_place(model: Model) -> Weights | None:
    """None for a model that gains nothing by it, has external data already, or is none: ONNX Runtime says what is
    wrong with it.

    Raises:
        Exception: what a handler of a signal raised meanwhile.
    """
    try:
        content = _content(model)
        found = None if content is None else with_values_elsewhere(content, _LARGE, _DTYPES.keys())
        return None if content is None or found is None else _with_values(content, *found)
    except Exception as error:  # whatever it is, memory that is wanting too: ONNX Runtime has a way of its own
        if is_of_a_handler(error):
            raise
        return None


def _with_values(content: bytes | mmap.mmap, structure: bytes, moved: Sequence[MovedTensor]) -> Weights:
    buffer = _writable(content)
    options = recording_options()
    # What ONNX Runtime holds of a tensor by this way holds the array, and that the mapping
    values = [dlpack.native_value(_array(buffer, tensor).__dlpack__(), is_bool=False) for tensor in moved]
    names = [tensor.name.decode() for tensor in moved]
    options.add_external_initializers(names, [onnxruntime.OrtValue(value) for value in values])
    return Weights(structure, options)


def _content(model: Model) -> bytes | mmap.mmap | None:
    # Elsewhere than on Linux it was not tried
    if sys.platform != "linux" or load_runtime().release not in _RELEASES or is_ort_format(model):
        return None
    if isinstance(model, bytes):
        return model if len(model) >= _FEWEST_BYTES else None
    with open_model(os.fspath(model)) as file:
        if not _FEWEST_BYTES <= os.fstat(file.fileno()).st_size < LARGEST:
            return None
        # Writable, or NumPy hands nothing over; the file stays as it is
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _read_all(content)
    return content


def _read_all(content: mmap.mmap) -> None:
    """All pages at once: one by one takes longer. Without the interpreter lock, which mmap's own method keeps: a disk
    may take seconds.

    Raises:
        OSError: they cannot be read. Whoever looked at such a page would end the process.
    """
    populate = ctypes.CDLL(None, use_errno=True).madvise
    populate.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    address = np.frombuffer(content, np.uint8).ctypes.data
    if populate(address, len(content), _MADV_POPULATE_READ) and ctypes.get_errno() != errno.EINVAL:  # older Linux
        raise OSError(ctypes.get_errno(), "a file that cannot be mapped")


def _writable(content: bytes | mmap.mmap) -> Any:
    """Something that has the memory of ``content``, and keeps it. Nobody writes there."""
    if not isinstance(content, bytes):
        return content
    address = np.frombuffer(content, np.uint8).ctypes.data
    buffer = (ctypes.c_ubyte * len(content)).from_address(address)
    buffer.owner = content  # type: ignore[attr-defined]  # instances of ctypes have attributes of anyone's
    return buffer


def _array(buffer: Any, tensor: MovedTensor) -> NDArray[Any]:
    dtype = _DTYPES[tensor.data_type]
    start, end = tensor.values
    count, rest = divmod(end - start, dtype.itemsize)
    if rest:
        raise ValueError("a part of a number")
    return np.frombuffer(buffer, dtype, count, start).reshape(tensor.shape)
