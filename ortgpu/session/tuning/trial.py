"""Functions for the child of ``tune``: open sessions, run them, compare their results, and measure."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
    PINNED_MEMORY_LIMIT,
    SESSION_SETTINGS,
    STAGING,
    THREADS,
    Settings,
    options_of,
)
from ...running.comparing import TOLERANCE, Comparison
from ...running.cudart import runtime_on
from ...running.graph_requests import obstacle
from ...running.made_inputs import batch_dimension, make_inputs, shape_of
from ...running.onnxruntimes import InferenceSession
from ...running.pinned import PinnedMemory
from ...running.pipeline import iterate_in_order
from .children import GIVEN, Beginning, Place, Trial, Wanted, Work

_MOST_ROUNDS, _FEWEST_ROUNDS = 200, 5
_WARMING = 3  # runs
_HOPELESS = 3  # Above this ratio to plain ONNX Runtime's time a candidate needs no more rounds.
_BLOCK = 0.05  # seconds of a block of runs in several threads
_AT_ONCE = 2  # concurrent runs: one known fault is a race between streams
_SECONDS_AT_ONCE, _MOST_AT_ONCE = 0.2, 20  # They end after this time, or after this number of runs in each thread.
_MOST_BYTES = 256 << 20  # Limit of the results that a thread keeps, unless a single run has more.


def begin(wanted: Wanted, place: Place, session_class: Any) -> Beginning:
    """Open the model on its GPU, make up inputs, and run it with them. ``session_class`` is GPUSession.

    Raises what ``tune`` raises for the device, the inputs and the model.
    """
    model, batches, feeds = wanted.model, wanted.batches, wanted.feeds
    outline = GraphOutline(model)
    gpu = None
    left_out: list[str] = []
    if place.ordinal is None:
        session = open_at(place, model, {}, {})
        operators = {os.fsdecode(operator) for operator, _ in outline.operators()}
        needs_cudnn, no_graph = False, None
    else:
        session = session_class(model, device=wanted.device, allow_cpu=False, cpu_nodes="allow", tuned=False)
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
        by_content = isinstance(model, bytes) or wanted.precision == "float16"
        key: Key | str = key_of(outline, gpu, by_content=by_content)
    except VoidRecordError as error:
        key = str(error)
    if gpu is not None:
        session.close()  # The process lives on, and so would the session.
    return Beginning(
        gpu,
        tuple(feeds),
        _dimensions(inputs, feeds),
        key,
        convolves=any("Conv" in operator for operator in operators),
        needs_cudnn=needs_cudnn,
        captures=no_graph is None,
        left_out=tuple(left_out),
    )


def _dimensions(inputs: Sequence[Value], feeds: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sizes of free dimensions by their names: none if there are several batches or a nameless dimension."""
    if len(feeds) != 1:
        return {}
    dimensions: dict[str, int] = {}
    for value in inputs:
        for size, real in zip(value.shape, shape_of(feeds[0][value.name]), strict=True):
            if isinstance(size, str) and size:
                if dimensions.setdefault(size, real) != real:
                    return {}
            elif not isinstance(size, int):
                return {}
    return dimensions


def results(model: ModelSource, place: Place, feeds: Sequence[Mapping[str, Any]]) -> tuple[list[Any], ...]:
    """Return the results of plain ONNX Runtime at a place. The CPU computes in float32."""
    session = open_at(place, model, {}, {})
    return tuple(session.run(None, dict(feed)) for feed in feeds)


