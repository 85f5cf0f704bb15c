"""Measurements of a model: plain ONNX Runtime and the ways of this library, in turns, in one process.

``onnxruntime`` must be importable. Nothing is printed; :mod:`ortgpu.cli.bench` shows the results.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...errors import GPUError, GPUOutOfMemoryError, ProviderFallbackError
from ...model.files import is_ort_format
from ...model.outline import MOST_PARTS, Graph, GraphOutline
from ...process.timing import in_turns, quartiles
from ...provider.placement import Placement
from ...provider.requests import CPU, CUDA
from ...session.chosen.layouts import LAYOUTS, in_a_program
from ...session.pool.pool import GPUSessionPool

Feed = Mapping[str, Any]

PLAIN, RUN = "plain", "run"

# Each way, and the code for it in a program
WAYS = {
    PLAIN: "onnxruntime.InferenceSession(model).run",
    RUN: "GPUSession(model).run",
    "map": "GPUSession(model).map",
    "graph": "GPUSession(model, cuda_graph=True).run",
    "pool": "GPUSessionPool(model).map",
}

_BLOCK = 0.1  # minimum seconds of a block, so that scheduling and clocks matter little
_MOST_CALLS = 2000  # of a block
_REFILLS = 4  # times the feeds in flight of a map, since a block includes filling and draining

# Relative to the largest value of an output. TF32 and float16 keep 10 bits of the mantissa, and the errors of layers
# add up. Thirty layers stayed below this, compared with float32 on the CPU.
TOLERANCE = 2e-2

_DEFAULTS = {"prefer_nhwc": "0", "fuse_conv_bias": "0"}
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv"})


@dataclass(frozen=True, slots=True)
class Spread:
    low: float  # lower quartile
    median: float
    high: float  # upper quartile

    def relative_to(self, base: float) -> Spread:
        return Spread(self.low / base, self.median / base, self.high / base)


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of the seconds of single calls. ``p99`` is None with fewer than a hundred calls."""

    p50: float
    p90: float
    p99: float | None
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
        enough = len(seconds) >= 100
        return cls(percentiles[49], percentiles[89], percentiles[98] if enough else None, len(seconds))

    def as_dict(self) -> dict[str, object]:
        """Return the percentiles in milliseconds."""
        p50, p90, p99 = (each and round(each * 1e3, 4) for each in (self.p50, self.p90, self.p99))
        return {"p50": p50, "p90": p90, "p99": p99, "calls": self.calls}


