"""Runs with large arrays: threads copy them through pinned memory, and results are in reused memory.

In a plain ``run`` the CUDA driver stages ordinary memory piece by piece, in one thread, and each result is a new array.
The system clears its pages first. Here :mod:`ortgpu.running.copying` copies inputs to the device before the run, and
outputs from the device after it. The run is ONNX Runtime's ``run_with_ortvaluevector``. It calls the same C++ function
as ``run``, with the devices of the outputs as a further argument (onnxruntime_pybind_state.cc; InferenceSession::Run in
inference_session.cc).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..model.tensor_types import DTYPES
from ..process.background import holds_lock, this_thread
from ..process.threads import Slots
from ..provider.lifetime import device_of
from .copying import IN_THREADS_FROM, Copier, Transfer
from .cudart import CudaRuntime
from .pinned import PinnedMemory, memory_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..provider.interfaces import VerifiedSession


Place = Callable[[tuple[int, ...], np.dtype[Any]], "NDArray[Any] | None"]

_KINDS = frozenset(DTYPES.values())

# The number of runs that compute at a time, while others copy. More runs would share the GPU, end together and leave it
# idle while all copy: in three threads, batches of 256 of ResNet-50 took 23.8 ms on an H200, and take 20.6 with this.
_AT_A_TIME = 2


class StagedRuns:
    """The staged runs of one session. Threads may share it. ``place`` may return the array for a result."""

    def __init__(
        self,
        session: VerifiedSession,
        runtime: CudaRuntime,
        staged_from: int,
        threads: int | None = None,
        piece: int | None = None,
    ) -> None:
        inner, device = session._sess, device_of(session)
        self.place: Place | None = None
        self._staged_from = min(staged_from, IN_THREADS_FROM)
        self._inputs = _memory_kinds(inner.inputs_meta, inner.input_meminfos, device.kind)
        self._outputs = _memory_kinds(inner.outputs_meta, inner.output_meminfos, device.kind)
        self._places = {
            True: onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device(),
            False: onnxruntime.OrtDevice.make("cpu", 0)._get_c_device(),
        }
        self._options = onnxruntime.RunOptions()
        self._runtime = runtime
        self._copier = Copier(runtime, threads, piece)
        self._slots = Slots(_AT_A_TIME)

    def run(self, session: VerifiedSession, output_names: Any, feed: Any) -> list[Any] | None:
        """Run the model and return the results. None if the arguments need plain ``run``. May raise anything."""
        if (output_names is not None and not isinstance(output_names, (list, tuple))) or holds_lock():
            return None
        names = list(output_names or self._outputs)
        inputs = dict(feed)  # a copy, since another thread may change it, and small values share its arrays' memory
        # ONNX Runtime allocates memory here. That must not spoil a capture of another session.
        with self._runtime.device_guard():
            return self._run(session._sess, memory_of(session), names, inputs)

    def _run(self, inner: Any, memory: PinnedMemory, names: list[str], given: dict[str, Any]) -> list[Any] | None:
        values = self._feed(inner, memory, given)
        if values is None:
            return None
        fetched = native.OrtValueVector()
        places = [self._places[self._outputs[name]] for name in names]
        self._slots.run(self._compute, inner, list(given), values, names, fetched, places)
        return self._results(memory, names, fetched)

    def _compute(self, inner: Any, *arguments: Any) -> None:
        # Returns with complete outputs, as the run option disable_synchronize_execution_providers is not set.
        with this_thread.holds:
            inner.run_with_ortvaluevector(self._options, *arguments)

    def _feed(self, inner: Any, memory: PinnedMemory, given: dict[str, Any]) -> Any:
        """Copy the inputs to the device and return them as ONNX Runtime's values. None if they need plain ``run``."""
        values, transfers = native.OrtValueVector(), []
        for name, array in given.items():
            if not isinstance(array, np.ndarray) or array.dtype not in _KINDS:
                return None
            array = np.asarray(array)  # a subclass may copy differently
            if array.nbytes < self._staged_from or not self._inputs.get(name, False):
                values.push_back(native.OrtValue.ortvalue_from_numpy(array, self._places[False]))
                continue
            # Allocate from the session's arena, as plain run does, so memory use and limits are the same. Without a
            # stream it only returns memory that no run still uses (safe_to_use in bfc_arena.cc).
            value = inner.create_ortvalue_from_shape_and_type(array.shape, array.dtype.type, self._places[True])
            # Copy in a separate stream, also from pinned memory, so that it overlaps with other runs.
            transfers.append(Transfer(array, memory.beside(array), value.data_ptr()))
            values.push_back(value)
        with self._copier.stream() as stream:
            self._copier.send(transfers, stream)
        return values

    def _results(self, memory: PinnedMemory, names: list[str], values: Any) -> list[Any]:
        results, transfers = [], []
        for number, name in enumerate(names):  # The vector's iterator would take 50 µs for a C++ exception.
            value = values[number]
            result, transfer = self._result(memory, value) if self._outputs[name] else (value.numpy(), None)
            results.append(result)
            if transfer is not None:
                transfers.append(transfer)
        with self._copier.stream() as stream:
            self._copier.fetch(transfers, stream)
        return results

    def _result(self, memory: PinnedMemory, value: Any) -> tuple[NDArray[Any], Transfer | None]:
        """Return the array for an output and the transfer that fills it."""
        dtype, shape = DTYPES[value.data_type()], tuple(value.shape())
        size = math.prod(shape) * dtype.itemsize
        if size < self._staged_from:
            result = np.empty(shape, dtype)
            return result, Transfer(result, None, value.data_ptr()) if size else None
        placed = self.place(shape, dtype) if self.place is not None else None
        result = memory.ordinary.empty(shape, dtype) if placed is None else placed
        return result, Transfer(result, memory.beside(result), value.data_ptr())


def _memory_kinds(values: Iterable[Any], memories: Iterable[Any], kind: str) -> dict[str, bool]:
    pairs = zip(values, memories, strict=True)
    return {value.name: memory.name.lower() == kind for value, memory in pairs}
