"""Copies between ordinary arrays and the device, through pinned memory, by several threads.

A transfer is cut into pieces. While the GPU reads one piece from pinned memory, the next is copied there; in the other
direction likewise. The calling thread takes part in the copy, uses a CUDA stream of its own, and waits for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .cudart import CudaRuntime, Event, Stream
from .parallel_copy import ParallelCopy, parallel_copy
from .recycling import address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between ``address`` on the device and ``host``, which the GPU reads or writes.

    ``array``, if there is one, is the other end: it is copied to or from ``host``. ``owner`` keeps the device's memory.
    """

    address: int
    host: NDArray[Any]
    array: NDArray[Any] | None
    owner: object
    is_pinned: bool


class ChunkedTransfer:
    """A transfer that is copied in pieces. ``starts`` holds the byte offset of each piece."""

    def __init__(self, transfer: Transfer, piece: int, copies: ParallelCopy) -> None:
        host, array = transfer.host, transfer.array
        self.address = transfer.address
        self.host_address = address_of(host)
        self.is_pinned = transfer.is_pinned
        self._size = host.nbytes
        self._is_cut = array is not None and array.flags.c_contiguous
        self._piece = piece if self._is_cut else self._size
        self.starts = range(0, self._size, piece) if self._is_cut else range(1)
        self._host = host
        self._array = array
        self._array_address = address_of(array) if array is not None and self._is_cut else 0
        self._copy = copies.copy

    def size_at(self, start: int) -> int:
        rest = self._size - start
        return self._piece if self._piece < rest else rest

    def fill(self, start: int) -> None:
        """Copy a piece from the array to the host's memory."""
        if self._is_cut:
            self._copy(self.host_address + start, self._array_address + start, self.size_at(start))
        elif self._array is not None:
            np.copyto(self._host, self._array)

    def empty(self, start: int) -> None:
        """Copy a piece from the host's memory to the array."""
        if self._is_cut:
            self._copy(self._array_address + start, self.host_address + start, self.size_at(start))
        elif self._array is not None:
            np.copyto(self._array, self._host)


_Piece = tuple[ChunkedTransfer, int]  # and the byte offset of one of its pieces


class Copier:
    """Copies transfers to and from one device. Threads may share it; each must be inside ``CudaRuntime.device_guard``.

    Args:
        threads: the most threads for one copy, the calling one included.
        piece: the most bytes of a piece. Transfers of less than four pieces are cut into quarters, but not below a
            quarter of ``piece``.

    Raises:
        Exception: ONNX Runtime's own, if the system cannot start the threads.
    """

    def __init__(self, runtime: CudaRuntime, threads: int, piece: int) -> None:
        self._runtime = runtime
        self._piece = piece
        self._streams: deque[Stream] = deque()
        self._events: deque[Event] = deque()
        self._copies = parallel_copy(threads, runtime.ordinal)

    def to_device(self, transfers: list[Transfer]) -> None:
        """Copy to the device and return when all is copied. After CudaCallError no copy is under way any more."""
        runtime = self._runtime
        with self._stream() as stream:
            for whole, start in self._cut(transfers):
                whole.fill(start)
                copy = runtime.copy_pinned if whole.is_pinned else runtime.copy
                copy(whole.address + start, whole.host_address + start, whole.size_at(start), stream)

    def from_device(self, transfers: list[Transfer]) -> None:
        """Copy from the device, as :meth:`to_device` does to it."""
        runtime = self._runtime
        awaited: list[tuple[_Piece, Event | None]] = []
        with self._stream() as stream:
            for whole, start in self._cut(transfers):
                event = None
                if whole.is_pinned:
                    event = self._new_event()
                    runtime.copy_pinned(whole.host_address + start, whole.address + start, whole.size_at(start), stream)
                    runtime.record_now(event.handle, stream)
                awaited.append(((whole, start), event))
            for (whole, start), event in awaited:
                if event is None:  # into ordinary memory: CUDA stages it and waits for the stream
                    runtime.copy(whole.host_address + start, whole.address + start, whole.size_at(start), stream)
                    continue
                if not runtime.has_passed(event.handle):
                    runtime.wait_for(event.handle)
                whole.empty(start)
        self._events.extend(event for _, event in awaited if event is not None)

    def _cut(self, transfers: list[Transfer]) -> list[_Piece]:
        size = sum(transfer.host.nbytes for transfer in transfers)
        # Small pieces keep the GPU from waiting long for the first one and after the last one.
        piece = min(self._piece, max(-(-size // 4), self._piece // 4))
        chunked = [ChunkedTransfer(transfer, piece, self._copies) for transfer in transfers]
        return [(whole, start) for whole in chunked for start in whole.starts]

    def _new_event(self) -> Event:
        try:
            return self._events.pop()
        except IndexError:
            return Event(self._runtime)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[int]:
        """Lend a stream to one run alone, so that no run waits for the copies of another.

        On leaving, all work in the stream is done, since the memory may be reused from then on.
        """
        try:
            stream = self._streams.pop()
        except IndexError:
            stream = Stream(self._runtime)
        try:
            yield stream.handle
        finally:
            try:
                self._runtime.synchronise(stream.handle)
            except BaseException:  # an interrupt, possibly before the wait began
                self._runtime.synchronise(stream.handle)
                raise
            finally:
                self._streams.append(stream)
