"""Large weights that ONNX Runtime takes directly from memory, without parsing them.

Parsing a file copies every weight in pieces of a few KiB, then into a tensor, and then to the GPU. Here ONNX Runtime is
given the structure of the model as bytes, and tensors that point into the file in memory. It then copies each weight
once, to the GPU or into its own memory. Once the session is open it reads the weights no more, and their memory is
freed. The address range stays reserved for the life of the session, which holds the tensors
(Graph::InjectExternalInitializedTensors in graph.cc).

The file is read, not mapped: reading a mapped file that a writer has truncated ends the process. Several threads read
it into huge pages. This takes 11 to 15 ms for 102 MiB, against 55 ms with one thread and small pages.
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

from ..model.contents import LARGEST
from ..model.files import ModelSource, is_ort_format, open_model
from ..model.outline import GraphOutline, Tensor, with_values_elsewhere
from ..process.background import Task, is_of_a_handler
from ..provider.options import recording_options
from ..provider.runtime import load_runtime
from ..running import dlpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIRST = (1, 31)  # the first release of ONNX Runtime that takes weights so
_VERIFIED = ((1, 31), (1, 32))  # to read nothing of them once a session is open: the memory of others is kept
# Bytes of a model. On an H200 those of 85 MB and more opened in 0.87 to 1.06 of the time, and those of 9 to 32 MB in
# 1.02 to 1.45, since Python reads each node and each name (benchmarks/results/zoo-h200-2026-11-23-4fba0b2.json).
_FEWEST_BYTES = 64 << 20
_LARGE = 64 << 10  # bytes of an initializer
_READERS = 4  # threads
_PIECE = 4 << 20  # bytes that a thread reads at a time
_TICK = 0.01  # seconds, the resolution of a file system's clock
_WRITTEN = 1e9  # bytes a second at which a file is assumed to be written

# NumPy types by TensorProto.DataType, without those that NumPy lacks or cannot pass on
_DTYPES = {
    number: np.dtype(kind)
    for number, kind in {
        1: "f4", 2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 10: "f2", 11: "f8", 12: "u4", 13: "u8",
    }.items()
}  # fmt: skip


class Weights:
    """The structure of a model, and descriptions of its large weights with the memory that holds them."""

    def __init__(self, structure: bytes, tensors: Sequence[Tensor], content: bytes | mmap.mmap) -> None:
        self.structure = structure
        self._memory = None if isinstance(content, bytes) else content
        buffer = _writable(content)
        # Each tensor that ONNX Runtime holds keeps its array alive, and the array keeps the memory.
        values = [dlpack.native_value(_array(buffer, tensor).__dlpack__(), is_bool=False) for tensor in tensors]
        self._values = [onnxruntime.OrtValue(value) for value in values]
        self._names = [tensor.name.decode() for tensor in tensors]

    def options(self) -> Any:
        options = recording_options()
        options.add_external_initializers(self._names, self._values)
        return options

    def give_back(self) -> None:
        """Free the memory once the session is open, which reads it no more. The weights cannot be used afterwards."""
        if self._memory is not None and load_runtime().release in _VERIFIED:
            with contextlib.suppress(OSError):  # fails if the program has locked its memory
                self._memory.madvise(mmap.MADV_DONTNEED)


def weights_in_place(outline: GraphOutline) -> Weights | None:
    """Return the weights of a model in memory. The outline is read on the way.

    Returns None if ONNX Runtime is to read the model itself. Raises its InvalidProtobuf if the file changed meanwhile,
    and what a signal handler raises.
    """
    try:
        content = _content(outline.model)
        if content is None:
            return None
        outline.read(content)
        found = with_values_elsewhere(content, outline, _LARGE, _DTYPES.keys())
        return Weights(*found, content) if found is not None else None
    except InvalidProtobuf:
        raise
    except Exception as error:  # also a lack of memory: ONNX Runtime reads the model its own way
        if is_of_a_handler(error):
            raise
        return None


def _content(model: ModelSource) -> bytes | mmap.mmap | None:
    # Only tried on Linux
    if sys.platform != "linux" or load_runtime().release < _FIRST or is_ort_format(model):
        return None
    if isinstance(model, bytes):
        return model if len(model) >= _FEWEST_BYTES else None
    with open_model(os.fspath(model)) as file:
        before = os.fstat(file.fileno())
        if not _FEWEST_BYTES <= before.st_size < LARGEST:
            return None
        # The file's time is set when a write begins, so wait until a write of this size would have ended.
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
    """Read ``size`` bytes, or return None if the file is shorter. Releases the interpreter lock meanwhile."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(memory)
    starts = iter(range(0, size, _PIECE))  # shared by the threads
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
        threads.callback(lambda: list(starts))  # after an interrupt, leave the other threads no work
        read()
    return None if short else memory


def _writable(content: bytes | mmap.mmap) -> Any:
    """Return a writable buffer over the memory of ``content``, which it keeps alive. Nobody writes to it."""
    if not isinstance(content, bytes):
        return content
    address = np.frombuffer(content, np.uint8).ctypes.data
    buffer = (ctypes.c_ubyte * len(content)).from_address(address)
    buffer.owner = content  # type: ignore[attr-defined]  # ctypes instances accept any attribute
    return buffer


def _array(buffer: Any, tensor: Tensor) -> NDArray[Any]:
    dtype = _DTYPES[tensor.data_type]
    start, end = tensor.values or (0, 0)
    count, rest = divmod(end - start, dtype.itemsize)
    if rest:
        raise ValueError("a part of a number")
    return np.frombuffer(buffer, dtype, count, start).reshape(tensor.shape)
