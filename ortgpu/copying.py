"""Copies between ordinary arrays and the device, in threads, through pinned memory.

A transfer is cut into pieces: while the GPU fetches one from pinned memory, threads copy the next ones there, and the
other way. Whoever asks for a copy works on it too, has a CUDA stream for it to itself, and has waited for that when it
is done.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .background import ForkSafeLock
from .cudart import CudaRuntime, Event, Stream
from .threads import Executor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_creating = ForkSafeLock()
_executors: weakref.WeakValueDictionary[tuple[int, int, int], Executor] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Transfer:
    """Between ``address`` on the device and ``host``, which the GPU reads or writes; with ``array``, which it does not,
    as the other end, and ``host`` pinned. ``owner`` keeps the memory of the device."""

    address: int
    host: NDArray[Any]
    array: NDArray[Any] | None
    owner: object


class _Whole:
    """A transfer and where its pieces start. Cut by who copies: other threads wait while one prepares."""

    def __init__(self, transfer: Transfer, piece: int) -> None:
        host, array = transfer.host, transfer.array
        self.address, self._owner = transfer.address, transfer.owner
        self.host_address = _address_of(host)
        self.is_pinned = array is not None
        self._size = host.nbytes
        self._is_cut = array is not None and array.flags.c_contiguous
        self._piece = piece if self._is_cut else self._size
        self.starts = range(0, self._size, piece) if self._is_cut else range(1)
        self._host = _as_bytes(host) if self._is_cut else host
        self._array: Any = _as_bytes(array) if array is not None and self._is_cut else array

    def size_at(self, start: int) -> int:
        rest = self._size - start
        return self._piece if self._piece < rest else rest

    def fill(self, start: int) -> None:
        """Copy a piece from the array to the host's memory. NumPy lets go of the interpreter lock for it."""
        if self._is_cut:
            end = start + self._piece
            self._host[start:end] = self._array[start:end]
        elif self._array is not None:
            np.copyto(self._host, self._array)

    def empty(self, start: int) -> None:
        """The other way."""
        if self._is_cut:
            end = start + self._piece
            self._array[start:end] = self._host[start:end]
        elif self._array is not None:
            np.copyto(self._array, self._host)


_Piece = tuple[_Whole, int]  # and where it starts


class Copier:
    """Threads may share it, each on the device and aside (CudaRuntime.aside). The threads that help are those of all
    copiers for this device: several GPUs that shared theirs waited for one another.

    Args:
        threads: at most, the one that asks included; one for so many bytes as a piece has.
        piece: bytes of one, at most; down to a quarter of it where a thread would have less than two otherwise.
    """

    def __init__(self, runtime: CudaRuntime, threads: int, piece: int) -> None:
        self._runtime = runtime
        self._threads = threads
        self._piece = piece
        self._streams: deque[Stream] = deque()
        self._events: deque[Event] = deque()
        self._use_device = runtime.prepared_use_device()
        self._executor = _shared_executor(threads, runtime)

    def to_device(self, transfers: list[Transfer]) -> None:
        """Returns when it is done. Raises CudaCallError, when nothing is under way any more."""
        pieces, threads = self._cut(transfers)
        with self._stream() as stream:
            self._together(functools.partial(self._fill, iter(pieces), stream), threads)

    def from_device(self, transfers: list[Transfer]) -> None:
        """As :meth:`to_device`."""
        runtime = self._runtime
        pieces, threads = self._cut(transfers)
        awaited: list[tuple[_Piece, Event | None]] = []
        with self._stream() as stream:
            for whole, start in pieces:
                event = None
                if whole.is_pinned:
                    event = self._new_event()
                    runtime.copy_pinned(whole.host_address + start, whole.address + start, whole.size_at(start), stream)
                    runtime.record_now(event.handle, stream)
                awaited.append(((whole, start), event))
            self._together(functools.partial(self._empty, iter(awaited)), threads)
        self._events.extend(event for _, event in awaited if event is not None)

    def _cut(self, transfers: list[Transfer]) -> tuple[list[_Piece], int]:
        """The pieces, and how many threads are to copy them."""
        size = sum(transfer.host.nbytes for transfer in transfers)
        threads = max(1, min(self._threads, -(-size // self._piece)))
        # Two pieces for each thread: the GPU fetches the first ones meanwhile. Each further one cost 50 µs of 16 MB:
        # threads that wait for the interpreter lock are woken late.
        piece = min(self._piece, max(-(-size // (2 * threads)), self._piece // 4))
        pieces = [(whole, start) for whole in (_Whole(each, piece) for each in transfers) for start in whole.starts]
        return pieces, min(threads, len(pieces))

    def _together(self, work: Callable[[], None], threads: int) -> None:
        def help_with_it() -> None:
            self._use_device()
            work()

        self._executor.together(work, threads - 1, help_with_it)

    def _fill(self, pieces: Iterator[_Piece], stream: int) -> None:
        """Whoever works takes the next."""
        runtime = self._runtime
        for whole, start in pieces:
            whole.fill(start)
            copy = runtime.copy_pinned if whole.is_pinned else runtime.copy
            copy(whole.address + start, whole.host_address + start, whole.size_at(start), stream)

    def _empty(self, pieces: Iterator[tuple[_Piece, Event | None]]) -> None:
        runtime = self._runtime
        for (whole, start), event in pieces:
            if event is not None:
                if not runtime.has_passed(event.handle):
                    runtime.wait_for(event.handle)
                whole.empty(start)
                continue
            with self._stream() as stream:  # into ordinary memory: CUDA copies it aside, and waits for the stream
                runtime.copy(whole.host_address + start, whole.address + start, whole.size_at(start), stream)

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


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.asarray(array).reshape(-1).view(np.uint8)


def _address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _shared_executor(threads: int, runtime: CudaRuntime) -> Executor:
    """Its threads end when nobody refers to it any more; those of a parent process are not in its child.

    They are aside for good, and on the device.
    """
    with _creating:
        key = os.getpid(), runtime.ordinal, threads
        executor = _executors.get(key)
        if executor is None:
            executor = _executors[key] = Executor(threads, "ortgpu-copy", runtime.leave_captures_alone)
        return executor
