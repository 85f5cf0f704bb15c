"""Measurements of a model: plain ONNX Runtime and the ways of this library, alternately, in one process.

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
from typing import TYPE_CHECKING, Any

from ortgpu.process.late import late

from ...errors import GPUError
from ...process.timing import alternate, quartiles
from ...session.gpu_session_pool import GPUSessionPool
from ...session.guard.guard import uninstall
from ...session.tuning.children import Place, first_line

if TYPE_CHECKING:
    from ...session import gpu_session
    from ...session.tuning import trial
else:
    gpu_session = late("ortgpu.session.gpu_session")
    trial = late("ortgpu.session.tuning.trial")

Feed = Mapping[str, Any]

PLAIN, RUN = "plain", "run"

# Each way has a name and its code in a program.
WAYS = {
    PLAIN: "onnxruntime.InferenceSession(model).run",
    RUN: "GPUSession(model).run",
    "map": "GPUSession(model).map",
    "graph": "GPUSession(model, cuda_graph=True).run",
    "pool": "GPUSessionPool(model).map",
}

_BLOCK = 0.1  # The minimum seconds of a block, so that scheduling and clocks matter little.
_MOST_CALLS = 2000  # The maximum calls of a block.
_REFILLS = 4  # A block of a map has so many times its feeds in flight, since it includes filling and draining.


@dataclass(frozen=True, slots=True)
class Spread:
    low: float  # lower quartile
    median: float
    high: float  # upper quartile

    def relative_to(self, base: float) -> Spread:
        return Spread(self.low / base, self.median / base, self.high / base)

    def document(self) -> dict[str, object]:
        return {"median": self.median, "quartiles": [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class Figure:
    """The figures of one way for one batch size.

    Attributes:
        batch: None for a model without a free batch dimension; a request is then one item.
        rate: items per second.
        ratio: the rate relative to the median of plain ONNX Runtime. None for plain ONNX Runtime, or if it was not
            measured.
        latency: percentiles of single calls in milliseconds, and their number. None for a way that runs many requests
            at once.
    """

    way: str
    batch: int | None
    rate: Spread
    ratio: Spread | None
    latency: Mapping[str, float | None] | None

    def document(self) -> dict[str, object]:
        return {
            "way": self.way,
            "batch": self.batch,
            "items_per_second": self.rate.document(),
            "ratio_to_plain": self.ratio.document() if self.ratio else None,
            "latency_ms": self.latency,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the percentiles of calls in milliseconds. ``p99`` is None with fewer than a hundred calls."""
    cuts = [round(duration * 1e3, 4) for duration in statistics.quantiles(seconds, n=100, method="inclusive")]
    return {
        "p50": cuts[49],
        "p90": cuts[89],
        "p99": cuts[98] if len(seconds) >= 100 else None,
        "calls": len(seconds),
    }


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A way that was not measured, with all batch sizes or with one. ``why`` is the first line of the exception."""

    way: str
    batch: int | None
    why: str


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    run: Callable[[None, Feed], Any] | None = None  # Runs one request at a time.
    map: Callable[[Iterable[Feed]], Iterator[Any]] | None = None  # Runs many requests, at least ``at_least``.
    at_least: int = 1

    def block(self, feed: Feed, calls: int) -> tuple[float, list[float]]:
        """Return the total seconds of ``calls`` calls, and the seconds of each call if they run one by one."""
        if self.run is not None:
            durations = [_seconds(self.run, None, feed) for _ in range(calls)]
            return sum(durations), durations
        assert self.map is not None
        return _seconds(deque, self.map(itertools.repeat(feed, calls)), 0), []

    def calls(self, feed: Feed) -> int:
        """Return the number of calls in a block. The search for it also warms the way up."""
        self.block(feed, self.at_least)
        seconds, _ = self.block(feed, self.at_least)
        count = math.ceil(_BLOCK * self.at_least / max(seconds, 1e-9))
        return max(self.at_least, min(count, _MOST_CALLS))


def _seconds(action: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


class Bench:
    """The sessions to compare. They live as long as ``opened``.

    ``session`` is on the first GPU. With ``allow_cpu`` all sessions are on the CPU if no GPU can be used. ``left_out``
    lists the ways without figures. ``error`` is the first GPUError that left a feed out, or else the last exception.
    """

    def __init__(self, model: str, opened: ExitStack, *, allow_cpu: bool | None = None) -> None:
        self.left_out: list[LeftOut] = []
        self.error: Exception | None = None
        self.session = opened.enter_context(gpu_session.GPUSession(model, allow_cpu=allow_cpu))
        self._ways: list[_Way] = []
        uninstall()  # Otherwise ORTGPU_ENFORCE=1 would make the plain session a GPUSession.
        device = self.session.device

        def graph() -> _Way:
            options: dict[str, Any] = {"device": device.ordinal, "cpu_nodes": "allow"}
            return _Way("graph", opened.enter_context(gpu_session.GPUSession(model, cuda_graph=True, **options)).run)

        def pool() -> _Way:
            opened_pool = opened.enter_context(GPUSessionPool(model, allow_cpu=allow_cpu, cpu_nodes="allow"))
            return _Way("pool", map=opened_pool.map, at_least=_REFILLS * 2 * 3 * len(opened_pool))

        ways: dict[str, Callable[[], _Way]] = {
            PLAIN: lambda: _Way(PLAIN, trial.open_session(model, {}, Place(device.ordinal), {}).run),
            RUN: lambda: _Way(RUN, self.session.run),
            "map": lambda: _Way("map", map=self.session.map, at_least=8 * _REFILLS),
            **({"graph": graph} if device.is_gpu else {}),
            "pool": pool,
        }
        for name, open_way in ways.items():
            try:
                self._ways.append(open_way())
            except Exception as error:  # noqa: BLE001 - the other ways are still measured
                self.left_out.append(LeftOut(name, None, first_line(error)))

    def measure(self, batch: int | None, feed: Feed, rounds: int) -> list[Figure]:
        """Measure all ways for one feed, alternately. Return the figures of the ways that run.

        If a way fails after its first blocks, there are no figures: a GPU out of memory may fail any way.
        """
        calls: dict[_Way, int] = {}
        latencies: dict[str, list[float]] = {}
        for way in self._ways:
            try:
                calls[way] = way.calls(feed)
            except Exception as error:  # noqa: BLE001 - a model may run one size only, a GPU have memory for some
                self.leave_out(batch, error, [way])

        def block(way: _Way, number: int) -> float:
            seconds, durations = way.block(feed, number)
            latencies.setdefault(way.name, []).extend(durations)
            return seconds / number

        try:
            seconds = alternate(
                {way.name: partial(block, way, number) for way, number in calls.items()}, rounds if calls else 0
            )
        except Exception as error:  # noqa: BLE001 - as above
            self.leave_out(batch, error, calls)
            return []
        items = batch or 1
        rates = {name: Spread(*quartiles([items / duration for duration in taken])) for name, taken in seconds.items()}
        return [
            Figure(
                name,
                batch,
                rate,
                rate.relative_to(rates[PLAIN].median) if PLAIN in rates and name != PLAIN else None,
                percentiles(latencies[name]) if len(latencies[name]) > 1 else None,
            )
            for name, rate in rates.items()
        ]

    def leave_out(self, batch: int | None, error: Exception, ways: Iterable[_Way] | None = None) -> None:
        """Add ways, or all ways, to ``left_out`` for a feed that they do not run."""
        self.left_out += [LeftOut(way.name, batch, first_line(error)) for way in (self._ways if ways is None else ways)]
        if not isinstance(self.error, GPUError):
            self.error = error


def recommend(figures: Sequence[Figure]) -> list[str]:
    """Return a sentence for each setting that these figures recommend.

    A difference within the spread counts for nothing. Of ways that are equally fast, the first in WAYS is recommended.
    """
    sentences: list[str] = []
    for batch in dict.fromkeys(figure.batch for figure in figures):
        of_batch = {figure.way: figure for figure in figures if figure.batch == batch}
        faster = [figure for figure in of_batch.values() if _is_faster(figure, of_batch.get(PLAIN))]
        where = f"Batch {batch}" if batch is not None else "This model"
        for what, candidates in (
            ("shortest time for a request", [figure for figure in faster if figure.latency]),
            ("most items per second", faster),
        ):
            fastest = max((figure.rate for figure in candidates), key=lambda rate: rate.median, default=None)
            # A way counts as fastest if it reaches the lower quartile of the fastest. Figures are in the order of WAYS.
            best = next((figure for figure in candidates if fastest and figure.rate.median >= fastest.low), None)
            if best is not None and best.ratio is not None:
                sentences.append(f"{where}, {what}: {WAYS[best.way]}, speed-up {best.ratio.median:.2f}.")
    return sentences


def _is_faster(figure: Figure, base: Figure | None) -> bool:
    """Return True if three of four rounds were faster than ``base`` by more than the spread of ``base`` itself."""
    if base is None or figure.ratio is None:
        return False
    noise = (base.rate.high - base.rate.low) / base.rate.median
    return figure.ratio.low > 1 + noise
