"""Measurements of a model: plain ONNX Runtime and the ways of this library, in turns, in one process.

``onnxruntime`` must be importable. Nothing is printed; :mod:`ortgpu.cli.bench` shows the results.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import GPUError, ProviderFallbackError
from ...process.timing import in_turns, quartiles
from ...provider.requests import CPU, CUDA
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
    """The figures of one way for one batch size.

    Attributes:
        batch: None for a model without a free batch dimension; a request is then one item.
        rate: items per second.
        ratio: the rate relative to the median of plain ONNX Runtime. None for plain ONNX Runtime, or if it was not
            measured.
        latency: None for a way that runs many requests at once.
    """

    way: str
    batch: int | None
    rate: Spread
    ratio: Spread | None
    latency: Latency | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A way that was not measured, with all batch sizes or with one. ``why`` is the first line of the exception."""

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
    lists the ways that cannot be opened beside it.
    """

    def __init__(self, model: str, *, allow_cpu: bool | None = None) -> None:
        from ...session.gpu_session import GPUSession

        self._model = model
        self._stack = ExitStack()
        self.left_out: list[LeftOut] = []
        self.session = self._stack.enter_context(GPUSession(model, allow_cpu=allow_cpu))
        self._ways = [_Way(RUN, run=self.session.run), _Way("map", map=self.session.map, at_least=8 * _REFILLS)]
        on_gpu = self.session.device.is_gpu
        try:
            self._add(PLAIN, self._open_plain)
            if on_gpu:
                self._add("graph", lambda: _Way("graph", self._stack.enter_context(self._open(cuda_graph=True)).run))
            self._add("pool", lambda: self._open_pool(allow_cpu))
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
        return self._in_turns(calls, batch, feed, rounds)

    def leave_out(self, batch: int | None, error: Exception) -> None:
        """Add all ways to ``left_out`` for a feed on which :meth:`measure` raised."""
        known = {each.way for each in self.left_out if each.batch == batch}
        self.left_out += [LeftOut(way.name, batch, first_line(error)) for way in self._ways if way.name not in known]

    def _in_turns(self, calls: Mapping[_Way, int], batch: int | None, feed: Feed, rounds: int) -> list[Figure]:
        """Measure the ways in turns. ``calls`` has the size of a block of each way."""
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
                rate.relative_to(rates[PLAIN].median) if PLAIN in rates and name != PLAIN else None,
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
        return _Way(PLAIN, run=session.run)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def recommend(figures: Sequence[Figure]) -> list[str]:
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
