"""Pinned (page-locked) host memory that is kept and reused.

An H200 reads ordinary memory at 9 GB/s and pinned memory at 55. Pinning itself is slow and takes memory from the rest
of the machine. So blocks are reused, and a session pins no more than its limit.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..process.background import fork_safe_lock
from ..provider import lifetime
from .cudart import CudaRuntime, runtime_of
from .recycling import Block, RecycledMemory, address_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

logger = logging.getLogger("ortgpu")

# Bytes. Below this size CUDA itself stages ordinary memory before a transfer and returns ("API synchronization
# behavior" in the documentation of the CUDA runtime), so our copy would be a second one.
STAGED_FROM = (64 << 10) + 1

_creating = fork_safe_lock()


class PinnedMemory(RecycledMemory):
    """The pinned memory of one session.

    An array that does not fit into ``limit``, or cannot be pinned, gets ordinary memory, and a debug message says so.
    If ``runtime`` is None, all memory is ordinary.
    """

    _taken = "pinned"

    def __init__(self, runtime: CudaRuntime | None, limit: int) -> None:
        super().__init__(limit)
        self._runtime = runtime

    @property
    def bytes_pinned(self) -> int:
        """The pinned bytes, both used by arrays and kept for later ones."""
        return self.bytes_held

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an empty array, as numpy.empty does, in pinned memory where possible.

        Raises:
            TypeError: ``dtype`` is that of Python objects.
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("an array of Python objects cannot be in pinned memory")
        shape = np.empty(shape, "V0").shape  # let NumPy parse the shape; V0 allocates nothing
        found = self.try_empty(shape, kind)
        return np.empty(shape, kind) if found is None else found

    def try_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], leaving: int = 0) -> NDArray[Any] | None:
        return None if self._runtime is None else super().try_empty(shape, dtype, leaving)

    def is_pinned(self, array: NDArray[Any]) -> bool:
        """Return True if the GPU can copy from this array directly."""
        if self._runtime is None or not array.flags.c_contiguous:
            return False  # ONNX Runtime would copy an array with gaps into ordinary memory
        try:
            return self._runtime.is_pinned(address_of(array))
        except RuntimeError:
            return False

    def staged(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``feed`` with its large arrays copied into pinned memory, unless they are pinned already."""
        return {name: self._staged(value) for name, value in feed.items()}

    def would_stage(self, feed: Any) -> bool:
        """Return True if :meth:`staged` would copy an array of ``feed``."""
        return isinstance(feed, Mapping) and any(map(self._is_to_be_staged, feed.values()))

    def _is_to_be_staged(self, value: Any) -> bool:
        if self._runtime is None or not isinstance(value, np.ndarray):
            return False
        return value.nbytes >= STAGED_FROM and not value.dtype.hasobject and not self.is_pinned(value)

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


def memory_of(session: Any) -> PinnedMemory:
    """Return the pinned memory of a GPUSession, made at the first use.

    Raises:
        ExecutionError: the session is closed, or lost the GPU.
    """
    lifetime.refuse_if_unusable(session)
    with _creating:
        if session._pinned is None:
            device = lifetime.device_of(session)
            runtime = runtime_of(device)
            if runtime is None:
                logger.debug("nothing is pinned for a session on %s", device)
            session._pinned = PinnedMemory(runtime, session._pinned_memory_limit)
            # Results outlive the session and keep this object, so free the unused memory with the session.
            weakref.finalize(session, session._pinned.close).atexit = False
        memory: PinnedMemory = session._pinned
        return memory