@dataclass(frozen=True, slots=True)
class Figure:
    """The figures of one way, or of ``run`` with one layout of images, for one batch size.

    Attributes:
        batch: None for a model without a free batch dimension; a request is then one item.
        rate: items per second.
        ratio: the rate relative to the median of plain ONNX Runtime, or of a layout relative to that of ``run``. None
            for plain ONNX Runtime, or if the other rate was not measured.
        latency: None for a way that runs many requests at once.
    """

    way: str
    batch: int | None
    rate: Spread
    ratio: Spread | None
    latency: Latency | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A way or a layout that was not measured, with all batch sizes or with one.

    ``why`` is the first line of the exception, or the reason for not trying it.
    """

    way: str
    batch: int | None
    why: str


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    run: Callable[[None, Feed], Any] | None = None  # one request at a time, or
    map: Callable[[Iterable[Feed]], Iterator[Any]] | None = None  # many, so many of them
    at_least: int = 1

    def block(self, feed: Feed, calls: int) -> tuple[float, list[float]]:
        """Return the total seconds of ``calls`` calls, and those of each call if they run one by one."""
        if self.run is not None:
            each = [_seconds(self.run, None, feed) for _ in range(calls)]
            return sum(each), each
        assert self.map is not None
        return _seconds(deque, self.map(itertools.repeat(feed, calls)), 0), []


def _seconds(action: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


class Bench:
    """The sessions to compare. It is a context manager that closes them.

    ``session`` is on the first GPU. With ``allow_cpu`` all sessions are on the CPU if no GPU can be used. ``left_out``
    lists the ways that cannot be opened beside it, ``layouts`` the layouts that :meth:`measure_layouts` tries.
    """

    def __init__(self, model: str, *, allow_cpu: bool | None = None) -> None:
        from ...session.gpu_session import GPUSession

        self._model = model
        self._stack = ExitStack()
        self.left_out: list[LeftOut] = []
        self.layouts: tuple[str, ...] = ()
        self._plain: Any = None  # the InferenceSession
        self.session = self._stack.enter_context(GPUSession(model, allow_cpu=allow_cpu))
        self._ways = [_Way(RUN, run=self.session.run), _Way("map", map=self.session.map, at_least=8 * _REFILLS)]
        on_gpu = self.session.device.is_gpu
        try:
            self._add(PLAIN, self._open_plain)
            if on_gpu:
                self._add("graph", lambda: _Way("graph", self._stack.enter_context(self._open(cuda_graph=True)).run))
            self._add("pool", lambda: self._open_pool(allow_cpu))
            if on_gpu:
                self.layouts = self._choose_layouts()
        except BaseException:
            self._stack.close()
            raise
        self._ways.sort(key=lambda way: list(WAYS).index(way.name))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, batch: int | None, feed: Feed, rounds: int) -> list[Figure]:
        """Measure all ways for one feed and return their figures. Ways that fail are added to ``left_out``.

        Raises:
            GPUError: that of ``run``, if no way runs; that of any way which ran before and then fails.
            Exception: that of ``run``, if the model does not run on this feed at all.
        """
        calls: dict[_Way, int] = {}
        of_run: Exception | None = None
        for way in self._ways:
            try:
                calls[way] = self._calls(way, feed)
            except Exception as error:
                if way.name == RUN and not isinstance(error, GPUError):
                    raise
                of_run = error if way.name == RUN else of_run
                self.left_out.append(LeftOut(way.name, batch, first_line(error)))
        if of_run is not None and not calls:
            raise of_run
        return self._in_turns(calls, PLAIN, batch, feed, rounds)

    def leave_out(self, batch: int | None, error: Exception) -> None:
        """Add all ways to ``left_out`` for a feed on which :meth:`measure` raised."""
        known = {each.way for each in self.left_out if each.batch == batch}
        self.left_out += [LeftOut(way.name, batch, first_line(error)) for way in self._ways if way.name not in known]

    def measure_layouts(self, feeds: Mapping[int | None, Feed], rounds: int) -> list[Figure]:
        """Measure ``run`` with each of ``layouts``, in turns with ``session``, and return the figures.

        ``feeds`` are by batch. Only one further session is open at a time. A layout that cannot be opened or run is
        added to ``left_out``, and so is one whose results differ from plain ONNX Runtime, with all batches. Call it
        after :meth:`measure`, since batches that plain ONNX Runtime or ``run`` could not run are skipped.
        """
        figures: list[Figure] = []
        failed = {each.batch for each in self.left_out if each.way in (PLAIN, RUN)}
        feeds = {batch: feed for batch, feed in feeds.items() if batch not in failed}
        for name in self.layouts if feeds else ():
            try:
                figures += self._measure_layout(name, feeds, rounds)
            except Exception as error:  # noqa: BLE001 - a layout that fails once is not usable
                self.left_out.append(LeftOut(name, None, first_line(error)))
        return figures

    def _measure_layout(self, name: str, feeds: Mapping[int | None, Feed], rounds: int) -> list[Figure]:
        figures: list[Figure] = []
        names = [output.name for output in self.session.get_outputs()]
        run = _Way(RUN, run=self.session.run)
        with self._open(providers=[(CUDA, dict(LAYOUTS[name]))]) as session:
            layout = _Way(name, run=session.run)
            for batch, feed in feeds.items():
                try:
                    expected = self._plain.run(None, feed)
                    check_results(names, expected, session.run(None, feed))
                    calls = {way: self._calls(way, feed) for way in (run, layout)}
                    _, figure = self._in_turns(calls, RUN, batch, feed, rounds)
                    check_results(names, expected, session.run(None, feed))  # again, since a race may show late
                    figures.append(figure)
                except GPUOutOfMemoryError as error:
                    self.left_out.append(LeftOut(name, batch, first_line(error)))
        return figures

    def _in_turns(
        self, calls: Mapping[_Way, int], base: str, batch: int | None, feed: Feed, rounds: int
    ) -> list[Figure]:
        """Measure the ways in turns. ``calls`` has the size of a block of each way; ratios are relative to ``base``."""
        latencies: dict[str, list[float]] = {way.name: [] for way in calls}

        def block(way: _Way, number: int) -> float:
            seconds, each = way.block(feed, number)
            latencies[way.name] += each
            return seconds / number

        seconds = in_turns({way.name: partial(block, way, number) for way, number in calls.items()}, rounds)
        items = batch or 1
        rates = {name: Spread(*quartiles([items / each for each in taken])) for name, taken in seconds.items()}
        return [
            Figure(
                name,
                batch,
                rate,
                rate.relative_to(rates[base].median) if base in rates and name != base else None,
                Latency.of(latencies[name]) if len(latencies[name]) > 1 else None,
            )
            for name, rate in rates.items()
        ]

    def _calls(self, way: _Way, feed: Feed) -> int:
        """Return the number of calls in a block. Finding it also warms the way up."""
        way.block(feed, way.at_least)
        seconds, _ = way.block(feed, way.at_least)
        wanted = math.ceil(_BLOCK * way.at_least / max(seconds, 1e-9))
        return max(way.at_least, min(wanted, _MOST_CALLS))

    def _add(self, name: str, opened: Callable[[], _Way]) -> None:
        try:
            self._ways.append(opened())
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            self.left_out.append(LeftOut(name, None, first_line(error)))

    def _choose_layouts(self) -> tuple[str, ...]:
        """Return the other layouts that can give correct results, for a model with convolutions."""
        if not has_convolutions(self.session.placement):
            return ()
        names = layouts_beside(self.session.options_chosen)
        try:
            weights = find_weights(self._model)
        except Exception as error:  # noqa: BLE001 - a file of another format, or a broken onnx
            reasons: dict[str, str | None] = dict.fromkeys(names, f"its weights cannot be read: {first_line(error)}")
        else:
            if not weights:
                return ()
            reasons = {name: why_untried(name, weights) for name in names}
        if self._plain is None:
            reasons = dict.fromkeys(names, "there are no results of plain run to compare with")
        self.left_out += [LeftOut(name, None, why) for name, why in reasons.items() if why is not None]
        return tuple(name for name, why in reasons.items() if why is None)

    def _open(self, **options: Any) -> Any:
        from ...session.gpu_session import GPUSession

        return GPUSession(self._model, **{"device": self.session.device.ordinal, "cpu_nodes": "allow", **options})

    def _open_pool(self, allow_cpu: bool | None) -> _Way:
        pool = self._stack.enter_context(GPUSessionPool(self._model, allow_cpu=allow_cpu, cpu_nodes="allow"))
        return _Way("pool", map=pool.map, at_least=_REFILLS * 2 * 3 * len(pool))

    def _open_plain(self) -> _Way:
        import onnxruntime

        from ...session.guard.guard import uninstall

        uninstall()  # else ORTGPU_ENFORCE=1 would make it a GPUSession
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        device = self.session.device
        providers: list[Any] = [CPU]
        if device.is_gpu:
            # The first GPU is the default, and naming it makes 1.31 log a warning.
            providers.insert(0, (CUDA, {"device_id": str(device.ordinal)}) if device.ordinal else CUDA)
        session = onnxruntime.InferenceSession(self._model, options, providers=providers)
        bound = session.get_providers()
        if bound[0] != (CUDA if device.is_gpu else CPU):
            raise ProviderFallbackError("plain ONNX Runtime did not reach the GPU", bound=tuple(bound))
        session.disable_fallback()
        self._plain = session
        return _Way(PLAIN, run=session.run)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def recommend(figures: Sequence[Figure], layouts: Sequence[Figure] = ()) -> list[str]:
    """Return a sentence for each setting that these figures recommend.

    A difference within the spread counts for nothing. Of ways that are equally fast, the first in WAYS is recommended.
    """
    found: list[str] = []
    batches = list(dict.fromkeys(figure.batch for figure in figures))
    for batch in batches:
        of_batch = {figure.way: figure for figure in figures if figure.batch == batch}
        faster = [figure for figure in of_batch.values() if _is_faster(figure, of_batch.get(PLAIN))]
        where = f"Batch {batch}" if batch is not None else "This model"
        for what, candidates in (
            ("shortest time for a request", [figure for figure in faster if figure.latency]),
            ("most items a second", faster),
        ):
            best = _plainest_of_the_best(candidates)
            if best is not None and best.ratio is not None:
                found.append(f"{where}, {what}: {WAYS[best.way]}, {best.ratio.median:.2f} times plain run.")
        better = [each for each in layouts if each.batch == batch and _is_faster(each, of_batch.get(RUN))]
        best = max(better, key=_median_ratio, default=None)
        if best is not None:
            written = in_a_program(best.way)
            found.append(f"{where}, {best.way}: {written}, whose run is {_median_ratio(best):.2f} times {WAYS[RUN]}.")
    return found


def _plainest_of_the_best(candidates: Sequence[Figure]) -> Figure | None:
    """Return the simplest way among those about as fast as the fastest, or None if there is none.

    A way is about as fast if its median reaches the lower quartile of the fastest.
    """
    best = max(candidates, key=lambda figure: figure.rate.median, default=None)
    if best is None:
        return None
    as_fast = [figure for figure in candidates if figure.rate.median >= best.rate.low]
    return min(as_fast, key=lambda figure: list(WAYS).index(figure.way))


def _is_faster(figure: Figure, base: Figure | None) -> bool:
    """Return True if three of four rounds were faster than ``base`` by more than the spread of ``base`` itself."""
    if base is None or figure.ratio is None:
        return False
    noise = (base.rate.high - base.rate.low) / base.rate.median
    return figure.ratio.low > 1 + noise


def _median_ratio(figure: Figure) -> float:
    return figure.ratio.median if figure.ratio is not None else 0.0


# Layouts of images. ortgpu.session.chosen.choose has the narrower choice of a session, which compares no results.


class DifferentResultsError(ValueError):
    """A layout gives other results than plain ONNX Runtime."""


def layouts_beside(options_chosen: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of the layouts that a session with ``options_chosen`` does not have."""
    had = {name: options_chosen[name][0] for name in _DEFAULTS if name in options_chosen}
    return tuple(name for name, options in LAYOUTS.items() if {**_DEFAULTS, **options} != {**_DEFAULTS, **had})


