"""Messages between two processes, with arrays in shared memory.

Each array is copied once, into shared memory: a file without a name that both processes have open. Its pages are
allocated before their use, so that no process gets SIGBUS when the machine is full.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.child_process import remedy_for
from ...errors import ExecutionError, manual
from ...process.channel import Channel
from ...running.cudart import CudaCallError, CudaRuntime

logger = logging.getLogger("ortgpu.pool")

# Bytes that are kept for later arrays. After an unusually large request or answer the memory is freed.
KEPT = 512 << 20

_ALIGNMENT = 256  # bytes; CUDA aligns memory like this
_HUGE = 2 << 20  # bytes of a huge page
_MAP_FIXED = 0x10  # The constant is in linux/mman.h.
_MADV_COLLAPSE = 25  # This one is there since Linux 6.1.

_Place = tuple[np.dtype[Any], tuple[int, ...], int]  # an array's type, shape, and offset in bytes
Copy = Callable[[NDArray[Any], NDArray[Any]], object]  # copies the second array to the first


class Exchange:
    """Requests and answers with arrays, between two processes. Only a single thread at a time may use it.

    The file ``descriptor`` has the arrays of a request, and those of its answer behind them. ``runtime`` pins them.

    Attributes:
        size: the number of mapped bytes.
        used: the number of bytes with arrays.
    """

    def __init__(
        self, channel: Channel, descriptor: int, *, runtime: CudaRuntime | None = None, copy: Copy = np.copyto
    ) -> None:
        self.channel, self.descriptor = channel, descriptor
        self._copy = copy
        self._runtime = runtime
        self._pinned: int | None = None  # the address of pinned memory
        self._memory: NDArray[np.uint8] | None = None
        self.size = self.used = 0

    def send(self, message: object, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send a message with arrays. Arrays from :meth:`try_empty` are not copied.

        Raises OSError, or ExecutionError if there is no room: then nothing was sent.
        """
        address = 0 if self._memory is None else self._memory.ctypes.data
        offsets = [array.__array_interface__["data"][0] - address for array in arrays]
        missing = [at for at, array in enumerate(arrays) if not (array.nbytes and 0 <= offsets[at] < self.size)]
        needed = self.used + sum(_aligned(arrays[at].nbytes) for at in missing)
        if missing and needed > self.size:
            self._grow(needed)
        for at in missing:
            offsets[at] = self.used
            self.used += _aligned(arrays[at].nbytes)
            self._copy(self._array((arrays[at].dtype, arrays[at].shape, offsets[at])), arrays[at])
        places = [(array.dtype, array.shape, offset) for array, offset in zip(arrays, offsets, strict=True)]
        self.channel.send((message, places, self.used, self.size))

    def receive(self, timeout: float | None = None) -> tuple[Any, list[NDArray[Any]]]:
        """Return a message, with arrays that last until :meth:`end`.

        Raises as :meth:`Channel.receive`, or ExecutionError if there is no room for the arrays.
        """
        message, places, self.used, size = self.channel.receive(timeout)
        if places and size != self.size:
            self._map(size)
        return message, [self._array(place) for place in places]

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return an array for the answer in the memory, or None if there is no room."""
        offset, end = self.used, self.used + _aligned(math.prod(shape) * dtype.itemsize)
        if end > self.size or end == offset:
            return None
        self.used = end
        return self._array((dtype, shape, offset))

    def end(self, *, frees: bool) -> None:
        """End a request and its answer on this side. Memory that is too large to keep is unmapped.

        ``frees``: free it, too. Only the side that makes the requests may do so, since the other one may still read.
        """
        self.used = 0
        if self.size > KEPT:
            self._unmap()
            if frees:
                os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        self._unmap()
        os.close(self.descriptor)
        self.channel.close()

    def _array(self, place: _Place) -> NDArray[Any]:
        dtype, shape, offset = place
        if not math.prod(shape) * dtype.itemsize:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self._memory, offset)

    def _grow(self, size: int) -> None:
        step = max(1 << 16, 1 << max(size.bit_length() - 3, 0))  # The size grows in steps, so that it seldom grows.
        size = -(-size // step) * step
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            raise _no_room(size, error) from None
        self._map(size)

    def _map(self, size: int) -> None:
        """Map ``size`` bytes of the file instead of the present ones. Arrays keep their offsets."""
        self._unmap()
        try:
            self._memory = _map_file(self.descriptor, size)
        except OSError as error:
            raise _no_room(size, error) from None
        self.size = size
        if self._runtime is not None:
            try:
                self._runtime.pin(self._memory.ctypes.data, size)
                self._pinned = self._memory.ctypes.data
            except CudaCallError as error:  # The GPU copies from ordinary memory.
                logger.debug("%d shared bytes cannot be pinned: %s", size, error)

    def _unmap(self) -> None:
        """Unmap the memory. Arrays in it keep it mapped, but not pinned."""
        if self._runtime is not None and self._pinned is not None:
            with suppress(CudaCallError):  # A lost context has already unpinned the memory.
                self._runtime.unpin(self._pinned)
            self._pinned = None
        self._memory = None
        self.size = 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _map_file(descriptor: int, size: int) -> NDArray[np.uint8]:
    """Map a file, with huge pages if the system can: arrays in them are copied a third faster.

    Huge pages need an address that is a multiple of theirs, so the file is mapped in the middle of another mapping.
    mmap.mmap of the file itself would also keep a descriptor of its own.
    """
    around = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(around, np.uint8)
    memory = memory[-memory.ctypes.data % _HUGE :][:size]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address, length = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    if libc.mmap(address, length, access, flags, descriptor, ctypes.c_long(0)) != address.value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.madvise(address, length, _MADV_COLLAPSE)  # If the call fails, the mapping works without huge pages.
    return memory


def _no_room(size: int, error: OSError) -> ExecutionError:
    return ExecutionError(
        "the memory that two processes share has no space for the arrays of this request",
        evidence=[f"{size} bytes: {error}"],
        fixes=[manual(f"send smaller batches, or {remedy_for(error, 'give this process more memory')}")],
    )