def open_session(model: ModelSource, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Return an InferenceSession with these settings. Without settings the session is plain ONNX Runtime's."""
    requested = options_of(settings)
    options = _quiet()
    if THREADS in requested:
        options.intra_op_num_threads = int(requested[THREADS])
    for name, size in dimensions.items() if DIMENSIONS in requested else ():
        options.add_free_dimension_override_by_name(name, size)
    if place.ordinal is None:
        return _opened(model, options, [CPU])
    of_cuda = {name: value for name, value in requested.items() if name not in SESSION_SETTINGS}
    if place.ordinal:  # ONNX Runtime 1.31 logs a warning if the options name the first GPU.
        of_cuda["device_id"] = str(place.ordinal)
    return _opened(model, options, [(CUDA, of_cuda), CPU])


def _opened(model: ModelSource, options: Any, providers: Sequence[Any]) -> Any:
    """Return a session. Raises ProviderFallbackError if the session does not have its first provider."""
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
    """Open a session at a place, by the opener of the place or by :func:`open_session`."""
    if place.ordinal is not None:
        open_provider()
        load_lazily_opened(frozenset(spec.stem for spec in LIBRARIES))
    return (place.opener or open_session)(model, settings, place, dimensions)


def prepare(work: Work) -> None:
    """Open and run plain ONNX Runtime, as the reference for the candidates."""
    global _prepared
    plain = open_at(work.place, work.wanted.model, {}, {})
    _prepared = work, plain, [plain.run(None, dict(feed)) for feed in work.begun.feeds]


_prepared: tuple[Work, Any, list[Any]] | None = None
_Way = Callable[[], tuple[float, list[Sequence[Any]]]]  # runs a session, and returns the seconds of a run, and results


def measure(settings: Settings, seconds: float) -> Trial:
    """Compare the results of a candidate with the right ones, and its time with plain ONNX Runtime's.

    Runs of both alternate, for ``seconds`` with each batch. Raises any exception of the candidate.
    """
    assert _prepared is not None
    work, plain, expected = _prepared
    wanted = work.wanted
    requested = {} if GIVEN in settings else options_of(settings)
    if GIVEN in settings:
        candidate = _opened(wanted.model, _quiet(), list(wanted.providers))
    else:
        model = work.half if FLOAT16 in requested and work.half is not None else wanted.model
        candidate = open_at(work.place, model, settings, work.begun.dimensions)
    names = [output.name for output in plain.get_outputs()]
    ratios, seconds_of_each, worst = [], [], 0.0
    for number, feed in enumerate(work.begun.feeds):
        right = work.right[number] if work.right is not None else None
        comparison = Comparison(names, right, expected[number], TOLERANCE if FLOAT16 in requested else None)
        if CAPTURE not in requested:  # Each of these runs would capture a graph.
            comparison.add_all(several_runs(candidate, feed))
        if comparison.wrong is None:
            if wanted.threads > 1:
                runtime = runtime_on(work.place.ordinal) if work.place.ordinal is not None else None
                pinned = PinnedMemory(runtime, PINNED_MEMORY_LIMIT)
                theirs = _concurrent(plain, feed, wanted.threads, pinned)
                depth, staging = int(requested.get(DEPTH, wanted.threads)), None if STAGING in requested else pinned
                ours = _concurrent(candidate, feed, depth, staging)
            else:
                theirs = _single(plain, feed, expected[number], work.place)
                graph = str(number + 1) if CAPTURE in requested else None
                ours = _single(candidate, feed, expected[number], work.place, graph)
            ratio, duration = _timed(theirs, ours, comparison, seconds)
            ratios.append(ratio)
            seconds_of_each.append(duration)
        if comparison.wrong is not None:
            return Trial(settings, error=comparison.error, verdict=f"rejected: {comparison.wrong}")
        worst = max(worst, comparison.error or 0.0)
    return Trial(settings, statistics.geometric_mean(ratios), tuple(seconds_of_each), worst)


def several_runs(session: Any, feed: Mapping[str, Any]) -> list[list[Any]]:
    """Return the results of a single run, and of more runs in two threads at the same time."""
    runs: list[list[Any]] = [session.run(None, dict(feed))]
    size = sum(getattr(output, "nbytes", 0) for output in runs[0])
    most = min(_MOST_AT_ONCE, 1 + _MOST_BYTES // max(size, 1))
    end = time.perf_counter() + _SECONDS_AT_ONCE
    feeds = itertools.takewhile(lambda _: time.perf_counter() < end, itertools.repeat(feed, _AT_ONCE * most))
    runs += iterate_in_order(lambda each: session.run(None, dict(each)), feeds, _AT_ONCE, _AT_ONCE)
    return runs


def _timed(plain: _Way, candidate: _Way, checked: Comparison, seconds: float) -> tuple[float, float]:
    """Return the time of a run relative to plain ONNX Runtime's, and in seconds. Every result is checked."""
    for way in (plain, candidate):
        for _ in range(_WARMING):
            _, results = way()
    checked.add_all(results)
    times: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while len(times[0]) < _MOST_ROUNDS and checked.wrong is None:
        elapsed = time.perf_counter() - started
        if len(times[0]) >= _FEWEST_ROUNDS and elapsed >= seconds:
            break
        if elapsed >= seconds / 4 and sum(times[1]) > _HOPELESS * sum(times[0]):
            break
        for index in (0, 1) if len(times[0]) % 2 else (1, 0):
            taken, results = (plain, candidate)[index]()
            times[index].append(taken)
            if index:
                checked.add_all(results)
    if checked.wrong is not None:
        return math.nan, math.nan
    return statistics.median(ours / theirs for theirs, ours in zip(*times, strict=True)), statistics.median(times[1])


def _single(
    session: InferenceSession, feed: Mapping[str, Any], expected: Sequence[Any], place: Place, graph: str | None = None
) -> _Way:
    """Return a way to run a session once. Tensors of numbers stay in fixed memory of its device.

    ``graph`` is the number of the CUDA graph to capture. None: no graph.
    """
    options = None
    if graph is not None:
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", graph)
    arrays = [*feed.values(), *expected]
    if not all(isinstance(array, np.ndarray) and array.dtype != object and array.size for array in arrays):
        return _concurrent(session, feed, 1, None)  # Graphs are not for such arrays.
    where = ("cpu", 0) if place.ordinal is None else ("cuda", place.ordinal)
    on_device = onnxruntime.OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    inputs = {name: on_device(np.ascontiguousarray(array), *where) for name, array in feed.items()}
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    spoilt = [_spoilt(array) for array in expected]
    outputs = [on_device(array.copy(), *where) for array in spoilt]
    for output, value in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(output.name, value)

    def run_bound(_: object = inputs) -> tuple[float, list[Sequence[Any]]]:  # which keeps their memory
        for value, array in zip(outputs, spoilt, strict=True):
            value.update_inplace(array)  # A missing result must not look like the last one.
        outputs[-1].numpy()  # This waits for the copies.
        started = time.perf_counter()
        session.run_with_iobinding(binding, options)
        return time.perf_counter() - started, [[value.numpy() for value in outputs]]

    return run_bound


def _spoilt(array: Any) -> Any:
    """Return an array of the same shape and type, with values that no model computes by chance."""
    if array.dtype.kind == "f":
        return np.full_like(array, np.nan)
    return np.zeros_like(array) if array.dtype == bool else np.full_like(array, 0x55)


def _concurrent(session: InferenceSession, feed: Mapping[str, Any], threads: int, pinned: PinnedMemory | None) -> _Way:
    """Return a way to run a session in blocks in several threads. ``pinned`` stages the arrays, as in ``map``."""
    calls = 1

    def several(calls: int) -> list[Sequence[Any]]:
        return [session.run(None, dict(feed) if pinned is None else pinned.staged(feed)) for _ in range(calls)]

    def run() -> tuple[float, list[Sequence[Any]]]:
        nonlocal calls
        started = time.perf_counter()
        blocks = iterate_in_order(several, itertools.repeat(calls, threads), threads, threads)
        results = list(itertools.chain.from_iterable(blocks))
        taken = time.perf_counter() - started
        mean = taken / calls / threads
        if taken < _BLOCK / 2:
            calls = min(20, 1 + int(calls * _BLOCK / max(taken, 1e-6)))
        return mean, results

    return run
