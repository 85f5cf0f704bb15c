"""Copies between ordinary arrays and the device, in threads, through pinned memory.

A transfer is cut into pieces: while the GPU fetches one from pinned memory, threads copy the next ones there. Each
thread has a CUDA stream to itself meanwhile, and has waited for it when its work is done.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .background import ForkSafeLock
from .cudart import CudaRuntime, Stream
from .threads import Executor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_creating = ForkSafeLock()
_executors: weakref.WeakValueDictionary[tuple[int, int], Executor] = weakref.WeakValueDictionary()


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
    """Threads may share it. The threads that help are those of all copiers of the process."""

    def __init__(self, runtime: CudaRuntime, threads: int, piece: int) -> None:
        self._runtime = runtime
        self._threads = threads
        self._piece = piece
        self._idle: deque[Stream] = deque()
        self._executor = _shared_executor(threads)

    def to_device(self, transfers: list[Transfer]) -> None:
        """Returns when it is done. Raises CudaCallError, when nothing is under way any more."""
        self._in_threads(self._to_device, transfers)

    def from_device(self, transfers: list[Transfer]) -> None:
        """As :meth:`to_device`."""
        self._in_threads(self._from_device, transfers)

    def _in_threads(self, function: Callable[[Iterator[_Piece]], None], transfers: list[Transfer]) -> None:
        wholes = [_Whole(transfer, self._piece) for transfer in transfers]
        pieces = [(whole, start) for whole in wholes for start in whole.starts]
        rest = iter(pieces)  # whoever works takes the next
        futures = []
        try:
            with contextlib.suppress(RuntimeError):  # at the end of the program, when they have ended
                for _ in range(min(len(pieces), self._threads) - 1):
                    futures.append(self._executor.submit(function, rest))  # noqa: PERF401 - those before a failure count
            function(rest)
        finally:
            wait(futures)
        failures = [failure for failure in (future.exception() for future in futures) if failure is not None]
        del futures  # they refer to what is raised, and that to this frame
        if failures:
            try:
                raise failures[0]
            finally:
                del failures

    def _to_device(self, pieces: Iterator[_Piece]) -> None:
        runtime = self._runtime
        with runtime.aside(), self._stream() as stream:
            try:
                for whole, start in pieces:
                    whole.fill(start)
                    copy = runtime.copy_pinned if whole.is_pinned else runtime.copy
                    copy(whole.address + start, whole.host_address + start, whole.size_at(start), stream)
            finally:
                runtime.synchronise(stream)  # the memory must not be another's before

    def _from_device(self, pieces: Iterator[_Piece]) -> None:
        runtime = self._runtime
        with runtime.aside(), self._stream() as stream:
            for whole, start in pieces:
                copy = runtime.copy_pinned if whole.is_pinned else runtime.copy
                try:
                    copy(whole.host_address + start, whole.address + start, whole.size_at(start), stream)
                finally:
                    runtime.synchronise(stream)
                whole.empty(start)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[int]:
        """One that nobody else uses meanwhile, so that nobody waits for the copies of another run."""
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = Stream(self._runtime)
        try:
            yield stream.handle
        finally:
            self._idle.append(stream)


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.asarray(array).reshape(-1).view(np.uint8)


def _address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _shared_executor(threads: int) -> Executor:
    """Its threads end when nobody refers to it any more; those of a parent process are not in its child."""
    with _creating:
        key = os.getpid(), threads
        executor = _executors.get(key)
        if executor is None:
            executor = _executors[key] = Executor(threads, "ortgpu-copy")
        return executor
