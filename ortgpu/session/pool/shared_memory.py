"""Messages between two processes, with arrays in shared memory.

Each array is copied once, into the sender's shared memory. The memory is a file without a name, and ends with its last
user. Its pages are allocated before their use, so that no process gets SIGBUS when the machine is full.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ExecutionError, manual
from ...process.channel import Channel, avoid_standard_streams

# Bytes that an end keeps for its next arrays. After an unusually large request it frees the memory.
KEPT = 256 << 20

_ALIGNMENT = 256  # bytes; CUDA aligns memory like this
_HUGE = 2 << 20  # bytes of a huge page
_LARGE = 8 << 20  # bytes; larger files use huge pages
_MADV_COLLAPSE = 25  # The constant is in linux/mman.h since Linux 6.1.
_MFD_CLOEXEC = 1  # The constant is in linux/memfd.h.

_Place = tuple[np.dtype[Any], tuple[int, ...], int]  # an array's type, shape, and offset in bytes
Copy = Callable[[NDArray[Any], NDArray[Any]], object]  # copies the second array to the first
Pin = Callable[[int, int], Callable[[], None]]  # pins memory (address, bytes), and returns a function to unpin it


def _nothing() -> None:
    pass


class SharedArrays:
    """Arrays in memory of ``size`` bytes. One process writes them, and another one reads them.

    ``number`` is the number of the memory, 0 without memory.
    """

    def __init__(self, pin: Pin | None = None, copy: Copy = np.copyto) -> None:
        self.number = 0
        self._copy = copy
        self._pin = pin
        self._unpin = _nothing
        self._count = 0
        self._map: mmap.mmap | None = None
        # Offsets in the file: the mapping, its arrays, their end, and the next array
        self._start = self._first = self.size = self._used = 0

    def map(self, descriptor: int, number: int) -> None:
        """Take the memory under a descriptor instead of the present one."""
        self.drop()
        size = os.fstat(descriptor).st_size
        try:
            self._map, self._start = _map_file(descriptor, size)
        except OSError as error:
            raise _no_room(size, error) from None
        self._first = self._used = _HUGE if size >= _LARGE else 0
        self.size, self.number = size - self._first, number
        if self._pin is not None:
            self._unpin = self._pin(_address_of(self._map), len(self._map))

    def drop(self) -> None:
        """Release the memory. Arrays in it keep it alive, but not pinned."""
        unpin, self._unpin = self._unpin, _nothing
        unpin()
        self._map = None
        self._start = self._first = self.size = self._used = self.number = 0

    def array(self, place: _Place) -> NDArray[Any]:
        dtype, shape, offset = place
        if not math.prod(shape) * dtype.itemsize:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self._map, offset - self._start)

    def begin(self) -> None:
        """Forget the arrays of the last message."""
        self._used = self._first

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return an array for the next message in the memory, or None if there is no room."""
        offset, end = self._used, self._used + _aligned(math.prod(shape) * dtype.itemsize)
        if end > self.size or end == offset:
            return None
        self._used = end
        return self.array((dtype, shape, offset))

    def put(self, arrays: Sequence[NDArray[Any]]) -> tuple[list[_Place], int | None]:
        """Copy arrays into the memory, except for arrays from :meth:`try_empty`.

        Return their places. If the memory is new to the other side, return its descriptor, too; the caller closes it.

        Raises:
            ExecutionError: there is no room for them.
        """
        base, descriptor = (_address_of(self._map) if self._map is not None else 0) - self._start, None
        offsets = [array.__array_interface__["data"][0] - base for array in arrays]
        pairs = list(zip(arrays, offsets, strict=True))
        is_there = [bool(array.nbytes) and self._first <= offset < self.size for array, offset in pairs]
        missing = sum(_aligned(array.nbytes) for array, there in zip(arrays, is_there, strict=True) if not there)
        if self._used + missing > self.size:
            is_there = [False] * len(arrays)
            self._count += 1
            descriptor = _new_memory(sum(_aligned(array.nbytes) for array in arrays))
            try:
                self.map(descriptor, self._count)
            except BaseException:
                os.close(descriptor)
                raise
        for number, array in enumerate(arrays):
            if not is_there[number]:
                offsets[number] = self._used
                self._used += _aligned(array.nbytes)
                self._copy(self.array((array.dtype, array.shape, offsets[number])), array)
        return [(array.dtype, array.shape, offset) for array, offset in zip(arrays, offsets, strict=True)], descriptor


