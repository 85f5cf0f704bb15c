"""Sessions that capture their runs as CUDA graphs, one for each shape of inputs, and replay them.

What ONNX Runtime does, as of 1.31 (inference_session.cc, cuda_execution_provider.cc, cuda_graph.cc): a run with the run
option ``gpu_graph_id`` runs twice, is captured and replayed, all in one call; later runs with that number replay it,
which reads and writes the addresses of the capture, whatever is bound by then. -1 captures nothing. Graphs belong to
the thread that captured them, and none is given up before the session is.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from .cudart import CudaRuntime, DeviceBuffer, Stream, allocating, runtime_of
from .diagnosis.messages import telling_line
from .errors import GPUError, PlacementError, ProviderRequestError, manual
from .lifetime import anew
from .providers import CUDA, ProviderList
from .tensors import DTYPES

if TYPE_CHECKING:
    from .devices import Device
    from .placement import Placement

MAX_SHAPES = 16

_ID = "gpu_graph_id"
_OPTION = "enable_cuda_graph"
_REFUSAL = re.compile(r"cannot use the (?:CUDA Graph|graph capture) feature", re.IGNORECASE)
_CAPTURE_FAILED = re.compile(r"CUDA failure 90\d|[Gg]raph capture did not complete")  # 900 to 908: driver_types.h
_LEAVE_OUT = manual("leave cuda_graph out")


# When the session is made


def with_capture(requested: ProviderList) -> ProviderList:
    """``requested`` with the provider option that switches capturing on.

    Raises:
        ProviderRequestError: the caller switched it off.
    """
    if requested.options_of(CUDA).get(_OPTION, "1").lower() in ("0", "false"):
        raise ProviderRequestError(
            f"cuda_graph=True and the provider option {_OPTION}=0 contradict each other",
            fixes=[manual("say it once")],
            requested=requested.names,
        )
    return requested.with_cuda_options({_OPTION: "1"})


def without_capture(requested: ProviderList) -> ProviderList:
    return requested.with_cuda_options({_OPTION: "0"})


def is_refusal(cause: BaseException) -> bool:
    """Whether ONNX Runtime refused a model because it cannot capture it."""
    return _REFUSAL.search(str(cause)) is not None


def why_not_captured(cause: BaseException, placement: Placement, model: Any) -> GPUError:
    """The error for such a refusal."""
    summary = "this model cannot be captured as a CUDA graph: "
    if "control flow" in str(cause):
        from .models import read_model

        operators = sorted({"If", "Loop", "Scan"} & {name for name, _ in read_model(model).operators})
        return ProviderRequestError(
            summary + "it has control flow" + (f", {', '.join(operators)}" if operators else ""),
            evidence=[telling_line(str(cause))],
            fixes=[_LEAVE_OUT],
        )
    nodes = placement.cpu_compute_nodes or tuple(node for node in placement.nodes if node.provider != CUDA)
    return PlacementError(
        summary + "nodes of it are on the CPU, with copies in between",
        evidence=[*(f"{node}: {node.reason}" for node in nodes[:12]), telling_line(str(cause))],
        fixes=[_LEAVE_OUT, manual("or export the model with operators that have CUDA kernels")],
        nodes=nodes,
    )


# While it runs


@dataclass(frozen=True, slots=True)
class _Output:
    """``buffer`` None: ``constant`` is the output, computed on the CPU from shapes alone, so that it never changes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    buffer: DeviceBuffer | None
    constant: np.ndarray[Any, Any] | None


class _Graph:
    """What is bound for one shape of inputs: their addresses are those of the captured graph."""

    def __init__(self, number: int, inner: Any, inputs: dict[str, DeviceBuffer], outputs: list[_Output]) -> None:
        self.number = number
        self.inputs = inputs
        self.outputs = outputs
        self.captured_by: set[int] = set()  # threads
        self.options = onnxruntime.RunOptions()
        self.options.add_run_config_entry(_ID, str(number))
        self.binding = native.SessionIOBinding(inner)
        self.inner = inner  # the binding refers to it, and may not hold it


