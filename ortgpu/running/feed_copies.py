"""Copies of feeds, for callers that may write to their arrays again before the run.

One such caller is a generator that fills the same array for each feed. The copies are in pinned memory where possible,
so that the run need not copy them once more.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from ..model.tensor_types import DTYPES
from ..process.background import is_of_a_handler
from ..provider.lifetime import device_of
from .copying import ParallelCopy, copy_threads, parallel_copy
from .cudart import CudaRuntime, Stream, address_of, runtime_of
from .pinned import STAGED_FROM, OrdinaryMemory, PinnedMemory, memory_of
from .staging import STAGED_FROM as COPIED_IN_THREADS_FROM
from .staging import gives_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..provider.interfaces import VerifiedSession

logger = logging.getLogger("ortgpu")

# Functions that each wait for the end of a run, the oldest run first.
Waits = Iterable[Callable[[], object]]

_IMMUTABLE = (str, bytes, int, float, complex, type(None), np.number, np.bool_, np.character)


class _NotCopiedError(Exception):
    """An entry of a feed cannot be copied, or there is no memory for it."""


class FeedCopies:
    """Copies feeds. Threads may share it if ``on_device`` is None.

    Args:
        memories: returns the pinned memories of the sessions that may read a feed; called for each large array.
        limit: bytes of ordinary memory to keep for later copies.
        ordinal: the device of the threads that copy large arrays, see parallel_copy. With None the calling thread
            copies alone.
        on_device: copies OrtValues on the GPU.
    """

    def __init__(
        self,
        memories: Callable[[], Iterable[PinnedMemory]],
        limit: int,
        ordinal: int | None,
        on_device: CopiesOnDevice | None = None,
    ) -> None:
        self._memory_kinds = on_device
        self._memories = memories
        self._ordinary = OrdinaryMemory(limit)
        self._ordinal = ordinal
        self._threads: ParallelCopy | None = None
        self._pinned: list[weakref.ref[NDArray[Any]]] = []  # our copies that still exist

    def of(self, feed: Any, waits: Waits = ()) -> tuple[Any, bool]:
        """Return a copy of ``feed``, and True if everything in it was copied.

        If not, its run must end before the caller goes on. If pinned memory is full, this waits for runs by ``waits``.
        """
        if not isinstance(feed, Mapping):
            return feed, True  # the run refuses it
        copied, is_whole = dict(feed), True
        for name, value in copied.items():
            try:
                copied[name] = self._copy(value, waits)
            except (_NotCopiedError, MemoryError):
                is_whole = False
        return copied, is_whole

    def close(self) -> None:
        """Free the memory that no copy uses."""
        self._ordinary.close()

    def _copy(self, value: Any, waits: Waits) -> Any:
        if isinstance(value, np.ndarray):
            return self._copy_of_array(np.asarray(value), waits)  # a subclass may copy differently
        if isinstance(value, onnxruntime.OrtValue):
            array = _array_in(value)
            if array is not None:
                return self._copy_of_array(array, waits)
            if self._memory_kinds is not None:
                return self._memory_kinds.copy(value)
            raise _NotCopiedError
        if isinstance(value, _IMMUTABLE):
            return value
        if type(value) in (list, tuple):
            return type(value)([self._copy(item, waits) for item in value])
        if type(value) is dict:
            return {key: self._copy(item, waits) for key, item in value.items()}
        raise _NotCopiedError

    def _copy_of_array(self, array: NDArray[Any], waits: Waits) -> NDArray[Any]:
        if array.dtype.hasobject:
            if not all(issubclass(kind, _IMMUTABLE) for kind in set(map(type, array.flat))):
                raise _NotCopiedError
            return array.copy()
        if array.nbytes < STAGED_FROM:
            return array.copy()
        order = _order_in_memory(array)
        if order is not None:
            # Keep the order in memory: reordering takes many times as long, and the threads that run do it in parallel.
            source = array.transpose(order)
            copy = self._ordinary.empty(source.shape, source.dtype)
            self._fill(copy, source)
            return copy.transpose(np.argsort(order))
        copy = self.empty(array.shape, array.dtype, waits)
        self._fill(copy, array)
        return copy

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], waits: Waits = ()) -> NDArray[Any]:
        """Return an empty array in pinned memory, waiting for runs while that helps, or in ordinary memory."""
        waits, size = iter(waits), math.prod(shape) * dtype.itemsize
        while True:
            fits = False
            for memory in self._memories():
                # Use half of the limit. The rest is for results and for pinned_empty.
                most = memory.limit // 2
                fits = fits or size <= most
                array = memory.try_empty(shape, dtype, most)
                if array is not None:
                    self._pinned = [reference for reference in self._pinned if reference() is not None]
                    self._pinned.append(weakref.ref(array))
                    return array
            wait = next(waits, None) if fits else None
            if wait is None or all(reference() is None for reference in self._pinned):
                return self._ordinary.empty(shape, dtype)
            wait()

    def _fill(self, copy: NDArray[Any], array: NDArray[Any]) -> None:
        if self._ordinal is None or array.nbytes < COPIED_IN_THREADS_FROM or not array.flags.c_contiguous:
            np.copyto(copy, array)  # releases the interpreter lock
            return
        if self._threads is None:
            self._threads = parallel_copy(copy_threads(), self._ordinal)
        self._threads.copy(address_of(copy), address_of(array), array.nbytes)


def copies_for(session: VerifiedSession) -> FeedCopies:
    """Return the FeedCopies for a GPUSession."""
    runtime = runtime_of(device_of(session))
    ordinal, on_device = (None, None) if runtime is None else (runtime.ordinal, CopiesOnDevice(session, runtime))
    return FeedCopies(lambda: (memory_of(session),), session._pinned_memory_limit, ordinal, on_device)


class CopiesOnDevice:
    """Copies OrtValues on the GPU into memory of a GPUSession."""

    def __init__(self, session: VerifiedSession, runtime: CudaRuntime) -> None:
        self._session = session
        self._runtime = runtime
        self._stream: Stream | None = None

    def copy(self, value: Any) -> Any:
        dtype = _dtype_of(value)
        session, runtime = self._session, self._runtime
        if dtype is None or not gives_memory(session):
            raise _NotCopiedError
        device, shape = device_of(session), value.shape()
        place = onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device()
        try:
            if not runtime.is_on_device(value.data_ptr()):
                raise _NotCopiedError
            # ONNX Runtime allocates memory here. That must not spoil a capture of another session.
            with runtime.device_guard():
                copy = session._sess.create_ortvalue_from_shape_and_type(shape, dtype.type, place)
                if self._stream is None:
                    self._stream = Stream(runtime)
                stream = self._stream.handle
                try:
                    runtime.copy(copy.data_ptr(), value.data_ptr(), math.prod(shape) * dtype.itemsize, stream)
                finally:
                    runtime.synchronise(stream)
        except RuntimeError as error:  # usually no memory is left; the run reports anything worse
            if is_of_a_handler(error):
                raise
            logger.debug("an array on the GPU is not copied: %s", str(error))
            raise _NotCopiedError from None
        return onnxruntime.OrtValue(copy)


def _dtype_of(value: Any) -> np.dtype[Any] | None:
    """Return the NumPy type of a value. None if it is no tensor of numbers."""
    return DTYPES.get(value.data_type()) if value.has_value() and value.is_tensor() else None


def _array_in(value: Any) -> NDArray[Any] | None:
    """Return an array over the memory of an OrtValue on the host. None for others."""
    dtype = _dtype_of(value)
    if dtype is None or value.device_name() not in ("cpu", "cuda_pinned"):
        return None
    shape = value.shape()
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(value.data_ptr())
    return np.frombuffer(memory, dtype, count).reshape(shape)


def _order_in_memory(array: NDArray[Any]) -> tuple[int, ...] | None:
    """Return the order of axes that makes a transposed array contiguous.

    None if it is contiguous already, or if it has gaps in any order.
    """
    if array.flags.c_contiguous:
        return None
    order = tuple(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
    return order if array.transpose(order).flags.c_contiguous else None
