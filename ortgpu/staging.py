"""Large arrays of ``run``: copied in threads through pinned memory, results in memory that is used again.

What plain ``run`` does with an array in ordinary memory: the CUDA driver copies it aside piece by piece, in one thread,
and each result is a fresh array whose pages the system clears first. Here inputs go into memory of the device before
the run, outputs stay there, and both are copied by :mod:`ortgpu.copying`. The run is ONNX Runtime's
``run_with_ortvaluevector``, which ends in the same C++ function as ``run``, and differs in that it is told on which
device outputs are wanted (onnxruntime_pybind_state.cc; InferenceSession::Run in inference_session.cc).

Whatever goes wrong here, and whatever this does not understand, is left to plain ``run``, which does it or raises.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from .background import ForkSafeLock
from .copying import Copier, Transfer
from .cudart import runtime_of
from .pinned import PinnedMemory, memory_of
from .providers import CPU, CUDA
from .recycling import OrdinaryMemory
from .tensors import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("ortgpu")

# UNMEASURED as they stand: chosen between the points of a prototype on an H200 (16 MB won, 4 MB did not; 8 threads and
# pieces of 4 MiB; four threads gave half of the gain). `python -m benchmarks.thresholds` prints what they should be.
STAGED_FROM = 8 << 20  # bytes of one array
PIECE = 4 << 20  # bytes
COPY_THREADS = 8  # fewer where the process has fewer cores

# Of the memory that a session may pin, in results that exist. The rest stays for what is under way: a caller who keeps
# all results gets the later ones in ordinary memory.
_SHARE_OF_RESULTS = 0.5

_KINDS = frozenset(DTYPES.values())

_creating = ForkSafeLock()


class Staging:
    """For one session, which is passed to each call: a reference to it would keep its GPU memory.

    Args:
        session: a GPUSession; see :func:`staging_of` for which.
        staged_from: bytes of an array from which on it is staged.
        threads, piece: see :class:`ortgpu.copying.Copier`.
    """

    def __init__(
        self, session: Any, *, staged_from: int = STAGED_FROM, threads: int | None = None, piece: int = PIECE
    ) -> None:
        inner, device = session._sess, session.device
        self._staged_from = staged_from
        self._threads = threads or min(COPY_THREADS, _cores())
        self._piece = piece
        self._inputs = _on_device(inner.inputs_meta, inner.input_meminfos, device.kind)
        self._outputs = _on_device(inner.outputs_meta, inner.output_meminfos, device.kind)
        # Whatever the inputs are: dimensions that are not known are at least 1
        self._has_large_outputs = any(_bytes(each, unknown=1) >= staged_from for each in inner.outputs_meta)
        self._places = {
            True: onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device(),
            False: onnxruntime.OrtDevice.make("cpu", 0)._get_c_device(),
        }
        self._options = onnxruntime.RunOptions()
        self._ordinary = OrdinaryMemory(session._pinned_memory_limit)
        self._copier: Copier | None = None

    def pays(self, feed: Any) -> bool:
        """Whether an array is large enough. Called before each run: it costs a fraction of a microsecond."""
        try:
            for value in feed.values():
                if value.nbytes >= self._staged_from:
                    return True
        except AttributeError:  # no arrays, or no mapping: ONNX Runtime's to judge
            return False
        return self._has_large_outputs

    def run(self, session: Any, output_names: Any, feed: Any) -> list[Any] | None:
        """What ``run`` gives, or None: then ONNX Runtime has to do it, or to say what is wrong."""
        try:
            return self._run(session, output_names, feed)
        except Exception as error:  # noqa: BLE001 - plain run raises what a caller may expect
            logger.debug("a run is not staged: %s", error)
            return None

    def close(self) -> None:
        """Give back what no array uses. A run under way ends as if nothing had happened."""
        self._copier = None
        self._ordinary.close()

    def __del__(self) -> None:
        # Results outlive this, and keep the memory that they are in, but not what is idle beside it
        if "_ordinary" in self.__dict__:
            self._ordinary.close()

    def _run(self, session: Any, output_names: Any, feed: Any) -> list[Any] | None:
        if output_names is not None and not isinstance(output_names, (list, tuple)):
            return None
        names = list(output_names or self._outputs)
        given = dict(feed)  # another thread may change it, and small values share the memory of its arrays
        inner, memory, copier = session._sess, memory_of(session), self._copier_of(session)
        values = self._feed(inner, memory, copier, given) if copier is not None else None
        if copier is None or values is None:
            return None
        fetched = native.OrtValueVector()
        places = [self._places[self._outputs[name]] for name in names]
        # Ends when the outputs are complete, as the run option disable_synchronize_execution_providers is not set.
        inner.run_with_ortvaluevector(self._options, list(given), values, names, fetched, places)
        return self._results(memory, copier, names, fetched)

    def _feed(self, inner: Any, memory: PinnedMemory, copier: Copier, given: dict[str, Any]) -> Any:
        """ONNX Runtime's values, complete on the device; None where only plain run knows what to make of one."""
        values, transfers = native.OrtValueVector(), []
        for name, array in given.items():
            if isinstance(array, onnxruntime.OrtValue):
                values.push_back(array._ortvalue)
                continue
            if not isinstance(array, np.ndarray) or array.dtype not in _KINDS:
                return None
            host = None
            if array.nbytes >= self._staged_from and self._inputs.get(name, False):
                host = array if memory.is_pinned(array) else memory.try_empty(array.shape, array.dtype)
            if host is None:
                values.push_back(native.OrtValue.ortvalue_from_numpy(array, self._places[False]))
                continue
            # From the session's allocator, like the copy that plain run makes: memory and limits are the same.
            value = inner.create_ortvalue_from_shape_and_type(array.shape, array.dtype.type, self._places[True])
            transfers.append(Transfer(value.data_ptr(), host, None if host is array else array, value))
            values.push_back(value)
        copier.to_device(transfers)
        return values

    def _results(self, memory: PinnedMemory, copier: Copier, names: list[str], values: Any) -> list[Any]:
        results, transfers = [], []
        for name, value in zip(names, values, strict=True):
            result, transfer = self._output(memory, value) if self._outputs[name] else (value.numpy(), None)
            results.append(result)
            if transfer is not None:
                transfers.append(transfer)
        copier.from_device(transfers)
        return results

    def _output(self, memory: PinnedMemory, value: Any) -> tuple[NDArray[Any], Transfer | None]:
        """The array for an output, and what must be copied for it."""
        dtype, shape = DTYPES[value.data_type()], tuple(value.shape())
        size = math.prod(shape) * dtype.itemsize
        if size < self._staged_from:
            result = np.empty(shape, dtype)
            return result, Transfer(value.data_ptr(), result, None, value) if size else None
        if memory.bytes_in_use + size <= memory.limit * _SHARE_OF_RESULTS:
            pinned = memory.try_empty(shape, dtype)
            if pinned is not None:
                return pinned, Transfer(value.data_ptr(), pinned, None, value)
        kept = self._ordinary.try_empty(shape, dtype)
        result = np.empty(shape, dtype) if kept is None else kept
        host = memory.try_empty(shape, dtype)
        if host is None:
            return result, Transfer(value.data_ptr(), result, None, value)
        return result, Transfer(value.data_ptr(), host, result, value)

    def _copier_of(self, session: Any) -> Copier | None:
        with _creating:
            if self._copier is None:
                runtime = runtime_of(session.device)
                if runtime is not None:
                    self._copier = Copier(runtime, self._threads, self._piece)
            return self._copier


