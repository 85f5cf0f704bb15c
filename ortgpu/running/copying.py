"""Copies between ordinary arrays and the device, through pinned memory, by several threads.

A transfer is cut into pieces. While the GPU reads one piece from pinned memory, the next is copied there; in the other
direction likewise. The calling thread takes part in the copy, uses a CUDA stream of its own, and waits for it.

The threads of a copy belong to a small ONNX Runtime session. All of them copy each input of its Concat (StridedCopy in
copy.h), without the interpreter lock. Python threads wait for that lock before each piece and wake late: four of them
took twice as long for 16 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..process.background import Thread, fork_safe_lock, is_of_a_handler, this_thread
from ..provider import lifetime
from ..provider.runtime import load_runtime
from .cudart import CudaRuntime, Event, Stream, address_of
from .onnxruntimes import session_on_cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("ortgpu")

# Bytes. Threads copy larger arrays faster than CUDA does, if the copy is the only extra work: in a graph, and beside a
# larger array. Runs with 2 MiB in and out gained although their other work took longer than plain run's
# (benchmarks/thresholds.py, an H200 on 2026-11-20).
IN_THREADS_FROM = 2 << 20
PIECE = 32 << 20  # bytes
# 12 threads are up to a fifth faster than 8, and 16 are hardly faster than 12, on 16 cores and on 32 (2026-11-23).
COPY_THREADS = 12  # fewer where the process has fewer cores

_SPIN_MICROSECONDS = 500  # µs: the time that an idle thread spins. Waking it takes 80 µs on the host of an H200.

# <ir_version: 8, opset_import: ["": 13]>
# join (uint8[?] a, ..., uint8[?] p) => (uint8[?] to) { to = Concat <axis = 0> (a, ..., p) }
_PARTS = "abcdefghijklmnop"
_MODEL = b"".join(
    [
        b"\x08\x08:\xd3\x02\nK",
        *[b"\n\x01%c" % ord(part) for part in _PARTS],
        b'\x12\x02to"\x06Concat*\x0b\n\x04axis\x18\x00\xa0\x01\x02:\x00\x12\x04join',
        *[b"Z\r\n\x01%c\x12\x08\n\x06\x08\x02\x12\x02\n\x00" % ord(part) for part in _PARTS],
        b"b\x0e\n\x02to\x12\x08\n\x06\x08\x02\x12\x02\n\x00B\x04\n\x00\x10\r",
    ]
)

_creating = fork_safe_lock()
_shared: weakref.WeakValueDictionary[tuple[int, int, int], ParallelCopy] = weakref.WeakValueDictionary()


class ParallelCopy:
    """A pool of threads that copy host memory. The threads end with this object.

    Python threads may share it. Each calling thread takes part in its own copies.

    Args:
        threads: the most threads for one copy, the calling one included.

    Raises:
        RuntimeError: the system cannot start so many threads.
        Exception: ONNX Runtime's own.
    """

    def __init__(self, threads: int) -> None:
        _check_that_there_can_be(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # it would keep an unused pattern for each size
        # Threads spin only until the next piece, because idle threads must not occupy a core each.
        spins = load_runtime().release >= (1, 31)  # Older releases lack spin_duration_us.
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_MICROSECONDS))
        self._on_host = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
        self._bindings: deque[tuple[Any, int]] = deque()  # with the number of parts of the last copy
        self._sess = session_on_cpu(_MODEL, options)
        lifetime.watch(self)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy ``size`` bytes from address ``source`` to address ``to``. The memory must not overlap."""
        self._join(to, [(source, size)])

    def join(self, to: int, parts: Sequence[tuple[int, int]]) -> None:
        """Copy parts, each an address and a number of bytes, one after another to address ``to``."""
        for first in range(0, len(parts), len(_PARTS)):
            some = parts[first : first + len(_PARTS)]
            self._join(to, some)
            to += sum(size for _, size in some)

    def _join(self, to: int, parts: Sequence[tuple[int, int]]) -> None:
        """Copy at most 16 parts."""
        try:
            binding, count = self._bindings.pop()
        except IndexError:
            binding, count = native.SessionIOBinding(self._sess), len(_PARTS)
        for name, (source, size) in zip(_PARTS, parts, strict=False):
            binding.bind_input(name, self._on_host, np.uint8, [size], source)
        for name in _PARTS[len(parts) : count]:
            binding.bind_input(name, self._on_host, np.uint8, [0], to)
        binding.bind_output("to", self._on_host, np.uint8, [sum(size for _, size in parts)], to)
        self._sess.run_with_iobinding(binding, None)
        self._bindings.append((binding, len(parts)))


class _OneThread(ParallelCopy):
    """The calling thread alone."""

    def __init__(self) -> None:
        pass

    def _join(self, to: int, parts: Sequence[tuple[int, int]]) -> None:
        for source, size in parts:
            ctypes.memmove(to, source, size)
            to += size