class CapturingSession:
    """Takes the place of the C++ session inside a GPUSession: ``run`` replays graphs, other ways to run are refused.

    A graph has one set of buffers, so runs are made one after the other, whatever threads they come from. The main
    thread's are made in it, those of all others in one thread that the session keeps: each thread that runs costs
    ONNX Runtime a context and captured graphs of its own, for the life of the session.
    """

    def __init__(self, inner: Any, runtime: CudaRuntime, device: Device) -> None:
        self._inner = inner
        self._runtime = runtime
        self._device = onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device()
        self._input_names = frozenset(each.name for each in inner.inputs_meta)
        self._output_names = [each.name for each in inner.outputs_meta]
        self._on_cpu = frozenset(
            each.name
            for each, memory in zip(inner.outputs_meta, inner.output_meminfos, strict=True)
            if memory.name.lower() != device.kind
        )
        self._graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()  # the longest unused first
        self._numbers = itertools.count(1)  # 0 is what ONNX Runtime takes where no number is given
        self._uncaptured = onnxruntime.RunOptions()
        self._uncaptured.add_run_config_entry(_ID, "-1")
        self._lock = threading.Lock()
        self._unusable: GPUError | None = None
        self._executor = ThreadPoolExecutor(1, "ortgpu-graph")
        self._stream = Stream(runtime)

    @property
    def computes_nothing(self) -> bool:
        return self._on_cpu.issuperset(self._output_names)

    def run(self, output_names: Any, feed: Any, run_options: Any = None) -> Any:
        if run_options is not None and _graph_id_of(run_options) != "-1":
            raise _unsupported("run options other than gpu_graph_id=-1, which captures nothing,")
        known = self._input_names.issuperset(feed) and set(self._output_names).issuperset(output_names)
        if run_options is not None or not known:
            return self._in_its_thread(self._run_uncaptured, output_names, feed, run_options)
        return self._in_its_thread(self._run, output_names, feed)

    def run_with_ort_values(self, *_: Any) -> NoReturn:
        raise _unsupported("run_with_ort_values")

    def run_with_iobinding(self, *_: Any) -> NoReturn:
        raise _unsupported("run_with_iobinding")

    def run_with_ortvaluevector(self, *_: Any) -> NoReturn:
        raise _unsupported("run_with_ortvaluevector")

    def run_async(self, *_: Any) -> NoReturn:
        raise _unsupported("run_async")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def refuse_binding(self) -> NoReturn:
        raise _unsupported("io_binding")

    def close(self, error: GPUError) -> None:
        """Wait for the run under way, and give the buffers back; later runs raise ``error``."""
        with self._lock:
            self._unusable = error
            self._graphs.clear()
        self._executor.shutdown()

    def _in_its_thread(self, function: Any, *arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return function(*arguments)
        return self._executor.submit(function, *arguments).result()

    def _run_uncaptured(self, output_names: Any, feed: Any, run_options: Any) -> Any:
        with self._lock:
            self._refuse_if_unusable()
            return self._inner.run(output_names, feed, run_options or self._uncaptured)

    def _run(self, output_names: Any, feed: Any) -> Any:
        with self._lock:
            self._refuse_if_unusable()
            found = {name: _tensor_of(value) for name, value in feed.items()}
            tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
            if len(tensors) < len(found):
                return self._inner.run(output_names, feed, self._uncaptured)
            shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(tensors.items()))
            graph = self._graphs.get(shapes)
            if graph is None:
                # Without capturing, to learn the shapes of the outputs; wrong feeds end here, as in any session.
                values = self._inner.run(self._output_names, feed, self._uncaptured)
                if not all(tensor.size for tensor in tensors.values()) or not all(value.size for value in values):
                    return [values[self._output_names.index(name)] for name in output_names]
                graph = self._bind(tensors, values)
            self._replay(graph, tensors)
            self._graphs[shapes] = graph
            self._graphs.move_to_end(shapes)
            return self._results(graph, output_names)

    def _bind(self, tensors: dict[str, _Tensor], values: list[Any]) -> _Graph:
        while len(self._graphs) >= MAX_SHAPES:
            self._give_up(self._graphs.popitem(last=False)[1])
        inputs = {name: DeviceBuffer(self._runtime, tensor.size) for name, tensor in tensors.items()}
        outputs = []
        for name, value in zip(self._output_names, values, strict=True):
            on_cpu = name in self._on_cpu
            buffer = None if on_cpu else DeviceBuffer(self._runtime, value.nbytes)
            outputs.append(_Output(name, value.shape, value.dtype, buffer, value if on_cpu else None))
        graph = _Graph(next(self._numbers), self._inner, inputs, outputs)
        for name, tensor in tensors.items():
            address = inputs[name].address
            graph.binding.bind_input(name, self._device, tensor.dtype.type, tensor.shape, address)
        for output in outputs:
            if output.buffer is not None:
                address = output.buffer.address
                graph.binding.bind_output(output.name, self._device, output.dtype.type, output.shape, address)
        return graph

    def _give_up(self, graph: _Graph) -> None:
        """Its buffers go with it; the captured graph stays with ONNX Runtime, whose 1.31 releases none of CUDA's."""
        release = getattr(self._inner, "release_captured_graph", None)
        if release is not None:
            release(graph.number)

    def _replay(self, graph: _Graph, tensors: dict[str, _Tensor]) -> None:
        self._runtime.use_device()  # which ONNX Runtime does for any run but a replay
        for name, buffer in graph.inputs.items():
            self._runtime.copy(buffer.address, tensors[name].address, buffer.size, self._stream.handle)
        self._runtime.synchronise(self._stream.handle)
        thread = threading.get_ident()
        if thread in graph.captured_by:
            self._inner.run_with_iobinding(graph.binding, graph.options)
            return
        try:
            with allocating:
                self._inner.run_with_iobinding(graph.binding, graph.options)
        except Exception as error:
            if not _CAPTURE_FAILED.search(str(error)):
                raise
            self._unusable = failed = _failed(error)
            raise anew(failed) from error
        graph.captured_by.add(thread)

    def _results(self, graph: _Graph, output_names: Any) -> list[Any]:
        results = {}
        for output in graph.outputs:
            if output.name in output_names:
                results[output.name] = result = np.empty(output.shape, output.dtype)
                if output.buffer is None:
                    result[...] = output.constant
                else:
                    self._runtime.copy(
                        result.ctypes.data, output.buffer.address, output.buffer.size, self._stream.handle
                    )
        self._runtime.synchronise(self._stream.handle)
        return [results[name] for name in output_names]

    def _refuse_if_unusable(self) -> None:
        if self._unusable is not None:
            raise anew(self._unusable)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """``size`` in bytes. ``owner`` keeps the address alive."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: int
    size: int
    owner: object


def _tensor_of(value: Any) -> _Tensor | None:
    """None for what is no tensor with a type of NumPy's own."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        array = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        return _Tensor(value.shape, array.dtype, array.__array_interface__["data"][0], array.nbytes, array)
    if isinstance(value, onnxruntime.OrtValue) and value.is_tensor() and value.data_type() in DTYPES:
        dtype, shape = DTYPES[value.data_type()], tuple(value.shape())
        return _Tensor(shape, dtype, value.data_ptr(), dtype.itemsize * int(np.prod(shape)), value)
    return None


