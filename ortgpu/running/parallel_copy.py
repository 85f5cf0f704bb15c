"""Copies between host memory by several threads, without the interpreter lock.

Python threads wait for the interpreter lock before each piece and wake late: four of them took twice as long for 16 MB.
Here a small ONNX Runtime session copies. Its threads copy the slices that a Gather selects (GatherCopyData in
gather.cc), with the interpreter lock released.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..model.protobuf import length_delimited, whole_number
from ..process.background import Thread, fork_safe_lock
from ..provider import lifetime
from ..provider.requests import CPU
from ..provider.runtime import load_runtime

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

_SLICES_OF_A_THREAD = 4  # small slices, so that a thread that wakes late has less to do
_ALIGNMENT = 64  # bytes, a cache line
_AWAKE = 500  # µs for which a thread spins; waking it takes 80 µs on the host of an H200

_creating = fork_safe_lock()
_shared: weakref.WeakValueDictionary[tuple[int, int, int], ParallelCopy] = weakref.WeakValueDictionary()


class ParallelCopy:
    """A pool of threads that copy host memory. The threads end with this object.

    Python threads may share it. Each calling thread takes part in its own copies.

    Args:
        threads: the most threads for one copy, the calling one included.

    Raises:
        RuntimeError: the system cannot start as many threads.
        Exception: ONNX Runtime's own.
    """

    def __init__(self, threads: int) -> None:
        _check_that_there_can_be(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # it would keep an unused pattern for each size
        # Threads spin until the next piece but not longer, since idle threads must not occupy a core each.
        spins = load_runtime().release >= (1, 31)  # which knows spin_duration_us
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_AWAKE))
        self._indices = np.arange(threads * _SLICES_OF_A_THREAD, dtype=np.int64)
        self._on_host = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
        self._bindings: deque[Any] = deque()
        # Not an InferenceSession, which guards, tracers and ortgpu.sessions() would see
        self._sess = native.InferenceSession(options, _gather(), False, False)
        self._sess.initialize_session([CPU], [{}], set())
        lifetime.watch(self)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy ``size`` bytes from address ``source`` to address ``to``. The memory must not overlap."""
        count = len(self._indices)
        slice_size = size // count // _ALIGNMENT * _ALIGNMENT
        done = count * slice_size
        if done:
            self._gather(to, source, [count, slice_size])
        if done < size:
            ctypes.memmove(to + done, source + done, size - done)

    def _gather(self, to: int, source: int, shape: list[int]) -> None:
        try:
            binding = self._bindings.pop()
        except IndexError:
            binding = native.SessionIOBinding(self._sess)
            binding.bind_input("indices", self._on_host, np.int64, shape[:1], self._indices.ctypes.data)
        binding.bind_input("from", self._on_host, np.uint8, shape, source)
        binding.bind_output("to", self._on_host, np.uint8, shape, to)
        self._sess.run_with_iobinding(binding, None)
        self._bindings.append(binding)


def parallel_copy(threads: int, ordinal: int) -> ParallelCopy:
    """Return the ParallelCopy of a device, shared while anything refers to it.

    Each device has its own, so that copies for different GPUs do not wait for one another. Raises what
    :class:`ParallelCopy` raises.
    """
    with _creating:
        key = os.getpid(), ordinal, threads  # a forked child does not have the threads of its parent
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = ParallelCopy(threads)
        return found


def _check_that_there_can_be(threads: int) -> None:
    """Raise RuntimeError if as many threads cannot be started.

    If ONNX Runtime can start only some of its threads, it waits forever, with the interpreter lock held.
    """
    over: SimpleQueue[None] = SimpleQueue()
    made: list[Thread] = []
    try:
        for _ in range(threads):
            Thread(over.get, "ortgpu-room").start(made.append)
    finally:
        for _ in made:
            over.put(None)
        for thread in made:
            thread.wait()


def _gather() -> bytes:
    """Return a model with one Gather, which copies rows of its first input. The field numbers are of onnx.proto."""

    def text(number: int, value: str) -> bytes:
        return length_delimited(number, value.encode())

    def value_info(name: str, element_type: int, rank: int) -> bytes:
        shape = length_delimited(1, b"") * rank  # unknown dimensions
        tensor_type = whole_number(1, element_type) + length_delimited(2, shape)
        return text(1, name) + length_delimited(2, length_delimited(1, tensor_type))

    node = text(1, "from") + text(1, "indices") + text(2, "to") + text(4, "Gather")
    inputs = length_delimited(11, value_info("from", _UINT8, 2)) + length_delimited(
        11, value_info("indices", _INT64, 1)
    )
    outputs = length_delimited(12, value_info("to", _UINT8, 2))
    graph = length_delimited(1, node) + text(2, "copy") + inputs + outputs
    operators = text(1, "") + whole_number(2, 13)
    return whole_number(1, 8) + length_delimited(7, graph) + length_delimited(8, operators)


_UINT8, _INT64 = 2, 7  # TensorProto.DataType