def has_convolutions(placement: Placement) -> bool:
    """Return True if convolutions are on the GPU, or if the placement was not recorded."""
    if not placement.known:
        return True
    return any(node.op_type in _CONVOLUTIONS and node.provider == CUDA for node in placement.nodes)


def find_weights(model: str) -> tuple[str | None, ...]:
    """Return the element type of the weights of each convolution in a model file.

    A type is named as in onnx ("FLOAT"), or None if the weights are not constant.
    """
    from onnx import TensorProto

    if is_ort_format(model):
        raise ValueError("the model is in ONNX Runtime's own format")
    outline = GraphOutline(model, 10 * MOST_PARTS)
    # Before IR version 4 every initializer is also an input, and none can be overridden.
    fixed = outline.content.ir_version < 4
    found = _weights_in(outline.graph, {}, () if fixed else [value.name for value in outline.graph.inputs])
    for function in outline.functions:  # the weights are inputs of the function, so their types are unknown
        found += _weights_in(function, {})
    return tuple(None if kind is None else TensorProto.DataType.Name(kind) for kind in found)


def why_untried(layout: str, weights: Sequence[str | None]) -> str | None:
    """Return the reason why a channels-last layout fails for convolutions with these weights, or None.

    ONNX Runtime 1.31 converts constant weights to the layout and assumes that others are converted already (PrePack in
    conv.cc and conv_transpose.cc). It has no such convolutions of doubles. For float16 with fused biases, cuDNN 9.19
    has kernels that poison the CUDA context.
    """
    if None in weights:
        return (
            "weights of a convolution are not constant, and ONNX Runtime would take them to be in this layout already"
        )
    if "fuse_conv_bias" in LAYOUTS[layout] and "FLOAT16" in weights:
        return "convolutions of float16 with biases inside ended in an illegal instruction, CUDA error 715"
    others = sorted({str(kind).lower() for kind in weights} - {"float", "float16"})
    return f"weights of a convolution are of the type {' and '.join(others)}" if others else None


