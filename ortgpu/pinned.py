"""Pinned (page-locked) host memory, from which the GPU copies at full speed, kept and used again.

From ordinary memory an H200 was fed at 9 GB/s, from pinned memory at 55. Pinning itself is slow, and takes memory from
the rest of the machine: so blocks are used again, and a session pins no more than its limit.
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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import lifetime
from .background import ForkSafeLock
from .cudart import CudaRuntime, runtime_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

logger = logging.getLogger("ortgpu")

# Bytes. Up to this size CUDA itself copies ordinary memory aside before a transfer, and returns ("API synchronization
# behavior" in the documentation of the CUDA runtime): a copy of ours would be a second one.
STAGED_FROM = (64 << 10) + 1

_GRANULE = 64 << 10

_creating = ForkSafeLock()


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    size: int


class PinnedMemory:
    """Blocks of pinned memory of one session. Threads may share it.

    ``limit`` counts all that is pinned here, in bytes: what arrays use, and what is kept for the next. What does not
    fit, or cannot be pinned, is ordinary memory, and a debug message says so. ``runtime`` None: all of it is.
    """

    def __init__(self, runtime: CudaRuntime | None, limit: int) -> None:
        self._runtime = runtime
        self._limit = limit
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
    def bytes_pinned(self) -> int:
        """Of arrays that exist, and kept for the next."""
        with self._lock:
            self._idle += _taken_out_of(self._returned)
            return self.bytes_in_use + sum(block.size for block in self._idle)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """As numpy.empty, in pinned memory where possible.

        Raises:
            TypeError: for an array of Python objects.
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("an array of Python objects cannot be in pinned memory")
        shape = np.empty(shape, "V0").shape  # as NumPy reads it; no bytes are taken
        found = self._pinned_empty(shape, kind)
        return np.empty(shape, kind) if found is None else found

    def staged(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """``feed`` with its arrays copied into pinned memory, but for those that are pinned, small or no arrays."""
        return {name: self._staged(value) for name, value in feed.items()}

    def close(self) -> None:
        """Give the memory back: at once what no array uses, the rest when its array is collected."""
        self._closed = True
        if os.getpid() == self._pid:  # a child does not know who held the lock when it was forked
            with self._lock:
                idle, self._idle = self._idle, []
            self._free(*idle, *_taken_out_of(self._returned))

    def _staged(self, value: Any) -> Any:
        if self._runtime is None or not isinstance(value, np.ndarray):
            return value
        if value.nbytes < STAGED_FROM or value.dtype.hasobject or self._is_pinned(value):
            return value
        copy = self._pinned_empty(value.shape, value.dtype)
        if copy is None:
            return value
        np.copyto(copy, value)  # without the interpreter lock
        return copy

    def _is_pinned(self, array: NDArray[Any]) -> bool:
        if self._runtime is None or not array.flags.c_contiguous:
            return False  # ONNX Runtime would copy an array with gaps into ordinary memory
        try:
            return self._runtime.is_pinned(array.__array_interface__["data"][0])
        except RuntimeError:
            return False

    def _pinned_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        count = math.prod(shape)
        block = self._take(count * dtype.itemsize) if count > 0 and dtype.itemsize else None
        if block is None:
            return None
        memory: Any = (ctypes.c_char * block.size).from_address(block.address)
        # Views refer to the array, the array to `memory`: when that goes, nobody can reach the block any more.
        weakref.finalize(memory, self._give_back, block).atexit = False
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def _take(self, size: int) -> _Block | None:
        size = -(-size // _GRANULE) * _GRANULE
        if self._runtime is None or self._closed or os.getpid() != self._pid:
            return None
        with self._lock:
            self._idle += _taken_out_of(self._returned)
            fitting = (block for block in self._idle if size <= block.size <= 2 * size)
            block = min(fitting, key=lambda each: each.size, default=None)
            if block is not None:
                self._idle.remove(block)
            else:
                block = self._pin(self._runtime, size)
            if block is not None:
                self._used[block.address] = block.size
            return block

    def _pin(self, runtime: CudaRuntime, size: int) -> _Block | None:
        available = self._limit - self.bytes_in_use
        if size > available:
            logger.debug("%d bytes are not pinned: the limit is %d, of which %d are free", size, self._limit, available)
            return None
        while self._idle and sum(block.size for block in self._idle) + size > available:
            self._free(self._idle.pop(0))
        try:
            return _Block(runtime.allocate_pinned(size), size)
        except RuntimeError as error:
            logger.debug("%d bytes cannot be pinned: %s", size, error)
            return None

    def _give_back(self, block: _Block) -> None:
        """Called by the garbage collector, in any thread: takes no lock."""
        self._used.pop(block.address)
        self._returned.append(block)
        if self._closed:
            self._free(*_taken_out_of(self._returned))

    def _free(self, *blocks: _Block) -> None:
        if self._runtime is None or os.getpid() != self._pid:
            return  # CUDA does not survive a fork: the memory is the parent's
        for block in blocks:
            try:
                self._runtime.free_pinned(block.address)
            except RuntimeError as error:  # a CUDA that is lost has no memory either
                logger.debug("%d pinned bytes cannot be freed: %s", block.size, error)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def _taken_out_of(blocks: deque[_Block]) -> list[_Block]:
    taken = []
    with contextlib.suppress(IndexError):  # several threads may take
        while True:
            taken.append(blocks.popleft())
    return taken


def is_to_be_staged(feed: Any) -> bool:
    """Whether some array of the feed is large enough."""
    values = feed.values() if isinstance(feed, Mapping) else ()
    return any(isinstance(value, np.ndarray) and value.nbytes >= STAGED_FROM for value in values)


def memory_of(session: Any) -> PinnedMemory:
    """The pinned memory of a GPUSession, made at the first use.

    Raises:
        ExecutionError: the session is closed, or lost the GPU.
    """
    lifetime.refuse_if_unusable(session)
    with _creating:
        if session._pinned is None:
            runtime = runtime_of(session.device)
            if runtime is None:
                logger.debug("nothing is pinned for a session on %s", session.device)
            session._pinned = PinnedMemory(runtime, session._pinned_memory_limit)
        memory: PinnedMemory = session._pinned
        return memory