def staging_of(session: Any) -> Staging | None:
    """For a session that was opened; None where all its arrays are small, or staging would not do what ``run`` does."""
    inner = session._sess
    # ONNX Runtime has the first since 1.23 and the second since 1.30.
    has_what_it_takes = hasattr(inner, "input_meminfos") and hasattr(inner, "create_ortvalue_from_shape_and_type")
    if not has_what_it_takes or not session.device.is_gpu or not session._pinned_memory_limit:
        return None
    providers = session.get_provider_options()
    if not {CUDA, CPU}.issuperset(providers) or providers[CUDA].get("enable_cuda_graph", "0") != "0":
        return None  # TensorRT and captured graphs have rules of their own for the addresses of inputs
    values = (*inner.inputs_meta, *inner.outputs_meta)
    if any(each.type not in DTYPES for each in values):
        return None
    if all(_bytes(each, unknown=STAGED_FROM) < STAGED_FROM for each in values):
        return None
    return Staging(session)


def _on_device(values: Iterable[Any], memories: Iterable[Any], kind: str) -> dict[str, bool]:
    pairs = zip(values, memories, strict=True)
    return {value.name: memory.name.lower() == kind for value, memory in pairs}


def _bytes(value: Any, unknown: int) -> int:
    """Of an input or output as the model declares it."""
    sizes = (size if isinstance(size, int) else unknown for size in value.shape)
    return math.prod(sizes) * DTYPES[value.type].itemsize


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
