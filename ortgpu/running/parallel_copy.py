"""Copies from host memory to host memory, by several threads that do without the interpreter.

Threads of Python wait for the interpreter lock before each piece that they copy, and are woken late: 16 MB took four of
them twice as long as here. ONNX Runtime copies the slices that a Gather selects in the threads of its session
(GatherCopyData in gather.cc), and lets go of the lock meanwhile.
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

_SLICES_OF_A_THREAD = 4  # so that one that is woken late has less to do
_ALIGNMENT = 64  # bytes, a line of the cache
_AWAKE = 500  # µs in which a thread looks for work; to be woken takes one 80 µs on an H200's host

_creating = fork_safe_lock()
_shared: weakref.WeakValueDictionary[tuple[int, int, int], ParallelCopy] = weakref.WeakValueDictionary()


class ParallelCopy:
    """Threads of Python may share it, each of which takes part in its own copies. The threads end with it.

    Args:
        threads: at most, for one copy, with the one that asks for it.

    Raises:
        RuntimeError: the system does not give so many threads.
        Exception: ONNX Runtime's own.
    """

    def __init__(self, threads: int) -> None:
        _check_that_there_can_be(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # one would be kept for each size that is ever copied, and none is used
        # Awake until the next piece, and not for longer: idle, they must not take a core each
        spins = load_runtime().release >= (1, 31)  # which knows the second of these
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_AWAKE))
        self._indices = np.arange(threads * _SLICES_OF_A_THREAD, dtype=np.int64)
        self._on_host = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
        self._bindings: deque[Any] = deque()
        # No InferenceSession, which would be one of the process's: for guards, for tracers, in a list of sessions
        self._sess = native.InferenceSession(options, _gather(), False, False)
        self._sess.initialize_session([CPU], [{}], set())
        lifetime.watch(self)

    def copy(self, to: int, source: int, size: int) -> None:
        """``size`` bytes between addresses, of memory that does not overlap."""
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
    """That of a device, whose threads end when nobody refers to it any more: GPUs that shared one would wait for one
    another. Raises what :class:`ParallelCopy` raises."""
    with _creating:
        key = os.getpid(), ordinal, threads  # threads of a parent process are not in its child
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = ParallelCopy(threads)
        return found


def _check_that_there_can_be(threads: int) -> None:
    """Raises RuntimeError where there can not. ONNX Runtime, given a part of them, waits for these for ever, with the
    interpreter lock."""
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
    """A model whose output has those parts of its first input that its second one says. See onnx.proto for numbers."""

    def text(number: int, value: str) -> bytes:
        return length_delimited(number, value.encode())

    def value_info(name: str, element_type: int, rank: int) -> bytes:
        shape = length_delimited(1, b"") * rank  # dimensions of which nothing is said
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
