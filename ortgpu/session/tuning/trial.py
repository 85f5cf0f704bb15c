"""Functions that ``tune`` calls in its child: open sessions, run them, compare their results, and measure."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...provider.runtime import load_lazily_opened, load_runtime, open_provider

load_runtime()

# ruff: noqa: E402 - ONNX Runtime needs libraries that load_runtime loads first
import onnxruntime

from ...environment.libraries.catalogue import LIBRARIES
from ...errors import ProviderFallbackError
from ...model.files import ModelSource
from ...model.outline import GraphOutline
from ...provider.cudnn import cudnn_operators
from ...provider.interfaces import Value
from ...provider.records import Key, VoidRecordError, key_of
from ...provider.requests import CPU, CUDA
from ...provider.settings import (
    CAPTURE,
    DEPTH,
    DIMENSIONS,
    FLOAT16,
    OF_THE_SESSION,
    PINNED_MEMORY_LIMIT,
    STAGING,
    THREADS,
    Settings,
    options_of,
)
from ...running.cudart import runtime_on
from ...running.graph_requests import obstacle
from ...running.made_inputs import batch_dimension, make_inputs, shape_of
from ...running.onnxruntimes import InferenceSession
from ...running.pinned import PinnedMemory
from .children import GIVEN, Beginning, Place, Trial, Work
from .comparing import TOLERANCE, Comparison, several_runs

_MOST_ROUNDS, _FEWEST_ROUNDS = 200, 5
_WARMING = 3  # runs
_HOPELESS = 3  # times plain ONNX Runtime's time: it is known without more rounds
_BLOCK = 0.05  # seconds of several threads


def begin(
    model: ModelSource,
    device: Any,
    place: Place,
    batches: tuple[int, ...],
    feeds: tuple[Mapping[str, Any], ...] | None,
    by_content: bool,
    session_class: Any,
) -> Beginning:
    """Open the model on its GPU, make up inputs, and run them. ``session_class`` is GPUSession.

    Raises:
        GPUError: the GPU cannot be used.
        UnknownInputError: no inputs can be made up.
        Exception: ONNX Runtime's own, if the model does not run.
    """
    outline = GraphOutline(model)
    gpu = None
    left_out: list[str] = []
    if place.ordinal is None:
        session = open_at(place, model, {}, {})
        operators = {os.fsdecode(operator) for operator, _ in outline.operators()}
        needs_cudnn, no_graph = False, None
    else:
        session = session_class(model, device=device, allow_cpu=False, cpu_nodes="allow", tuned=False)
        gpu = session.device
        placement = session.placement
        operators = {node.op_type for node in placement.nodes} if placement.known else {"Conv"}
        needs_cudnn = not placement.known or bool(cudnn_operators(placement.placed_on(CUDA)))
        no_graph = obstacle(session)
    inputs: Any = session.get_inputs()
    if feeds is None:
        if batch_dimension(inputs) is None and batches != (1,):
            left_out.append(f"batches of {', '.join(map(str, batches))}: the model has no free batch dimension")
            batches = (1,)
        feeds = tuple(make_inputs(inputs, size) for size in batches)
    for feed in feeds:
        session.run(None, dict(feed))
    if len(feeds) > 1:
        left_out.append("shapes fixed: a session has those of one batch")
    if no_graph is not None:
        left_out.append(f"graph captured: {no_graph}")
    try:
        key: Key | str = key_of(outline, gpu, by_content=by_content)
    except VoidRecordError as error:
        key = str(error)
    if gpu is not None:
        session.close()  # the process goes on
    return Beginning(
        gpu,
        feeds,
        _dimensions(inputs, feeds),
        key,
        convolves=any("Conv" in operator for operator in operators),
        needs_cudnn=needs_cudnn,
        captures=no_graph is None,
        left_out=tuple(left_out),
    )


def _dimensions(inputs: Sequence[Value], feeds: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sizes of free dimensions by their names: none if there are several batches, or one has no name."""
    if len(feeds) != 1:
        return {}
    found: dict[str, int] = {}
    for each in inputs:
        for size, real in zip(each.shape, shape_of(feeds[0][each.name]), strict=True):
            if isinstance(size, str) and size:
                if found.setdefault(size, real) != real:
                    return {}
            elif not isinstance(size, int):
                return {}
    return found


def results(model: ModelSource, place: Place, feeds: Sequence[Mapping[str, Any]]) -> tuple[list[Any], ...]:
    """Return the results of plain ONNX Runtime at a place. The CPU computes in float32."""
    session = open_at(place, model, {}, {})
    return tuple(session.run(None, dict(feed)) for feed in feeds)


