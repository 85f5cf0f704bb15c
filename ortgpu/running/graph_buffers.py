"""The buffers that a captured graph reads and writes: device memory, and pinned memory for small arrays.

A copy from or to pinned memory returns at once. For ordinary memory, CUDA stages the copy itself and waits. Copying
small arrays to pinned memory first saved 2 of 24 us of a run on an H200. It saved 11 of 75 us with 256 KiB in and out.
With 1 MiB a run took 1.2 times as long. The largest arrays are copied in threads, as in
:mod:`ortgpu.running.staged_runs`.

Large results are in reused memory, since the system clears each page of a new array at its first use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime

from ..model.tensor_types import DTYPES
from .copying import IN_THREADS_FROM, Transfer
from .cudart import CudaRuntime, DeviceBuffer, address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .pinned import PinnedMemory

# Bytes. From larger arrays CUDA copies one piece while it stages the next.
PINNED_UP_TO = 256 << 10

_ALIGNMENT = 256

# The shape and type of an array. Each combination for the inputs has a graph of its own.
Kind = tuple[tuple[int, ...], "np.dtype[Any]"]


class Place(NamedTuple):
    """The stream of the graphs, and the host memory of their session."""

    runtime: CudaRuntime
    stream: int
    memory: PinnedMemory


class _Buffer:
    """A buffer on the device, with pinned memory beside it or None.

    Without pinned memory, threads copy large arrays that can be pinned, and CUDA copies others.
    """

    def __init__(self, place: Place, kind: Kind, pinned: NDArray[Any] | None) -> None:
        self._runtime, self._stream, self._memory = place
        self._kind = kind
        self._pinned = pinned
        self._in_threads = IN_THREADS_FROM <= size_of(kind) <= place.memory.limit
        self._buffer = DeviceBuffer(place.runtime, size_of(kind))
        self.address, self.size = self._buffer.address, self._buffer.size


class Input(_Buffer):
    """A buffer that the graph reads."""

    def __init__(self, place: Place, kind: Kind, pinned: NDArray[Any] | None) -> None:
        super().__init__(place, kind, pinned)
        if pinned is not None:
            source = address_of(pinned)
            self._begin = place.runtime.prepared_copy_pinned(self.address, source, pinned.nbytes, place.stream)

    def take(self, value: Any, transfers: list[Transfer]) -> object:
        """Begin to copy ``value``, an array or OrtValue, or add a transfer for the threads to ``transfers``.

        Keep the result and the transfers until the stream is synchronised.
        """
        if not isinstance(value, np.ndarray):
            address = value.data_ptr()
        elif self._pinned is not None:
            self._pinned[...] = value
            self._begin()
            return None
        elif self._in_threads:
            value = np.asarray(value)  # a subclass may copy differently
            transfers.append(Transfer(value, self._memory.beside(value), self.address))
            return None
        else:
            value = np.asarray(value, order="C")
            address = address_of(value)
        self._runtime.copy(self.address, address, self._buffer.size, self._stream)
        return value


class Output(_Buffer):
    """A buffer that the graph writes."""

    def __init__(self, place: Place, kind: Kind, pinned: NDArray[Any] | None) -> None:
        super().__init__(place, kind, pinned)
        if pinned is not None:
            to = address_of(pinned)
            self._begin = place.runtime.prepared_copy_pinned(to, self.address, pinned.nbytes, place.stream)

    def begin(self, transfers: list[Transfer]) -> NDArray[Any]:
        """Begin to copy the output, or add a transfer for the threads to ``transfers``.

        The returned array is complete once these are made and the stream is synchronised.
        """
        if self._pinned is not None:
            self._begin()
            return self._pinned
        result = self._memory.ordinary.empty(*self._kind)
        if self._in_threads:
            transfers.append(Transfer(result, self._memory.try_empty(*self._kind), self.address))
        else:
            self._runtime.copy(address_of(result), self.address, self._buffer.size, self._stream)
        return result

    def result(self, begun: NDArray[Any]) -> NDArray[Any]:
        """Return an array for the caller, from the one that :meth:`begin` returned."""
        return begun if self._pinned is None else begun.copy()


class Constant:
    """An output that is computed on the CPU from shapes alone, so that it never changes."""

    def __init__(self, value: NDArray[Any]) -> None:
        self._value = value

    def begin(self, transfers: list[Transfer]) -> NDArray[Any]:
        return self._value

    def result(self, begun: NDArray[Any]) -> NDArray[Any]:
        return begun.copy()


def buffers(place: Place, inputs: Sequence[Kind], outputs: Mapping[str, Kind]) -> tuple[list[Input], dict[str, Output]]:
    """Return the buffers of a graph.

    Raises:
        CudaCallError: there is no memory, for instance.
    """
    pinned = iter(_pinned(place.memory, [*inputs, *outputs.values()]))
    read = [Input(place, kind, next(pinned)) for kind in inputs]
    written = {name: Output(place, kind, next(pinned)) for name, kind in outputs.items()}
    return read, written


def _pinned(memory: PinnedMemory, kinds: Sequence[Kind]) -> list[NDArray[Any] | None]:
    """Return a pinned array for each of ``kinds`` that is small, else None. All are None without pinned memory."""
    places, end = [], 0
    for kind in kinds:
        size = size_of(kind)
        places.append(slice(end, end + size) if size <= PINNED_UP_TO else None)
        if size <= PINNED_UP_TO:
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
    block = memory.try_empty((end,), np.dtype(np.uint8))  # one block for all, since the smallest is 64 KiB
    if block is None:
        return [None] * len(kinds)
    return [
        None if place is None else block[place].view(dtype).reshape(shape)
        for place, (shape, dtype) in zip(places, kinds, strict=True)
    ]


def kind_of(value: Any) -> Kind | None:
    """Return shape and type of a value. None if it is no tensor of a NumPy type."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else (value.shape, value.dtype)
    if isinstance(value, onnxruntime.OrtValue) and value.is_tensor() and value.data_type() in DTYPES:
        return tuple(value.shape()), DTYPES[value.data_type()]
    return None


def size_of(kind: Kind) -> int:
    """Return the size in bytes."""
    shape, dtype = kind
    return math.prod(shape) * dtype.itemsize
