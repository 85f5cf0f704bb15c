"""Runs whose large arrays are copied in threads through pinned memory, with results in memory that is used again.

What plain ``run`` does with an array in ordinary memory: the CUDA driver copies it aside piece by piece, in one thread,
and each result is a fresh array whose pages the system clears first. Here inputs go into memory of the device before
the run, outputs stay there, and both are copied by :mod:`ortgpu.running.copying`. The run is ONNX Runtime's
``run_with_ortvaluevector``, which ends in the same C++ function as ``run``, and differs in that it is told on which
device outputs are wanted (onnxruntime_pybind_state.cc; InferenceSession::Run in inference_session.cc).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..model.tensor_types import DTYPES
from ..provider.lifetime import device_of
from .copying import Copier, Transfer
from .cudart import CudaRuntime
from .pinned import PinnedMemory, memory_of
from .recycling import OrdinaryMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait

_KINDS = frozenset(DTYPES.values())

# Runs on the GPU at a time, while others copy. More of them share it, end together, and leave it idle while all copy:
# batches of 256 of ResNet-50, in three threads, took 23.8 ms each on an H200, and take 20.6.
_AT_A_TIME = 2


class StagedRuns:
    """Of one session. Threads may share it."""

    def __init__(self, session: Any, runtime: CudaRuntime, staged_from: int, threads: int, piece: int) -> None:
        inner, device = session._sess, device_of(session)
        self._staged_from = staged_from
        self._inputs = _on_device(inner.inputs_meta, inner.input_meminfos, device.kind)
        self._outputs = _on_device(inner.outputs_meta, inner.output_meminfos, device.kind)
        self._places = {
            True: onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device(),
            False: onnxruntime.OrtDevice.make("cpu", 0)._get_c_device(),
        }
        self._options = onnxruntime.RunOptions()
        self._ordinary = OrdinaryMemory(session._pinned_memory_limit)
        self._runtime = runtime
        self._copier = Copier(runtime, threads, piece)
        self._turns: SimpleQueue[bool] = SimpleQueue()
        for _ in range(_AT_A_TIME):
            self._turns.put(True)

    def run(self, session: Any, output_names: Any, feed: Any) -> list[Any] | None:
        """What ``run`` gives; None where only plain ``run`` knows what to make of the arguments. Raises anything."""
        if output_names is not None and not isinstance(output_names, (list, tuple)):
            return None
        names = list(output_names or self._outputs)
        given = dict(feed)  # another thread may change it, and small values share the memory of its arrays
        # ONNX Runtime takes memory for it, which must not spoil what another session captures
        with self._runtime.device_guard():
            return self._run(session._sess, memory_of(session), names, given)

    def _run(self, inner: Any, memory: PinnedMemory, names: list[str], given: dict[str, Any]) -> list[Any] | None:
        values = self._feed(inner, memory, given)
        if values is None:
            return None
        fetched = native.OrtValueVector()
        places = [self._places[self._outputs[name]] for name in names]
        # A semaphore loses a turn to an interrupt, since it is taken in Python, and with the last one everybody waits
        # for ever. A step of a loop is one of C: the interpreter looks for signals after calls, not between it and try.
        for turn in iter(self._turns.get, None):
            try:
                # Ends when the outputs are complete: disable_synchronize_execution_providers, a run option, is not set.
                inner.run_with_ortvaluevector(self._options, list(given), values, names, fetched, places)
            finally:
                self._turns.put(turn)
            break
        return self._results(memory, names, fetched)

    def close(self) -> None:
        """Give back what no array uses."""
        self._ordinary.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Results outlive this, and keep the memory that they are in, but not what is idle beside it. By argument: at
        # the end of the interpreter this module has no names left.
        if "_ordinary" in self.__dict__ and not is_finalizing():
            self.close()

    def _feed(self, inner: Any, memory: PinnedMemory, given: dict[str, Any]) -> Any:
        """ONNX Runtime's values, complete on the device."""
        values, transfers = native.OrtValueVector(), []
        for name, array in given.items():
            if not isinstance(array, np.ndarray) or array.dtype not in _KINDS:
                return None
            array = np.asarray(array)  # a subclass may have ideas of its own of copies
            host, is_ready = None, False
            if array.nbytes >= self._staged_from and self._inputs.get(name, False):
                is_ready = memory.is_pinned(array)
                host = array if is_ready else memory.try_empty(array.shape, array.dtype)
            if host is None:
                values.push_back(native.OrtValue.ortvalue_from_numpy(array, self._places[False]))
                continue
            # From the session's arena, like the copy that plain run makes: memory and limits are the same. Without a
            # stream it gives only memory that no run still uses (safe_to_use in bfc_arena.cc).
            value = inner.create_ortvalue_from_shape_and_type(array.shape, array.dtype.type, self._places[True])
            # In a stream of its own also from pinned memory: there it overlaps with what other runs compute.
            transfers.append(Transfer(value.data_ptr(), host, None if is_ready else array, value, is_pinned=True))
            values.push_back(value)
        self._copier.to_device(transfers)
        return values

    def _results(self, memory: PinnedMemory, names: list[str], values: Any) -> list[Any]:
        results, transfers = [], []
        for number, name in enumerate(names):  # the vector's own iterator ends with a C++ exception, of 50 µs
            value = values[number]
            result, transfer = self._result(memory, value) if self._outputs[name] else (value.numpy(), None)
            results.append(result)
            if transfer is not None:
                transfers.append(transfer)
        self._copier.from_device(transfers)
        return results

    def _result(self, memory: PinnedMemory, value: Any) -> tuple[NDArray[Any], Transfer | None]:
        """The array for an output, and what must be copied for it."""
        dtype, shape = DTYPES[value.data_type()], tuple(value.shape())
        size = math.prod(shape) * dtype.itemsize
        if size < self._staged_from:
            result = np.empty(shape, dtype)
            return result, Transfer(value.data_ptr(), result, None, value, is_pinned=False) if size else None
        # Not in pinned memory, which would save a copy: a forked child shares that with its parent, and would see its
        # results change when the parent uses the memory again.
        kept = self._ordinary.try_empty(shape, dtype)
        result = np.empty(shape, dtype) if kept is None else kept
        host = memory.try_empty(shape, dtype)
        if host is None:
            return result, Transfer(value.data_ptr(), result, None, value, is_pinned=False)
        return result, Transfer(value.data_ptr(), host, result, value, is_pinned=True)


def _on_device(values: Iterable[Any], memories: Iterable[Any], kind: str) -> dict[str, bool]:
    pairs = zip(values, memories, strict=True)
    return {value.name: memory.name.lower() == kind for value, memory in pairs}
