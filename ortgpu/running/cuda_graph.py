"""Sessions that capture a CUDA graph for each shape of the inputs, and replay it where that is faster.

ONNX Runtime 1.31 works as follows (inference_session.cc, cuda_execution_provider.cc, cuda_graph.cc). A run with the run
option ``gpu_graph_id`` runs the model twice, captures it and replays it, all in one call. Later runs with that number
replay the graph. It reads and writes the addresses of the capture, whatever the later run binds. -1 captures nothing. A
graph belongs to the thread that captured it and is kept until the session ends. With ``user_compute_stream`` all of
this happens in that stream. With the run option ``disable_synchronize_execution_providers`` a replay returns without
waiting for the stream (pull request 28686; before that it waits all the same).
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..diagnosis.messages import runtime_words as messages
from ..errors import GPUError, ProviderRequestError, manual
from ..process.background import cached_property, fork_safe_lock, this_thread
from ..process.threads import Executor, Outcome
from ..provider.lifetime import fresh_copy
from ..provider.requests import CUDA
from . import arena
from .copying import Copier, Transfer
from .cudart import CAPTURE_MODE_GLOBAL, CAPTURE_MODE_RELAXED, CudaCallError, CudaRuntime, Relaxed, Stream
from .graph_buffers import Constant, Input, Kind, Output, Place, buffers, kind_of, size_of
from .onnxruntimes import onnxruntimes_run
from .plain_runs import PlainRunner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..provider.devices import Device
    from .pinned import PinnedMemory
    from .plain_runs import RunningSession

logger = logging.getLogger("ortgpu")

# Held during a capture and while ONNX Runtime allocates memory for one, because concurrent captures fail.
_capturing = fork_safe_lock()

MAX_SHAPES = 16

# The most graphs that a session captures, since ONNX Runtime keeps every one.
MAX_CAPTURES = 64

# The number of timed runs of each shape, with replay and without. On an H200, a replay of one operator with 64
# KB in and out took 1.1 times as long as a plain run: the graph saves nothing, and its buffers are further copies.
TRIALS = 8

# The most bytes of a captured graph, and of the first one of a further thread, whose handles and workspaces come with
# it. Five networks took 0 to 8 MiB for a graph on an H200, and 64 to 78 MiB more for the second thread.
_GRAPH_BYTES = 8 << 20
_THREAD_BYTES = 80 << 20

_ID = "gpu_graph_id"
_NO_WAIT = "disable_synchronize_execution_providers"
# driver_types.h: cudaErrorStreamCapture..., cudaErrorCapturedEvent, and cudaErrorNotPermitted (from cudaFreeHost)
_CAPTURE_FAILED = re.compile(
    r"CUDA failure (?:800|90[0-8])\b|CUDA error cudaError(?:StreamCapture\w+|CapturedEvent|NotPermitted):"
    r"|[Gg]raph capture did not complete"
)
LEAVE_OUT = manual("leave cuda_graph out, or a record that has a graph (tuned=)")


class _Graph:
    """The binding and buffers for one shape of the inputs. The captured graph uses their addresses."""

    def __init__(
        self, number: int, inner: Any, inputs: list[Input], outputs: dict[str, Output | Constant], *, waits: bool
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.captured_by: set[int] = set()  # threads
        self.trials = 2 * TRIALS  # runs until it is known whether a replay is faster
        self.fastest = [math.inf, math.inf]  # seconds of a run without a capture, and of a replay
        self.capture = _run_options(str(number))
        self.replay = _run_options(str(number))
        if not waits:
            self.replay.add_run_config_entry(_NO_WAIT, "1")
        self.binding: Any = native.SessionIOBinding(inner)
        self.inner = inner  # the binding refers to it and may not keep it alive

    def bytes_held(self) -> int:
        outputs = [buffer for buffer in self.outputs.values() if isinstance(buffer, Output)]
        return sum(buffer.size for buffer in (*self.inputs, *outputs))

    def never_replay(self) -> None:
        """Run without the graph from now on, and free its memory."""
        self.trials, self.fastest = 0, [0.0, math.inf]
        self.binding, self.inputs, self.outputs = None, [], {}


class CapturingSession:
    """A replacement of the C++ session inside a GPUSession. ``run`` replays graphs; other ways to run are refused.

    A graph has one set of buffers, so only one run is made at a time. The main thread makes its own runs. The runs of
    all other threads are made in one thread that the session keeps: ONNX Runtime holds a context and graphs for each
    thread until the session ends.

    ``inner`` is the C++ session. It runs in ``stream``, and arrays are copied in the same stream. The session of a
    plugin has a stream of its own: then copies and replays wait for each other. ``memory`` pins host memory. ``limit``
    is that of the arena. The graphs and their buffers lie outside of it, and take up to ``room`` bytes. Shapes that
    would take more run without a graph. None: as much as the GPU has.
    """

    def __init__(
        self,
        inner: Any,
        runtime: CudaRuntime,
        device: Device,
        stream: Stream,
        memory: PinnedMemory,
        limit: int | None = None,
        room: int | None = None,
    ) -> None:
        self._inner = inner
        self._device_of_arena, self._limit, self._room = device, limit, room
        self._captured_bytes = 0
        self._threads: set[int] = set()  # that have captured
        self._runtime = runtime
        self._relaxed = Relaxed(runtime)
        self.memory = memory
        self._device = onnxruntime.OrtDevice.make(device.kind, device.ordinal or 0)._get_c_device()
        self._input_names = [value.name for value in inner.inputs_meta]
        self._known_inputs = frozenset(self._input_names)
        self._output_names = [value.name for value in inner.outputs_meta]
        self._known_outputs = frozenset(self._output_names)
        self._on_cpu = frozenset(
            value.name
            for value, memory in zip(inner.outputs_meta, inner.output_meminfos, strict=True)
            if memory.name.lower() != device.kind
        )
        self._graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()  # least recently used first
        self._captures = 0
        self._uncaptured = _run_options("-1")
        self._lock = threading.RLock()
        self._unusable: GPUError | None = None
        # The thread must not refer to this object, or it would never be freed.
        self._run_in = run_in = {threading.main_thread().ident}
        self._executor = Executor(1, "ortgpu-graph", lambda: run_in.add(threading.get_ident()))
        self._stream = stream.handle
        self._waits = inner.get_provider_options().get(CUDA, {}).get("has_user_compute_stream") == "0"
        # The C++ session uses the stream until its end. Metadata that the caller keeps may delay that end.
        weakref.finalize(inner, lambda _: None, stream).atexit = False

    def run(self, output_names: Any, feed: Any, run_options: Any = None) -> Any:
        if run_options is not None and _graph_id_of(run_options) != "-1":
            raise _unsupported("run options other than gpu_graph_id=-1, which captures nothing,")
        if threading.get_ident() in self._run_in:
            return self._run(output_names, feed, run_options)
        outcome: Outcome[Any] = Outcome()
        self.submit(outcome, self._run, output_names, feed, run_options)
        try:
            return outcome.result()
        finally:
            del outcome  # break the cycle: outcome, exception, this frame

    def __getattr__(self, name: str) -> Any:
        if name.startswith("run_"):
            raise _unsupported(name)
        return getattr(self._inner, name)

    @property
    def captures(self) -> int:
        """The number of graphs that were captured. ONNX Runtime keeps them and the memory that they use."""
        return self._captures

    @property
    def _is_at_work(self) -> bool:
        """True if a signal handler or finalizer has interrupted a run of this thread."""
        is_owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]  # as Condition asks
        return is_owned

    def bytes_held(self) -> int:
        """Return the bytes of the captured graphs, as they were measured, and of their buffers."""
        return self._captured_bytes + sum(graph.bytes_held() for graph in list(self._graphs.values()))

    def _has_room(self, size: int = 0) -> bool:
        """Return True if a further graph with buffers of so many bytes may be captured."""
        is_first = bool(self._threads) and threading.get_ident() not in self._threads
        further = _GRAPH_BYTES + (_THREAD_BYTES if is_first else 0)
        return self._room is None or self.bytes_held() + size + further <= self._room

    def give_back(self) -> None:
        """Free the buffers of all shapes but the one that ran last. The next run of another shape captures it again."""
        if self._is_at_work:
            return
        with this_thread.holds, self._lock:
            while len(self._graphs) > 1:
                self._graphs.popitem(last=False)

    def close(self, error: GPUError) -> None:
        """Wait for the running run and free the buffers. Later runs raise ``error``.

        If this thread is amid a run, the buffers stay until this object is dropped.
        """
        if self._is_at_work:  # The interrupted run needs the buffers until its end.
            self._unusable = error
            self._executor.stop()
            return
        with this_thread.holds, self._lock:
            self._unusable = error
        self._executor.close()
        self._let_go()

    def let_go(self) -> None:
        """Wait for the running run of another thread, and drop the C++ session."""
        if not self._is_at_work:
            with this_thread.holds, self._lock:
                self._let_go()

    def _let_go(self) -> None:
        """Drop the C++ session in the relaxed capture mode.

        Its end destroys graphs. CUDA refuses that in the global mode while another thread captures, and ONNX Runtime
        then ends the process (pull request 32081).
        """
        try:
            before = self._runtime.exchange_capture_mode(CAPTURE_MODE_RELAXED)
        except CudaCallError:  # The CUDA context is lost.
            before = None
        self._graphs.clear()
        self.__dict__.pop("_copier", None)  # This ends its threads.
        self._inner = None
        if before is not None:
            self._runtime.exchange_capture_mode(before)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if "_stream" in self.__dict__ and not is_finalizing():  # an argument, as this module's names may be gone
            self._let_go()

    def submit(self, outcome: Outcome[Any], function: Callable[..., Any], *arguments: Any) -> None:
        """Call ``function`` in the thread that the session keeps.

        Raises:
            GPUError: the session is closed.
        """
        try:
            self._executor.submit(outcome, function, *arguments)
        except RuntimeError:
            self._refuse_if_unusable()
            raise

    def replay(self, output_names: Any, feed: Any) -> list[Any] | None:
        """Replay the graph for NumPy arrays of known shapes and return the results. None: ``run`` has to do it."""
        names = self._input_names
        if threading.get_ident() not in self._run_in or type(feed) is not dict or len(feed) != len(names):
            return None
        if self._is_at_work:  # the other run's inputs must not change
            return None
        if output_names and not (type(output_names) is list and self._known_outputs.issuperset(output_names)):
            return None
        try:
            values = [feed[name] for name in names]
        except KeyError:
            return None
        for value in values:
            if type(value) is not np.ndarray:
                return None
        kinds = tuple([(value.shape, value.dtype) for value in values])
        with this_thread.holds, self._lock:
            graph = self._graphs.get(kinds)
            if graph is None or self._unusable is not None:
                return None
            self._graphs.move_to_end(kinds)
            return self._run_faster(graph, values, output_names or self._output_names, feed)

    def _run_faster(self, graph: _Graph, values: list[Any], output_names: list[str], feed: Any) -> list[Any]:
        """Replay the graph, or run without it if that is faster. The first runs time both, alternately."""
        if not graph.trials:
            if graph.fastest[True] <= graph.fastest[False] and (self._room is None or self._may_replay(graph)):
                return self._run_captured(graph, values, output_names)
            return self._run_without(output_names, feed)
        if self._room is not None and not self._may_replay(graph):
            return self._run_without(output_names, feed)
        is_replay = graph.trials // 2 % 2 == 0  # In pairs, as a caller may ask for other outputs every second time.
        started = time.perf_counter()
        if is_replay:
            results = self._run_captured(graph, values, output_names)
        else:
            results = self._run_without(output_names, feed)
        graph.fastest[is_replay] = min(graph.fastest[is_replay], time.perf_counter() - started)
        graph.trials -= 1
        if not graph.trials and graph.fastest[True] > graph.fastest[False]:
            graph.never_replay()
        return results

    def _may_replay(self, graph: _Graph) -> bool:
        """Return True if this thread has captured a graph, or may do so."""
        return threading.get_ident() in graph.captured_by or self._has_room()

    def _run_without(self, output_names: Any, feed: Any, run_options: Any = None) -> list[Any]:
        # ONNX Runtime may allocate memory here. That must not spoil a capture of another session.
        with self._relaxed:
            results: list[Any] = self._inner.run(output_names, feed, run_options or self._uncaptured)
        return results

    def _run(self, output_names: Any, feed: Any, run_options: Any) -> Any:
        if self._is_at_work:
            self._refuse_if_unusable()
            return self._run_without(output_names, feed, run_options)
        with this_thread.holds, self._lock:
            self._refuse_if_unusable()
            is_known = self._known_inputs.issuperset(feed) and isinstance(output_names, (list, tuple))
            if run_options is not None or not is_known or not self._known_outputs.issuperset(output_names):
                return self._run_without(output_names, feed, run_options)
            values = [feed[name] for name in self._input_names if name in feed]
            kinds = tuple([kind for kind in map(kind_of, values) if kind is not None])
            if len(kinds) < len(feed):
                return self._run_without(output_names, feed)
            graph = self._graphs.get(kinds)
            if graph is None:
                if self._captures == MAX_CAPTURES:
                    return self._run_without(output_names, feed)
                # Run without capturing, to learn the shapes of the outputs. Wrong feeds raise here, as in any session.
                with this_thread.holds, _capturing:
                    first = self._run_without(self._output_names, feed)
                if not all(map(size_of, kinds)) or not all(value.size for value in first):
                    return [first[self._output_names.index(name)] for name in output_names]
                graph, results = self._capture(kinds, first, values, output_names)
            else:
                results = self._run_faster(graph, values, output_names, feed)
            self._graphs[kinds] = graph
            self._graphs.move_to_end(kinds)
            return results

    def _capture(
        self, kinds: tuple[Kind, ...], first: list[NDArray[Any]], values: list[Any], output_names: list[str]
    ) -> tuple[_Graph, list[Any]]:
        """Capture a graph, and return it with its results. ``first``: the outputs of a run without it."""
        while len(self._graphs) >= MAX_SHAPES:
            self._graphs.popitem(last=False)
        outputs = dict(zip(self._output_names, first, strict=True))
        on_device = {name: (value.shape, value.dtype) for name, value in outputs.items() if name not in self._on_cpu}
        if not self._has_room(sum(map(size_of, (*kinds, *on_device.values())))):
            graph = _Graph(0, self._inner, [], {}, waits=self._waits)
            graph.never_replay()
            return graph, [outputs[name] for name in output_names]
        graph = self._bind(kinds, outputs, on_device)
        return graph, self._run_captured(graph, values, output_names)

    def _bind(self, kinds: tuple[Kind, ...], values: dict[str, NDArray[Any]], on_device: dict[str, Kind]) -> _Graph:
        inputs, written = buffers(Place(self._runtime, self._stream, self.memory), kinds, on_device)
        outputs = {name: written[name] if name in written else Constant(value) for name, value in values.items()}
        self._captures += 1  # numbers begin at 1: 0 is ONNX Runtime's default
        if self._captures == MAX_CAPTURES:
            logger.warning("%d shapes were captured: other shapes run without a CUDA graph from now on", MAX_CAPTURES)
        graph = _Graph(self._captures, self._inner, inputs, outputs, waits=self._waits)
        for name, (shape, dtype), buffer in zip(self._input_names, kinds, inputs, strict=True):
            graph.binding.bind_input(name, self._device, dtype.type, shape, buffer.address)
        for name, (shape, dtype) in on_device.items():
            graph.binding.bind_output(name, self._device, dtype.type, shape, written[name].address)
        return graph

    def _run_captured(self, graph: _Graph, values: list[Any], output_names: list[str]) -> list[Any]:
        # ONNX Runtime sets no device for a replay, so set it. Set the mode, because another session may capture.
        with self._relaxed:
            sources, results = [], []  # plain loops: comprehensions took twice the time
            read: list[Transfer] = []
            written: list[Transfer] = []
            try:
                for buffer, value in zip(graph.inputs, values, strict=True):
                    sources.append(buffer.take(value, read))
                if read:
                    self._copier.send(read, self._stream)
                if self._waits:
                    self._runtime.synchronise(self._stream)
                self._replay_or_capture(graph)
                for name in output_names:
                    output = graph.outputs[name]
                    results.append((output, output.begin(written)))
                if written:
                    self._copier.fetch(written, self._stream)
                self._runtime.synchronise(self._stream)
            except BaseException:
                with contextlib.suppress(CudaCallError):
                    self._runtime.synchronise(self._stream)  # so that nothing reads the caller's arrays any more
                raise
        return [output.result(array) for output, array in results]

    @cached_property
    def _copier(self) -> Copier:
        """The threads that copy large arrays."""
        return Copier(self._runtime)

    def _replay_or_capture(self, graph: _Graph) -> None:
        thread = threading.get_ident()
        if thread in graph.captured_by:
            self._inner.run_with_iobinding(graph.binding, graph.replay)
            return
        with this_thread.holds, _capturing:
            before = self._taken_outside()
            # Use the global mode, where an operator that cannot be captured fails. The relaxed mode would skip it.
            relaxed = self._runtime.exchange_capture_mode(CAPTURE_MODE_GLOBAL)
            try:
                self._inner.run_with_iobinding(graph.binding, graph.capture)
            except Exception as error:
                # ONNX Runtime may leave the capture open, and until it ends CUDA refuses memory to other threads.
                self._runtime.end_capture(self._stream)
                if not _CAPTURE_FAILED.search(str(error)):
                    raise
                self._unusable = failed = _failed(error)
                raise fresh_copy(failed) from error
            finally:
                self._runtime.exchange_capture_mode(relaxed)
            graph.captured_by.add(thread)
            self._threads.add(thread)
            after = self._taken_outside()
            if before is not None and after is not None:
                # Other processes may have taken or freed memory meanwhile.
                self._captured_bytes += min(max(after - before, 0), 2 * _THREAD_BYTES)

    def _taken_outside(self) -> int | None:
        """Return the bytes of the device that were taken outside of the arena, up to a constant. None: unknown."""
        reserved = arena.reserved_by(self._inner, self._limit, self._device_of_arena)
        return -self._runtime.free_memory() - reserved if reserved is not None else None

    def _refuse_if_unusable(self) -> None:
        if self._unusable is not None:
            raise fresh_copy(self._unusable)


class CapturedRunner(PlainRunner):
    """Makes the runs of a session after ``graphs`` has replaced its C++ session."""

    def __init__(self, session: RunningSession, graphs: CapturingSession) -> None:
        super().__init__()
        self.caller = ()
        self.graphs = graphs
        self._may_replay = onnxruntimes_run(session) is not None

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Any:
        if run_options is None and self._may_replay and session._sess is self.graphs:
            results = self.graphs.replay(output_names, feed)
            if results is not None:
                return results
        return self._run_indirectly(session, output_names, feed, run_options)

    def submit(self, executor: Executor, outcome: Outcome[Any], function: Callable[[Any], Any], feed: Any) -> None:
        """Call ``function`` in the thread of the runs. Threads of ``executor`` copy arrays that are staged first."""
        if self.graphs.memory.would_stage(feed):
            executor.submit(outcome, function, feed)
        else:  # passing two threads takes longer than many replays
            self.graphs.submit(outcome, function, feed)

    def check_binding(self) -> None:
        raise _unsupported("io_binding")

    def let_go(self) -> None:
        self.graphs.let_go()

    def close(self, error: GPUError) -> None:
        self.graphs.close(error)


def _run_options(number: str) -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(_ID, number)
    return options


def _failed(cause: BaseException) -> ProviderRequestError:
    return ProviderRequestError(
        "a run of this model could not be captured as a CUDA graph, and this session cannot be used any more",
        evidence=[
            messages.telling_line(str(cause)),
            "either an operator waits for the GPU while it runs, as operators with output shapes that depend on data "
            "do",
            "or another thread of this process used CUDA at that moment, to get memory or to wait, which breaks a "
            "capture",
        ],
        fixes=[LEAVE_OUT, manual("or make the first run of each shape while nothing else uses the GPU")],
        requested="cuda_graph",
    )


def _unsupported(what: str) -> ProviderRequestError:
    return ProviderRequestError(
        f"{what} cannot be used with a session that replays CUDA graphs",
        fixes=[manual("use run or map, or a session without cuda_graph, and without a record that has a graph")],
        requested=what,
    )


def _graph_id_of(run_options: Any) -> str | None:
    try:
        number: str = run_options.get_run_config_entry(_ID)
    except Exception:  # noqa: BLE001 - an unset entry raises a class that depends on the release
        return None
    return number
