"""Host memory for arrays that is kept, and used again when an array and all views of it are gone.

Filling a fresh array of 256 MB took 48 ms on the host of an H200, since the system clears each page when it is touched
first: more than the copy itself. Pinning memory takes longer still.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("ortgpu")

_GRANULE = 64 << 10


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    size: int


class RecycledMemory:
    """Blocks of memory for arrays. Threads may share it. A subclass says where memory comes from.

    ``limit`` counts all that is taken here, in bytes: what arrays use, and what is kept for the next.
    """

    _taken = "taken"  # what was done to the memory, for messages

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}  # size by address, of arrays that exist
        self._idle: list[_Block] = []  # the longest unused first
        # Arrays are collected at any moment, also while this thread holds the lock: what they used waits here.
        self._returned: deque[_Block] = deque()
        self._closed = False
        self._pid = os.getpid()

    @property
    def bytes_in_use(self) -> int:
        """Of arrays that exist."""
        return sum(list(self._used.values()))

    @property
    def bytes_held(self) -> int:
        """Of arrays that exist, and kept for the next."""
        with self._lock:
            self._idle += _taken_out_of(self._returned)
            return self.bytes_in_use + sum(block.size for block in self._idle)

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], leaving: int = 0) -> NDArray[Any] | None:
        """As numpy.empty; None for what does not fit into the limit or cannot be had, and for what has no elements.

        ``leaving``: so many bytes of the limit must not be in use afterwards.
        """
        count = math.prod(shape)
        block = self._take(count * dtype.itemsize, leaving) if count > 0 and dtype.itemsize else None
        if block is None:
            return None
        memory: Any = (ctypes.c_char * block.size).from_address(block.address)
        # Views refer to the array, the array to `memory`: when that goes, nobody can reach the block any more.
        weakref.finalize(memory, self._give_back, block).atexit = False
        return np.ndarray(shape, dtype, memory)  # which reads types with a shape of their own as numpy.empty does

    def close(self) -> None:
        """Give the memory back: at once what no array uses, the rest when its array is collected."""
        self._closed = True
        if os.getpid() == self._pid:  # a child does not know who held the lock when it was forked
            with self._lock:
                idle, self._idle = self._idle, []
            self._free_blocks(*idle, *_taken_out_of(self._returned))

    def abandon(self) -> None:
        """Give nothing back, and nothing out: the memory was lost, and its addresses may be somebody else's."""
        self._closed, self._pid = True, -1  # which is no process, this one neither

    def _allocate(self, size: int) -> int:
        """Address of so many bytes. Raises RuntimeError, MemoryError."""
        raise NotImplementedError

    def _free(self, address: int) -> None:
        """Raises RuntimeError."""
        raise NotImplementedError

    def _take(self, size: int, leaving: int) -> _Block | None:
        size = -(-size // _GRANULE) * _GRANULE
        if self._closed or os.getpid() != self._pid:
            return None
        with self._lock:
            self._idle += _taken_out_of(self._returned)
            if leaving and self.bytes_in_use + size > self.limit - leaving:
                return None
            block = None
            for idle in self._idle:
                if size <= idle.size <= 2 * size and (block is None or idle.size < block.size):
                    block = idle
            if block is not None:
                self._idle.remove(block)
            else:
                block = self._new(size)
            if block is not None:
                self._used[block.address] = block.size
            return block

    def _new(self, size: int) -> _Block | None:
        free = self.limit - self.bytes_in_use
        if size > free:
            message = "%d bytes are not %s: the limit is %d, of which %d are free"
            logger.debug(message, size, self._taken, self.limit, free)
            return None
        while self._idle and sum(block.size for block in self._idle) + size > free:
            self._free_blocks(self._idle.pop(0))
        try:
            return _Block(self._allocate(size), size)
        except (RuntimeError, MemoryError) as error:
            logger.debug("%d bytes cannot be %s: %s", size, self._taken, error)
            return None

    def _give_back(self, block: _Block) -> None:
        """Called by the garbage collector, in any thread: takes no lock."""
        self._used.pop(block.address)
        self._returned.append(block)
        if self._closed:
            self._free_blocks(*_taken_out_of(self._returned))

    def _free_blocks(self, *blocks: _Block) -> None:
        if os.getpid() != self._pid:
            return  # CUDA does not survive a fork: the memory is the parent's
        for block in blocks:
            try:
                self._free(block.address)
            except RuntimeError as error:  # a CUDA that is lost has no memory either
                logger.debug("%d %s bytes cannot be freed: %s", block.size, self._taken, error)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # by argument: this module has no names left then
            self.close()


class OrdinaryMemory(RecycledMemory):
    """Memory as NumPy takes it, whose pages have been touched once when it is used again."""

    _taken = "kept"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._owners: dict[int, NDArray[Any]] = {}

    def _allocate(self, size: int) -> int:
        owner = np.empty(size, np.uint8)
        address: int = owner.__array_interface__["data"][0]
        self._owners[address] = owner
        return address

    def _free(self, address: int) -> None:
        del self._owners[address]


def _taken_out_of(blocks: deque[_Block]) -> list[_Block]:
    taken = []
    while blocks:
        with contextlib.suppress(IndexError):  # several threads may take
            taken.append(blocks.popleft())
    return taken