class Exchange:
    """Messages with arrays in both directions. Only a single thread at a time may use it.

    Each message names the mapped peer memory, so that a lost descriptor is sent again.
    """

    def __init__(self, channel: Channel, pin: Pin | None = None, copy: Copy = np.copyto) -> None:
        self.channel = channel
        self.ours = SharedArrays(pin, copy)
        self.theirs = SharedArrays(pin)

    def send(self, message: object, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send a message with arrays.

        Raises:
            ExecutionError: there is no room for the arrays. Nothing was sent.
            OSError: the other side is gone.
        """
        descriptor = None
        try:
            places, descriptor = self.ours.put(arrays)
            self.channel.send((message, places, self.ours.number, self.theirs.number), descriptor)
        except BaseException:
            self.ours.begin()
            if descriptor is not None:  # The other side did not get the descriptor.
                self.ours.drop()
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self, timeout: float | None = None) -> tuple[Any, list[NDArray[Any]]]:
        """Return a message, with arrays that last until the next one.

        Raises:
            EOFError, TimeoutError: as :meth:`Channel.receive`.
            ExecutionError: there is no room for the arrays. The exchange stays usable.
        """
        (message, places, number, have), descriptor = self.channel.receive(timeout)
        if have != self.ours.number:
            self.ours.drop()
        self.ours.begin()
        if descriptor is not None:
            try:
                self.theirs.map(descriptor, number)
            finally:
                os.close(descriptor)
        if number != self.theirs.number and any(math.prod(shape) for _, shape, _ in places):
            raise _no_room(0, None)  # The system dropped the descriptor on its way.
        return message, [self.theirs.array(place) for place in places]

    def drop_if_large(self) -> None:
        """Free memory that is too large to keep for the next messages. Arrays of the last message keep theirs alive."""
        for memory in (self.ours, self.theirs):
            if memory.size > KEPT:
                memory.drop()

    def close(self) -> None:
        self.ours.drop()
        self.theirs.drop()
        self.channel.close()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def memory_file(name: str) -> int:
    """Return the descriptor of an empty file in memory. A child started with ``exec`` does not inherit it.

    Pythons built for an older glibc, for instance by conda and uv, have no ``os.memfd_create``.

    Raises:
        OSError: the process has too many open files, or the system has no such files.
    """
    if hasattr(os, "memfd_create"):
        return avoid_standard_streams(os.memfd_create(name))
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "the C library has no memfd_create")
    descriptor: int = libc.memfd_create(name.encode(), _MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return avoid_standard_streams(descriptor)


def _new_memory(size: int) -> int:
    """Return the descriptor of new memory with room for at least ``size`` bytes."""
    step = max(1 << 16, 1 << max(size.bit_length() - 3, 0))  # The size grows in steps, so that it seldom grows.
    size = -(-size // step) * step
    if size >= _LARGE:  # The mapping begins within the first huge page, so both ends need room.
        size = -(-size // _HUGE) * _HUGE + 2 * _HUGE
    descriptor = None
    try:
        descriptor = memory_file("ortgpu-pool")
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise _no_room(size, error) from None
    return descriptor


def _map_file(descriptor: int, size: int) -> tuple[mmap.mmap, int]:
    """Map a file, and a large one with huge pages if the system can. Return the offset of the mapping's beginning, too.

    Arrays in huge pages are copied a third faster. Huge pages need an address that differs from the offset by whole
    huge pages. The system chooses the address, and chooses the same address for the second mapping.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    if size < _LARGE:
        return mmap.mmap(descriptor, size, flags), 0
    size -= _HUGE
    start = _address_of(mmap.mmap(descriptor, size, mmap.MAP_SHARED)) % _HUGE
    mapping = mmap.mmap(descriptor, size, flags, offset=start)
    # mmap.madvise would keep the interpreter's lock. If the call fails, the mapping works without huge pages.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(_address_of(mapping)), ctypes.c_size_t(size), _MADV_COLLAPSE)
    return mapping, start


def _address_of(mapping: mmap.mmap) -> int:
    address: int = np.frombuffer(mapping, np.uint8).ctypes.data
    return address


def _no_room(size: int, error: OSError | None) -> ExecutionError:
    return ExecutionError(
        "there is no room for the arrays of this request in memory that two processes share",
        evidence=[f"{size} bytes: {error}" if error is not None else "this process cannot open more files"],
        fixes=[
            manual("send smaller batches, or give the process and its container more memory or open files (ulimit -n)")
        ],
    )
