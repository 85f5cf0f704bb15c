"""Host memory for arrays that is kept, and reused once an array and all its views are gone.

Filling a new array of 256 MB took 48 ms on the host of an H200, more than the copy itself, because the system clears
each page at its first use. Pinning memory takes longer still.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

logger = logging.getLogger("ortgpu")

_GRANULE = 64 << 10


def address_of(array: NDArray[Any]) -> int:
    """Return the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _nobody() -> None:
    return None


class Block:
    """A block of memory. It is idle once its user is gone; no call marks it, so that an interrupt cannot lose it."""

    __slots__ = ("address", "last_taken", "owner", "size", "user")

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = ctypes.c_void_p()  # null until there is memory
        self.owner: object = None  # keeps the memory, if Python owns it
        self.last_taken = 0  # a counter value
        self.user: Callable[[], Any] = _nobody  # a weak reference to the base object of the array in it

    def is_in_use(self) -> bool:
        return self.user() is not None


class RecycledMemory:
    """A store of memory blocks for arrays. Threads may share it. A subclass allocates the memory.

    ``limit`` is the most bytes, both used by arrays and kept for later ones.
    """

    _taken = "taken"  # a participle for messages

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._blocks: set[Block] = set()
        self._count = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()

    @property
    def bytes_in_use(self) -> int:
        """The bytes used by arrays."""
        return sum(block.size for block in self._there() if block.is_in_use())

    @property
    def bytes_held(self) -> int:
        """The bytes used by arrays and kept for later ones."""
        return sum(block.size for block in self._there())

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], leaving: int = 0) -> NDArray[Any] | None:
        """Return an empty array, or None if it has no elements, exceeds the limit or cannot be allocated.

        ``leaving`` bytes of the limit must stay unused.
        """
        count = math.prod(shape)
        memory = self._take(count * dtype.itemsize, leaving) if count > 0 and dtype.itemsize else None
        # np.ndarray treats subarray types as numpy.empty does. Views refer to the array and the array to `memory`, so
        # once `memory` is gone, nothing can reach the block.
        return None if memory is None else np.ndarray(shape, dtype, memory)

    def close(self) -> None:
        """Free the unused memory now, and the rest when its arrays are collected."""
        self._closed = True
        if os.getpid() == self._pid:  # in a forked child the lock may be held forever
            with self._lock:
                for block in self._there():
                    memory = block.user()
                    if memory is None:
                        self._release(block)
                    else:
                        weakref.finalize(memory, self._release, block).atexit = False
                        del memory

    def abandon(self) -> None:
        """Never free or hand out memory again, because it was lost and its addresses may be reused."""
        self._closed, self._pid = True, -1  # no process has this id

    def _allocate(self, block: Block) -> None:
        """Write the address of memory to the block. Raises RuntimeError, MemoryError."""
        raise NotImplementedError

    def _free(self, address: int) -> None:
        """Free memory. Raises RuntimeError."""

    def _there(self) -> list[Block]:
        return [block for block in list(self._blocks) if block.address.value]

    def _take(self, size: int, leaving: int) -> Any:
        size = -(-size // _GRANULE) * _GRANULE
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if self._closed:
                return None
            block, in_use = None, 0
            for each in self._blocks:
                if each.is_in_use():
                    in_use += each.size
                elif size <= each.size <= 2 * size and (block is None or each.size < block.size) and each.address.value:
                    block = each
            if leaving and in_use + size > self.limit - leaving:
                return None
            block = block or self._new(size, in_use)
            if block is None:
                return None
            block.last_taken = next(self._count)
            memory: Any = (ctypes.c_char * block.size).from_address(block.address.value or 0)
            memory.owner = self  # keep the store, whose end frees the memory
            block.user = weakref.ref(memory)
            return memory

    def _new(self, size: int, in_use: int) -> Block | None:
        free = self.limit - in_use
        if size > free:
            message = "%d bytes are not %s: the limit is %d, of which %d are free"
            logger.debug(message, size, self._taken, self.limit, free)
            return None
        if self.bytes_held + size > self.limit:
            for idle in sorted(self._there(), key=lambda each: each.last_taken):  # least recently used first
                if not idle.is_in_use() and self.bytes_held + size > self.limit:
                    self._release(idle)
        block = Block(size)
        self._blocks = {*self._there(), block}  # before allocating, as an interrupt may come right after
        try:
            self._allocate(block)
        except (RuntimeError, MemoryError) as error:
            logger.debug("%d bytes cannot be %s: %s", size, self._taken, error)
            return None
        return block

    def _release(self, block: Block) -> None:
        """Free a block. Takes no lock, because the garbage collector may call it in any thread."""
        if os.getpid() != self._pid:
            return  # after a fork the memory belongs to the parent
        try:
            self._blocks.remove(block)
        except KeyError:  # another thread freed it
            return
        try:
            self._free(block.address.value or 0)
        except RuntimeError as error:  # a lost context has freed it already
            logger.debug("%d %s bytes cannot be freed: %s", block.size, self._taken, error)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # an argument, as this module's names may be gone
            self.close()


class OrdinaryMemory(RecycledMemory):
    """Ordinary memory from NumPy. When it is reused, the system has cleared its pages already."""

    _taken = "kept"

    def _allocate(self, block: Block) -> None:
        owner = np.empty(block.size, np.uint8)
        block.owner = owner
        block.address.value = address_of(owner)
