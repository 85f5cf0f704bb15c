"""Host memory for arrays that is kept, and reused once an array and all its views are gone.

Filling a new array of 256 MB took 48 ms on the host of an H200, more than the copy itself. The system clears each page
at its first use. An H200 reads ordinary memory at 9 GB/s and pinned (page-locked) memory at 55. Pinning itself takes
longer still, and takes memory from the rest of the machine, so a session pins no more than its limit.
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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..process.background import fork_safe_lock, this_thread
from ..provider import lifetime
from .cudart import CudaRuntime, address_of, runtime_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from ..provider.interfaces import VerifiedSession

Result = TypeVar("Result")

logger = logging.getLogger("ortgpu")

# Bytes. Below this size CUDA itself stages ordinary memory before a transfer and returns ("API synchronization
# behavior" in the documentation of the CUDA runtime), so our copy would be a second one.
STAGED_FROM = (64 << 10) + 1

_GRANULE = 64 << 10
_PATIENCE = 1.0  # seconds: the longest wait for the lock. Threads hold it for microseconds.
_creating = fork_safe_lock()


class Block:
    """A block of memory. It is idle once its user is gone; no call marks it, so that an interrupt cannot lose it."""

    __slots__ = ("address", "last_taken", "owner", "size", "user")

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = ctypes.c_void_p()  # null until there is memory
        self.owner: object = None  # keeps the memory, if Python owns it
        self.last_taken = 0  # a counter value
        self.user: Callable[[], Any] = lambda: None  # a weak reference to the base object of the array in it

    def is_in_use(self) -> bool:
        return self.user() is not None


class RecycledMemory:
    """A store of memory blocks for arrays. Threads may share it. A subclass allocates the memory.

    ``limit`` is the most bytes, both used by arrays and kept for later ones.
    """

    _taken = "taken"  # a participle for messages

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()
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

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an empty array, in new memory if :meth:`try_empty` returns none."""
        array = self.try_empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], most: int | None = None) -> NDArray[Any] | None:
        """Return an empty array, or None if it has no elements, exceeds the limit or cannot be allocated.

        ``most`` replaces the limit of the bytes used by arrays.
        """
        count = math.prod(shape)
        most = self.limit if most is None else most
        memory = self._take(count * dtype.itemsize, most) if count > 0 and dtype.itemsize else None
        # np.ndarray treats subarray types as numpy.empty does. Views refer to the array and the array to `memory`, so
        # once `memory` is gone, nothing can reach the block.
        return None if memory is None else np.ndarray(shape, dtype, memory)

    def close(self) -> None:
        """Free the unused memory now, and the rest when its arrays are collected."""
        self._closed = True
        self._exclusively(self._release_all)  # otherwise the end of this object frees them

    def give_back(self) -> None:
        """Free the memory that no array uses. Later arrays get new memory."""
        self._exclusively(self._release_unused)

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

    def _exclusively(self, function: Callable[..., Result], *arguments: Any) -> Result | None:
        """Call a function with the lock. None: it was not called.

        A forked child does not call it, because the lock may be locked there for ever. Neither does a signal handler or
        finalizer that came while its thread had the lock. A thread beside the main thread waits for a limited time. The
        holder may be the main thread, in a signal handler that waits for that thread.
        """
        if os.getpid() != self._pid or self._lock._is_owned():  # type: ignore[attr-defined]  # as Condition asks
            return None
        if threading.current_thread() is threading.main_thread():
            with this_thread.holds, self._lock:
                return function(*arguments)
        if not self._lock.acquire(timeout=_PATIENCE):
            return None
        try:
            return function(*arguments)
        finally:
            self._lock.release()

    def _release_all(self) -> None:
        for block in self._there():
            memory = block.user()
            if memory is None:
                self._release(block)
            else:
                weakref.finalize(memory, self._release, block).atexit = False
                del memory

    def _release_unused(self) -> None:
        for block in self._there():
            if not block.is_in_use():
                self._release(block)

    def _take(self, size: int, most: int) -> Any:
        return self._exclusively(self._taken_block, -(-size // _GRANULE) * _GRANULE, most)

    def _taken_block(self, size: int, most: int) -> Any:
        if self._closed:
            return None
        block, in_use = None, 0
        for candidate in list(self._blocks):
            if candidate.is_in_use():
                in_use += candidate.size
            elif (
                size <= candidate.size <= 2 * size
                and (block is None or candidate.size < block.size)
                and candidate.address.value
            ):
                block = candidate
        if in_use + size > most:
            message = "%d bytes are not %s: the limit is %d, of which %d are free"
            logger.debug(message, size, self._taken, most, most - in_use)
            return None
        block = block or self._new(size)
        if block is None:
            return None
        block.last_taken = next(self._count)
        memory: Any = (ctypes.c_char * block.size).from_address(block.address.value or 0)
        memory.owner = self  # The end of the store would free the memory.
        block.user = weakref.ref(memory)
        return memory

    def _new(self, size: int) -> Block | None:
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
        if not is_finalizing():  # This is an argument, as the module's names may be gone.
            self.close()


class OrdinaryMemory(RecycledMemory):
    """Ordinary memory from NumPy. When it is reused, the system has cleared its pages already."""

    _taken = "kept"

    def _allocate(self, block: Block) -> None:
        owner = np.empty(block.size, np.uint8)
        block.owner = owner
        block.address.value = address_of(owner)


class PinnedMemory(RecycledMemory):
    """The pinned memory of one session, and the ordinary memory of its large results.

    An array that does not fit into ``limit``, or cannot be pinned, gets ordinary memory, and a debug message says so.
    If ``runtime`` is None, all memory is ordinary.
    """

    _taken = "pinned"

    def __init__(self, runtime: CudaRuntime | None, limit: int) -> None:
        super().__init__(limit)
        self._runtime = runtime
        # Pinned memory would save a copy of each result. But a forked child shares pinned memory with its parent, so
        # its results would change when the parent reuses the memory.
        self.ordinary = OrdinaryMemory(limit)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an empty array, as numpy.empty does, in pinned memory where possible.

        Raises:
            TypeError: ``dtype`` has Python objects.
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("an array of Python objects cannot be in pinned memory")
        return super().empty(np.empty(shape, "V0").shape, kind)  # let NumPy parse the shape; V0 allocates nothing

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], most: int | None = None) -> NDArray[Any] | None:
        return None if self._runtime is None else super().try_empty(shape, dtype, most)

    def give_back(self) -> None:
        super().give_back()
        self.ordinary.give_back()

    def close(self) -> None:
        super().close()
        self.ordinary.close()

    def abandon(self) -> None:
        super().abandon()
        self.ordinary.close()

    def is_pinned(self, array: NDArray[Any]) -> bool:
        """Return True if the GPU can copy from this array directly."""
        if self._runtime is None or not array.flags.c_contiguous:
            return False  # ONNX Runtime would copy an array with gaps into ordinary memory
        try:
            return self._runtime.is_pinned(address_of(array))
        except RuntimeError:
            return False

    def beside(self, array: NDArray[Any]) -> NDArray[Any] | None:
        """Return ``array`` if it is pinned, or an empty pinned array for a copy of it, or None if there is none."""
        return array if self.is_pinned(array) else self.try_empty(array.shape, array.dtype)

    def staged(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``feed`` with its large arrays copied into pinned memory, unless they are pinned already."""
        return {name: self._staged(value) for name, value in feed.items()}

    def would_stage(self, feed: Any) -> bool:
        """Return True if :meth:`staged` would copy an array of ``feed``."""
        return isinstance(feed, Mapping) and any(map(self._is_to_be_staged, feed.values()))

    def _is_to_be_staged(self, value: Any) -> bool:
        return self._runtime is not None and may_be_staged(value) and not self.is_pinned(value)

    def _staged(self, value: Any) -> Any:
        if not self._is_to_be_staged(value):
            return value
        copy = self.try_empty(value.shape, value.dtype)
        if copy is None:
            return value
        np.copyto(copy, np.asarray(value))  # releases the interpreter lock; asarray, as a subclass may copy differently
        return copy

    def _allocate(self, block: Block) -> None:
        assert self._runtime is not None
        self._runtime.allocate_pinned(block.size, block.address)

    def _free(self, address: int) -> None:
        assert self._runtime is not None
        self._runtime.free_pinned(address)


def may_be_staged(value: Any) -> bool:
    """Return True for an array that is copied into pinned memory, unless it is there already or CUDA is not used."""
    return isinstance(value, np.ndarray) and value.nbytes >= STAGED_FROM and not value.dtype.hasobject


def memory_of(session: VerifiedSession) -> PinnedMemory:
    """Return the pinned memory of a GPUSession, made at the first use.

    Raises:
        ExecutionError: the session is closed, or lost the GPU.
    """
    lifetime.refuse_if_gone(session)
    with this_thread.holds, _creating:
        if session._pinned is None:
            device = lifetime.device_of(session)
            runtime = runtime_of(device)
            if runtime is None:
                logger.debug("nothing is pinned for a session on %s", device)
            session._pinned = PinnedMemory(runtime, session._pinned_memory_limit)
            # Results outlive the session and keep this object, so free the unused memory with the session.
            weakref.finalize(session, session._pinned.close).atexit = False
        pinned: PinnedMemory = session._pinned
        return pinned
