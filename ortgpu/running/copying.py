"""Copies between ordinary arrays and the device, through pinned memory, by several threads.

A transfer is cut into pieces: while the GPU fetches one from pinned memory, the next is copied there, and the other
way. Whoever asks for a copy works on it too, has a CUDA stream for it to itself, and has waited for that at the end.
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


class _Whole:
    """A transfer and where its pieces start."""

    def __init__(self, transfer: Transfer, piece: int, copies: ParallelCopy) -> None:
        host, array = transfer.host, transfer.array
        self.address = transfer.address
        self.host_address = _address_of(host)
        self.is_pinned = transfer.is_pinned
        self._size = host.nbytes
        self._is_cut = array is not None and array.flags.c_contiguous
        self._piece = piece if self._is_cut else self._size
        self.starts = range(0, self._size, piece) if self._is_cut else range(1)
        self._host = host
        self._array = array
        self._array_address = _address_of(array) if array is not None and self._is_cut else 0
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
        """The other way."""
        if self._is_cut:
            self._copy(self._array_address + start, self.host_address + start, self.size_at(start))
        elif self._array is not None:
            np.copyto(self._array, self._host)


_Piece = tuple[_Whole, int]  # and where it starts


class Copier:
    """Threads may share it, each on the device and aside (CudaRuntime.aside).

    Args:
        threads: at most, the one that asks included.
        piece: bytes of one, at most; of what is smaller than four, a quarter, down to a quarter of it.

    Raises:
        Exception: ONNX Runtime's own, where the system gives no threads.
    """

    def __init__(self, runtime: CudaRuntime, threads: int, piece: int) -> None:
        self._runtime = runtime
        self._piece = piece
        self._streams: deque[Stream] = deque()
        self._events: deque[Event] = deque()
        self._copies = parallel_copy(threads, runtime.ordinal)

    def to_device(self, transfers: list[Transfer]) -> None:
        """Returns when it is done. Raises CudaCallError, when nothing is under way any more."""
        runtime = self._runtime
        with self._stream() as stream:
            for whole, start in self._cut(transfers):
                whole.fill(start)
                copy = runtime.copy_pinned if whole.is_pinned else runtime.copy
                copy(whole.address + start, whole.host_address + start, whole.size_at(start), stream)

    def from_device(self, transfers: list[Transfer]) -> None:
        """As :meth:`to_device`."""
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
                if event is None:  # into ordinary memory: CUDA copies it aside, and waits for the stream
                    runtime.copy(whole.host_address + start, whole.address + start, whole.size_at(start), stream)
                    continue
                if not runtime.has_passed(event.handle):
                    runtime.wait_for(event.handle)
                whole.empty(start)
        self._events.extend(event for _, event in awaited if event is not None)

    def _cut(self, transfers: list[Transfer]) -> list[_Piece]:
        size = sum(transfer.host.nbytes for transfer in transfers)
        # So that the GPU waits for little at the beginning, and for little at the end
        piece = min(self._piece, max(-(-size // 4), self._piece // 4))
        wholes = [_Whole(transfer, piece, self._copies) for transfer in transfers]
        return [(whole, start) for whole in wholes for start in whole.starts]

    def _new_event(self) -> Event:
        try:
            return self._events.pop()
        except IndexError:
            return Event(self._runtime)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[int]:
        """One that nobody else uses meanwhile, so that nobody waits for the copies of another run.

        Everything in it is done when the context ends: the memory must not be another's before.
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
            except BaseException:  # an interrupt, perhaps before it waited
                self._runtime.synchronise(stream.handle)
                raise
            finally:
                self._streams.append(stream)


def _address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