def captured(session: Any) -> CapturingSession:
    """What is to take the place of the C++ session inside ``session``, which was opened with capturing on.

    Raises:
        ProviderRequestError: it has inputs or outputs that cannot be captured, or this process lacks what it takes.
    """
    inner, device = session._sess, session.device
    runtime = runtime_of(device)
    if runtime is None:
        raise _impossible("the provider's CUDA runtime is not among the libraries of this process")
    memories = getattr(inner, "input_meminfos", None)
    if memories is None:
        raise _impossible("the installed ONNX Runtime does not tell where inputs must be; 1.23 and newer do")
    for value, memory in zip(inner.inputs_meta, memories, strict=True):
        if memory.name.lower() != device.kind:
            raise _impossible(f"its input {value.name!r} is read on the CPU, whose work is in no graph")
    for value in (*inner.inputs_meta, *inner.outputs_meta):
        if value.type not in DTYPES:
            raise _impossible(f"{value.name!r} is a {value.type}")
    session_on_device = CapturingSession(inner, runtime, device)
    if session_on_device.computes_nothing:
        raise _impossible("all its outputs are computed on the CPU")
    return session_on_device


def _impossible(reason: str) -> ProviderRequestError:
    return ProviderRequestError(
        "this session cannot be captured as a CUDA graph", evidence=[reason], fixes=[_LEAVE_OUT], requested="cuda_graph"
    )


def _failed(cause: BaseException) -> ProviderRequestError:
    return ProviderRequestError(
        "a run of this model could not be captured as a CUDA graph, and this session is of no further use",
        evidence=[
            telling_line(str(cause)),
            "either an operator waits for the GPU while it runs, as those do whose output shapes depend on data",
            "or another thread of this process allocated GPU memory at that moment",
        ],
        fixes=[_LEAVE_OUT, manual("or make the first run of each shape while nothing else uses the GPU")],
        requested="cuda_graph",
    )


def _unsupported(what: str) -> ProviderRequestError:
    return ProviderRequestError(
        f"{what} cannot be used with a session that replays CUDA graphs",
        fixes=[manual("use run or map, or a session without cuda_graph")],
        requested=what,
    )


def _graph_id_of(run_options: Any) -> str | None:
    try:
        number: str = run_options.get_run_config_entry(_ID)
    except Exception:  # noqa: BLE001 - an entry that is not set raises, of a class that differs between releases
        return None
    return number