def copy_threads() -> int:
    """Return the number of threads for a copy: no more than the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(COPY_THREADS, cores)


def parallel_copy(threads: int, ordinal: int) -> ParallelCopy:
    """Return the ParallelCopy of a device, shared while anything refers to it.

    Each device has its own, so that copies for different GPUs do not wait for one another. Where the system cannot
    start the threads, the calling one copies alone.
    """
    with this_thread.holds, _creating:
        key = os.getpid(), ordinal, threads  # a forked child does not have the threads of its parent
        copies = _shared.get(key)
        if copies is None:
            try:
                copies = ParallelCopy(threads)
            except Exception as error:
                if is_of_a_handler(error):
                    raise
                logger.debug("arrays are copied by one thread: %s", str(error))
                copies = _OneThread()
            _shared[key] = copies
        return copies


def _check_that_there_can_be(threads: int) -> None:
    """Raise RuntimeError if the system cannot start so many threads.

    If ONNX Runtime can start only some of its threads, it waits forever, with the interpreter lock held.
    """
    over: SimpleQueue[None] = SimpleQueue()
    pool: list[Thread] = []
    try:
        for _ in range(threads):
            Thread(over.get, "ortgpu-room").start(pool.append)
    finally:
        for _ in pool:
            over.put(None)
        for thread in pool:
            thread.wait()


class Transfer:
    """A copy between ``address`` on the device and the memory ``host``, for the GPU to read or write.

    If ``array`` is other memory, it is copied to or from ``host``, in pieces if it is contiguous.

    Args:
        pinned: becomes ``host``; it may be ``array``. None: CUDA copies ordinary memory.
        address: device memory that the caller keeps until the copy is done.
    """

    def __init__(self, array: NDArray[Any], pinned: NDArray[Any] | None, address: int) -> None:
        self.address = address
        self.is_pinned = pinned is not None
        self.size = array.nbytes
        self._host = np.asarray(array, order="C") if pinned is None else pinned
        self.host_address = address_of(self._host)
        self._array = None if pinned is None or pinned is array else array
        self.is_cut = self._array is not None and array.flags.c_contiguous
        self._array_address = address_of(array) if self.is_cut else 0

    def fill(self, start: int, size: int, copies: ParallelCopy) -> None:
        """Copy a piece from the array to the host's memory."""
        if self.is_cut:
            copies.copy(self.host_address + start, self._array_address + start, size)
        elif self._array is not None:
            np.copyto(self._host, self._array)

    def empty(self, start: int, size: int, copies: ParallelCopy) -> None:
        """Copy a piece from the host's memory to the array."""
        if self.is_cut:
            copies.copy(self._array_address + start, self.host_address + start, size)
        elif self._array is not None:
            np.copyto(self._array, self._host)


_Piece = tuple[Transfer, int, int]  # a transfer, and the byte offset and the size of one of its pieces


class Copier:
    """Copies transfers to and from one device. Threads may share it; each must be inside ``CudaRuntime.device_guard``.

    Args:
        threads: the most threads for one copy, the calling one included; :func:`copy_threads` by default.
        piece: the most bytes of a piece. Transfers of less than four pieces are cut into quarters, but not below a
            quarter of ``piece``.
    """

    def __init__(self, runtime: CudaRuntime, threads: int | None = None, piece: int | None = None) -> None:
        self._runtime = runtime
        self._piece = piece or PIECE
        self._streams: deque[Stream] = deque()
        self._events: deque[Event] = deque()
        self._copies = parallel_copy(threads or copy_threads(), runtime.ordinal)

    def send(self, transfers: list[Transfer], stream: int) -> None:
        """Begin to copy to the device. Keep the transfers until the stream is synchronised."""
        for transfer, start, size in self._cut(transfers):
            transfer.fill(start, size, self._copies)
            copy = self._runtime.copy_pinned if transfer.is_pinned else self._runtime.copy
            copy(transfer.address + start, transfer.host_address + start, size, stream)

    def fetch(self, transfers: list[Transfer], stream: int) -> None:
        """Copy from the device. All is copied once the stream is synchronised."""
        runtime = self._runtime
        awaited: list[tuple[_Piece, Event | None]] = []
        for transfer, start, size in self._cut(transfers):
            event = None
            if transfer.is_pinned:
                event = self._new_event()
                runtime.copy_pinned(transfer.host_address + start, transfer.address + start, size, stream)
                runtime.record_now(event.handle, stream)
            awaited.append(((transfer, start, size), event))
        for (transfer, start, size), event in awaited:
            if event is None:  # CUDA stages ordinary memory and waits for the stream.
                runtime.copy(transfer.host_address + start, transfer.address + start, size, stream)
                continue
            if not runtime.has_passed(event.handle):
                runtime.wait_for(event.handle)
            transfer.empty(start, size, self._copies)
        self._events.extend(event for _, event in awaited if event is not None)

    def _cut(self, transfers: list[Transfer]) -> list[_Piece]:
        total = sum(transfer.size for transfer in transfers)
        # Small pieces keep the GPU from waiting long for the first one and after the last one.
        piece = min(self._piece, max(-(-total // 4), self._piece // 4))
        pieces = []
        for transfer in transfers:
            step = piece if transfer.is_cut else transfer.size
            pieces += [(transfer, start, min(step, transfer.size - start)) for start in range(0, transfer.size, step)]
        return pieces

    def _new_event(self) -> Event:
        try:
            return self._events.pop()
        except IndexError:
            return Event(self._runtime)

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        """Lend a stream to one run alone, so that no run waits for the copies of another.

        On leaving, all work in the stream is done, also after an error, since the memory may be reused from then on.
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