def open_session(model: ModelSource, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Return an InferenceSession with these settings; without any it is plain ONNX Runtime's.

    Raises:
        ProviderFallbackError: it is not on the GPU.
        Exception: ONNX Runtime's own.
    """
    asked = options_of(settings)
    options = _quiet()
    if THREADS in asked:
        options.intra_op_num_threads = int(asked[THREADS])
    for name, size in dimensions.items() if DIMENSIONS in asked else ():
        options.add_free_dimension_override_by_name(name, size)
    if place.ordinal is None:
        return _opened(model, options, [CPU])
    of_cuda = {name: value for name, value in asked.items() if name not in OF_THE_SESSION}
    if place.ordinal:  # naming the first makes 1.31 log a warning
        of_cuda["device_id"] = str(place.ordinal)
    return _opened(model, options, [(CUDA, of_cuda), CPU])


def _opened(model: ModelSource, options: Any, providers: Sequence[Any]) -> Any:
    """Return a session. Raises ProviderFallbackError if it does not have its first provider."""
    session = onnxruntime.InferenceSession(model, options, providers=providers)
    first, bound = providers[0] if isinstance(providers[0], str) else providers[0][0], tuple(session.get_providers())
    if bound[0] != first:
        raise ProviderFallbackError(f"ONNX Runtime did not bind {first}", bound=bound)
    session.disable_fallback()
    return session


def _quiet() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    return options


def open_at(place: Place, model: ModelSource, settings: Settings, dimensions: Mapping[str, int]) -> Any:
    """Open a session at a place, as :func:`open_session` does unless the place has another opener."""
    if place.ordinal is not None:
        open_provider()
        load_lazily_opened(frozenset(spec.stem for spec in LIBRARIES))
    return (place.opener or open_session)(model, settings, place, dimensions)


def prepare(work: Work) -> None:
    """Open plain ONNX Runtime for the candidates that are measured afterwards.

    Raises:
        Exception: ONNX Runtime's own, if it does not run.
    """
    global _prepared
    plain = open_at(work.place, work.model, {}, {})
    _prepared = work, plain, [plain.run(None, dict(feed)) for feed in work.feeds]


_prepared: tuple[Work, Any, list[Any]] | None = None


def measure(settings: Settings, seconds: float) -> Trial:
    """Compare the results of a candidate with the right ones, and its time with plain ONNX Runtime's, in turns.

    Args:
        seconds: to measure each batch.

    Raises:
        Exception: whatever a candidate raises.
    """
    assert _prepared is not None
    work, plain, expected = _prepared
    asked = {} if GIVEN in settings else options_of(settings)
    if GIVEN in settings:
        found = _opened(work.model, _quiet(), list(work.given))
    else:
        model = work.half if FLOAT16 in asked and work.half is not None else work.model
        found = open_at(work.place, model, settings, work.dimensions)
    names = [output.name for output in plain.get_outputs()]
    ratios, seconds_of_each, worst = [], [], 0.0
    for number, feed in enumerate(work.feeds):
        right = work.right[number] if work.right is not None else None
        checked = Comparison(names, right, expected[number], TOLERANCE if FLOAT16 in asked else None)
        if CAPTURE not in asked:  # each run would capture
            checked.add_all(several_runs(found, feed))
        if checked.wrong is None:
            ratio, taken = _timed(work, asked, number, (plain, found), expected[number], checked, seconds)
            ratios.append(ratio)
            seconds_of_each.append(taken)
        if checked.wrong is not None:
            return Trial(settings, error=checked.error, verdict=f"rejected: {checked.wrong}")
        worst = max(worst, checked.error or 0.0)
    return Trial(settings, statistics.geometric_mean(ratios), tuple(seconds_of_each), worst)


def _timed(
    work: Work,
    asked: Mapping[str, str],
    number: int,
    sessions: tuple[Any, Any],
    expected: Sequence[Any],
    checked: Comparison,
    seconds: float,
) -> tuple[float, float]:
    """Return the time of a run relative to plain ONNX Runtime's, and in seconds. Every result is checked.

    Args:
        number: of the batch.
        sessions: plain ONNX Runtime's, and the candidate.
    """
    (plain, found), feed = sessions, work.feeds[number]
    if work.threads > 1:
        runtime = runtime_on(work.place.ordinal) if work.place.ordinal is not None else None
        pinned = PinnedMemory(runtime, PINNED_MEMORY_LIMIT)
        ways: tuple[Any, Any] = (
            _Crowd(plain, feed, work.threads, pinned),
            _Crowd(found, feed, int(asked.get(DEPTH, work.threads)), None if STAGING in asked else pinned),
        )
    else:
        graph = number if CAPTURE in asked else None
        ways = (_Single(plain, feed, expected, work.place, None), _Single(found, feed, expected, work.place, graph))
    for way in ways:
        for _ in range(_WARMING):
            way.run()
    checked.add_all(ways[1].results)
    times: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while len(times[0]) < _MOST_ROUNDS:
        passed = time.perf_counter() - started
        if len(times[0]) >= _FEWEST_ROUNDS and passed >= seconds:
            break
        if passed >= seconds / 4 and sum(times[1]) > _HOPELESS * sum(times[0]):
            break
        for which in (0, 1) if len(times[0]) % 2 else (1, 0):
            times[which].append(ways[which].run())
        checked.add_all(ways[1].results)
        if checked.wrong is not None:
            break
    return statistics.median(ours / theirs for theirs, ours in zip(*times, strict=True)), statistics.median(times[1])


class _Single:
    """Single runs of a session with its arrays in fixed memory of its device, if they are tensors of numbers.

    Args:
        graph: the number of the CUDA graph that it captures.
    """

    def __init__(
        self,
        session: InferenceSession,
        feed: Mapping[str, Any],
        expected: Sequence[Any],
        place: Place,
        graph: int | None,
    ) -> None:
        self._session, self._feed = session, dict(feed)
        self._options = None
        if graph is not None:
            self._options = onnxruntime.RunOptions()
            self._options.add_run_config_entry("gpu_graph_id", str(graph + 1))
        self.results: list[Sequence[Any]] = []
        self._binding = None
        arrays = [*feed.values(), *expected]
        if not all(isinstance(each, np.ndarray) and each.dtype != object and each.size for each in arrays):
            return
        where = ("cpu", 0) if place.ordinal is None else ("cuda", place.ordinal)
        on_device = onnxruntime.OrtValue.ortvalue_from_numpy
        self._binding = session.io_binding()
        self._inputs = {name: on_device(np.ascontiguousarray(array), *where) for name, array in feed.items()}
        self._spoilt = [_spoilt(array) for array in expected]
        self._outputs = [on_device(array.copy(), *where) for array in self._spoilt]
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for output, value in zip(session.get_outputs(), self._outputs, strict=True):
            self._binding.bind_ortvalue_output(output.name, value)

    def run(self) -> float:
        """Run once, keep the results, and return the seconds."""
        if self._binding is None:
            started = time.perf_counter()
            results = self._session.run(None, self._feed, self._options)
            taken = time.perf_counter() - started
        else:
            for value, spoilt in zip(self._outputs, self._spoilt, strict=True):
                value.update_inplace(spoilt)  # a result that is not written must not look like the last one
            self._outputs[-1].numpy()  # after the copies
            started = time.perf_counter()
            self._session.run_with_iobinding(self._binding, self._options)
            taken = time.perf_counter() - started
            results = [value.numpy() for value in self._outputs]
        self.results = [results]
        return taken


def _spoilt(array: Any) -> Any:
    """Return an array like this one, of values that no model computes by chance."""
    if array.dtype.kind == "f":
        return np.full_like(array, np.nan)
    return np.zeros_like(array) if array.dtype == bool else np.full_like(array, 0x55)


class _Crowd:
    """Blocks of runs of a session in several threads, from arrays to arrays, staged in ``pinned`` as ``map`` does."""

    def __init__(
        self, session: InferenceSession, feed: Mapping[str, Any], threads: int, pinned: PinnedMemory | None
    ) -> None:
        self._session, self._feed, self._threads, self._pinned = session, dict(feed), threads, pinned
        self._calls = 1
        self.results: list[Sequence[Any]] = []
        self._executor = ThreadPoolExecutor(threads)

    def run(self) -> float:
        """Run a block, keep the results, and return the mean seconds of a run."""

        def several() -> list[Sequence[Any]]:
            return [self._session.run(None, self._staged()) for _ in range(self._calls)]

        started = time.perf_counter()
        done = [self._executor.submit(several) for _ in range(self._threads)]
        self.results = list(itertools.chain.from_iterable(each.result() for each in done))
        taken = time.perf_counter() - started
        mean = taken / self._calls / self._threads
        if taken < _BLOCK / 2:
            self._calls = min(20, 1 + int(self._calls * _BLOCK / max(taken, 1e-6)))
        return mean

    def _staged(self) -> dict[str, Any]:
        return self._feed if self._pinned is None else self._pinned.staged(self._feed)