def _weights_in(graph: Graph, around: Mapping[bytes, int], overridable: Sequence[bytes] = ()) -> list[int | None]:
    own = {tensor.name: tensor.data_type for tensor in graph.initializers}
    constants = {name: kind for name, kind in {**around, **own}.items() if name not in overridable}
    found: list[int | None] = []
    for node in graph.nodes:
        if os.fsdecode(node.operator) in _CONVOLUTIONS:
            found.append(constants.get(node.inputs[1]))
        elif node.operator == b"Constant":
            constants[node.outputs[0]] = next((each.data_type for each in node.attribute(b"value").tensors), 0)
        for graph in node.graphs:
            found += _weights_in(graph, constants)
    return found


def check_results(names: Sequence[str], expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Raise DifferentResultsError unless floats agree within TOLERANCE and all else is equal."""
    for name, right, other in zip(names, expected, found, strict=True):
        difference = _difference(right, other)
        if difference:
            raise DifferentResultsError(f"output {name!r} {difference}")


def _difference(right: Any, other: Any) -> str | None:
    if not isinstance(right, np.ndarray) or not isinstance(other, np.ndarray):
        return "is no tensor, and is not compared"
    if (right.shape, right.dtype) != (other.shape, other.dtype):
        return f"has shape {other.shape} and type {other.dtype}, not {right.shape} and {right.dtype}"
    if right.dtype.kind != "f":
        different = int(np.count_nonzero(right != other))
        return f"differs from that of plain run in {different} of {right.size} values" if different else None
    finite = np.isfinite(right)
    if not np.array_equal(right[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return "has infinities or NaN where that of plain run has others, or none"
    wide = np.promote_types(right.dtype, np.float32)  # the difference of two float16 can be too large for one
    right, other = right[finite].astype(wide), other[finite].astype(wide)
    largest = np.max(np.abs(right), initial=0)
    error = np.max(np.abs(right - other), initial=0)
    if error <= TOLERANCE * largest:
        return None
    return f"differs from that of plain run by {error:.3g}, and its largest value is {largest:.3g}"
