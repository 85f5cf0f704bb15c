"""Host memory for arrays that is kept, and used again when an array and all views of it are gone.

Filling a fresh array of 256 MB took 48 ms on the host of an H200, since the system clears each page when it is touched
first: more than the copy itself. Pinning memory takes longer still.
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


def _nobody() -> None:
    return None


class Block:
    """Memory of one size. Nothing has to be done for it to be idle again: that is seen by who looks, so that no
    interrupt can lose it."""

    __slots__ = ("address", "last_taken", "owner", "size", "user")

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = ctypes.c_void_p()  # null until there is memory
        self.owner: object = None  # keeps the memory, where it is of Python's
        self.last_taken = 0  # by when, in a count
        self.user: Callable[[], Any] = _nobody  # a reference to what the array refers to that has the memory, or had it

    def is_in_use(self) -> bool:
        return self.user() is not None


class RecycledMemory:
    """Blocks of memory for arrays. Threads may share it. A subclass says where memory comes from.

    ``limit`` counts all that is taken here, in bytes: what arrays use, and what is kept for the next.
    """

    _taken = "taken"  # what was done to the memory, for messages

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._blocks: set[Block] = set()
        self._count = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()

    @property
    def bytes_in_use(self) -> int:
        """Of arrays that exist."""
        return sum(block.size for block in self._there() if block.is_in_use())

    @property
    def bytes_held(self) -> int:
        """Of arrays that exist, and kept for the next."""
        return sum(block.size for block in self._there())

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], leaving: int = 0) -> NDArray[Any] | None:
        """Return what numpy.empty does; None if it does not fit into the limit, cannot be had, or has no elements.

        ``leaving``: so many bytes of the limit must not be in use afterwards.
        """
        count = math.prod(shape)
        memory = self._take(count * dtype.itemsize, leaving) if count > 0 and dtype.itemsize else None
        # Which reads types with a shape of their own as numpy.empty does. Views refer to the array, the array to
        # `memory`: when that goes, nobody can reach the block any more.
        return None if memory is None else np.ndarray(shape, dtype, memory)

    def close(self) -> None:
        """Give the memory back: at once what no array uses, the rest when its array is collected."""
        self._closed = True
        if os.getpid() == self._pid:  # a child does not know who held the lock when it was forked
            with self._lock:
                for block in self._there():
                    memory = block.user()
                    if memory is None:
                        self._release(block)
                    else:
                        weakref.finalize(memory, self._release, block).atexit = False
                        del memory

    def abandon(self) -> None:
        """Give nothing back, and nothing out: the memory was lost, and its addresses may be somebody else's."""
        self._closed, self._pid = True, -1  # which is no process, this one neither

    def _allocate(self, block: Block) -> None:
        """Write the address of memory to the block. Raises RuntimeError, MemoryError."""
        raise NotImplementedError

    def _free(self, address: int) -> None:
        """Raises RuntimeError."""

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
            memory.owner = self  # whose end gives the memory back
            block.user = weakref.ref(memory)
            return memory

    def _new(self, size: int, in_use: int) -> Block | None:
        free = self.limit - in_use
        if size > free:
            message = "%d bytes are not %s: the limit is %d, of which %d are free"
            logger.debug(message, size, self._taken, self.limit, free)
            return None
        if self.bytes_held + size > self.limit:
            for idle in sorted(self._there(), key=lambda each: each.last_taken):  # the longest unused first
                if not idle.is_in_use() and self.bytes_held + size > self.limit:
                    self._release(idle)
        block = Block(size)
        self._blocks = {*self._there(), block}  # before it has memory: an interrupt comes when that was allocated
        try:
            self._allocate(block)
        except (RuntimeError, MemoryError) as error:
            logger.debug("%d bytes cannot be %s: %s", size, self._taken, error)
            return None
        return block

    def _release(self, block: Block) -> None:
        """Free it. Called by the garbage collector too, in any thread: takes no lock."""
        if os.getpid() != self._pid:
            return  # CUDA does not survive a fork: the memory is the parent's
        try:
            self._blocks.remove(block)
        except KeyError:  # it was freed in another thread
            return
        try:
            self._free(block.address.value or 0)
        except RuntimeError as error:  # a CUDA that is lost has no memory either
            logger.debug("%d %s bytes cannot be freed: %s", block.size, self._taken, error)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # by argument: this module has no names left then
            self.close()


class OrdinaryMemory(RecycledMemory):
    """Memory as NumPy takes it, whose pages have been touched once when it is used again."""

    _taken = "kept"

    def _allocate(self, block: Block) -> None:
        owner = np.empty(block.size, np.uint8)
        block.owner = owner
        block.address.value = owner.__array_interface__["data"][0]
