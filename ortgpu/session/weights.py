"""Models whose large weights ONNX Runtime takes from where they are, past its parser.

To parse a file is to copy every weight in pieces of a few KiB, and once more into a tensor; on the way to the GPU each
is read a third time. Given the structure of a model as bytes, and tensors in the place of its large weights, which are
the file in memory, ONNX Runtime copies each weight once, to the GPU or into memory of its own. When the session is made
it reads nothing of them any more, and the memory is given back. The addresses stay taken as long as the session, since
it holds the tensors (Graph::InjectExternalInitializedTensors in graph.cc).

The file is read and not mapped: where a writer cuts a mapped file short, a look at it ends the process. Several threads
read it into huge pages: 102 MiB took 11 to 15 ms so, and 55 ms with one thread and small pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf

from ..model.contents import LARGEST, is_ort_format
from ..model.structure import ModelSource, MovedTensor, open_model, with_values_elsewhere
from ..process.background import Task
from ..process.signals import is_of_a_handler
from ..provider.options import recording_options
from ..provider.runtime import load_runtime
from ..running import dlpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RELEASES = ((1, 31),)  # in which nothing was read afterwards; a test shows whether that is so in another one
_FEWEST_BYTES = 8 << 20  # of a model: below, there is little to gain
_LARGE = 64 << 10  # bytes of an initializer
_READERS = 4  # threads
_PIECE = 4 << 20  # bytes that one of them reads at a time
_TICK = 0.01  # seconds, of the clock of a file system
_WRITTEN = 1e9  # bytes a second; a write of a whole file is slower only where its disk keeps it waiting

# By TensorProto.DataType, those that NumPy has and hands over
_DTYPES = {
    number: np.dtype(kind)
    for number, kind in {
        1: "f4", 2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 10: "f2", 11: "f8", 12: "u4", 13: "u8",
    }.items()
}  # fmt: skip


class Weights:
    """What sessions of one model are made with.

    Args:
        structure: the model without its large weights.
        tensors: what describes these.
        content: where they are. Nobody writes there.
    """

    def __init__(self, structure: bytes, tensors: Sequence[MovedTensor], content: bytes | mmap.mmap) -> None:
        self.structure = structure
        self._memory = None if isinstance(content, bytes) else content
        buffer = _writable(content)
        # What ONNX Runtime holds of a tensor by this way holds the array, and that the memory
        values = [dlpack.native_value(_array(buffer, tensor).__dlpack__(), is_bool=False) for tensor in tensors]
        self._values = [onnxruntime.OrtValue(value) for value in values]
        self._names = [tensor.name.decode() for tensor in tensors]

    def options(self) -> Any:
        """For one session."""
        options = recording_options()
        options.add_external_initializers(self._names, self._values)
        return options

    def give_back(self) -> None:
        """The memory, once the session is made. Of no use afterwards."""
        if self._memory is not None:
            with contextlib.suppress(OSError):  # a program may have locked all of its memory
                self._memory.madvise(mmap.MADV_DONTNEED)


def weights_in_place(model: ModelSource) -> Weights | None:
    """None for a model that gains nothing by it, has external data already, or is none: ONNX Runtime says what is
    wrong with it.

    Raises:
        InvalidProtobuf: of ONNX Runtime: the file changed while it was read.
        Exception: what a handler of a signal raised meanwhile.
    """
    try:
        content = _content(model)
        found = None if content is None else with_values_elsewhere(content, _LARGE, _DTYPES.keys())
        return None if content is None or found is None else Weights(*found, content)
    except InvalidProtobuf:
        raise
    except Exception as error:  # whatever it is, memory that is wanting too: ONNX Runtime has a way of its own
        if is_of_a_handler(error):
            raise
        return None


def _content(model: ModelSource) -> bytes | mmap.mmap | None:
    # Elsewhere than on Linux it was not tried
    if sys.platform != "linux" or load_runtime().release not in _RELEASES or is_ort_format(model):
        return None
    if isinstance(model, bytes):
        return model if len(model) >= _FEWEST_BYTES else None
    with open_model(os.fspath(model)) as file:
        before = os.fstat(file.fileno())
        if not _FEWEST_BYTES <= before.st_size < LARGEST:
            return None
        # The time of a file is set when a write begins: one that began before may still be under way
        rest = _TICK + before.st_size / _WRITTEN - abs(time.time() - before.st_mtime)
        if rest > 0:
            time.sleep(rest)
        content = _read_all(file.fileno(), before.st_size)
        after = os.fstat(file.fileno())
    if content is None or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InvalidProtobuf(
            f"Load model from {os.fspath(model)} failed: the file changed while it was read. To replace a model, write "
            "the new one to a file beside it, and rename that over the old one (os.replace)."
        )
    return content


def _read_all(file: int, size: int) -> mmap.mmap | None:
    """None: it is shorter now. The interpreter lock is free meanwhile: a disk may take seconds."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(memory)
    starts = iter(range(0, size, _PIECE))  # which the threads share
    short: list[int] = []

    def read() -> None:
        for start in starts:
            at, end = start, min(start + _PIECE, size)
            while at < end:
                count = os.preadv(file, [whole[at:end]], at)
                if not count:
                    short.append(at)
                    return
                at += count

    with contextlib.ExitStack() as threads:
        for _ in range(_READERS - 1):
            threads.callback(Task(read, "ortgpu-reading").result)
        threads.callback(lambda: list(starts))  # after an interrupt the others are to end soon
        read()
    return None if short else memory


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
