"""Figures of ortgpu and plain ONNX Runtime, measured one after the other, written to a file and printed as a table."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import models
from ortgpu.process.timing import quartiles
from tests.support.children import ROOT, Child, run_child
from tests.support.this_machine import GPUs, environment_record, find_gpus

Benchmark = TypeVar("Benchmark")

_FEWEST_ROUNDS = 3  # that a figure can be made of


class NotApplicableError(Exception):
    """A figure that makes no sense here. The text says why."""


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number of repeats."""
    low, middle, high = quartiles(values)
    return {"median": middle, "quartiles": [low, high], "n": len(values)}


@dataclass(frozen=True, slots=True)
class Figure:
    """The seconds of ortgpu and of plain ONNX Runtime, measured alternately. Equal indices belong together."""

    ours: Sequence[float]
    plain: Sequence[float]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        pairs = list(zip(self.ours, self.plain, strict=True))
        differences = [mine - theirs for mine, theirs in pairs]
        return {
            "unit": "s",
            "ours": spread(self.ours),
            "plain": spread(self.plain),
            "ratio": statistics.median(mine / theirs for mine, theirs in pairs),  # of neighbours: drift cancels
            "difference": spread(differences),
            "notes": dict(self.notes),
            "values": {"ours": list(self.ours), "plain": list(self.plain)},
        }


# By name: its title, whether it needs a GPU, and the method that takes it
Figures = dict[str, tuple[str, bool, Callable[[Benchmark], Figure]]]


class _Budget:
    """The seconds that this program may still take."""

    def __init__(self) -> None:
        self._ends = math.inf

    def limit(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()


_budget = _Budget()


def made_model(name: str) -> str:
    """Return the path of a model, which is made in a child if it is not kept."""
    if not models.kept(name):
        deadline = max(0.0, min(240, _budget.left))
        child = run_child([sys.executable, "-m", "benchmarks.models", name], deadline=deadline)
        if "path" not in child.reports.get(name, {}):
            raise RuntimeError(f"the model {name} could not be made: {child.output}")
    return str(models.path_of(name))


def run_worker(
    name: str, arguments: Mapping[str, Any], *, env: Mapping[str, str] | None = None, deadline: float = 150
) -> Child:
    """Run a function of workers.py in a child, which must succeed or have reported some rounds at its deadline.

    The deadline comes earlier where less is left of the budget. "cut short" is then among the reports.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "workers.py"), name, json.dumps(dict(arguments))]
    child = run_child(command, env=env, deadline=max(0.0, min(deadline, _budget.left)))
    if child.returncode == 0:
        return child
    rounds = min((len(taken) for taken in child.reports.get("seconds", {}).values()), default=0)
    if child.returncode is not None or (rounds < _FEWEST_ROUNDS and _budget.left > 0):
        raise RuntimeError(child.output)
    if rounds < _FEWEST_ROUNDS:
        raise NotApplicableError(f"no time was left for more than {rounds} rounds")
    return dataclasses.replace(child, reports={**child.reports, "cut short": child.ended})


def take_figures(
    name: str,
    description: str,
    figures: Figures[Benchmark],
    make: Callable[[argparse.Namespace, GPUs, Path], Benchmark],
    arguments: Sequence[str] | None,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> int:
    """Run the command line of a benchmark. The exit status is 1 if a figure failed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works, not to report")
    parser.add_argument("--only", action="append", choices=list(figures), help="this figure only; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, anew after each figure")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="take no more: a figure under way is cut short, and the others are left out",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    _budget.limit(60 * options.budget)

    gpus = find_gpus()
    record: dict[str, Any] = {
        "benchmark": name,
        **environment_record(gpus),
        "options": {key: value for key, value in vars(options).items() if key not in ("json", "budget")},
        "quick": options.quick,
        "figures": {},
        "left out": {},
        "failed": {},
    }
    chosen = options.only or list(figures)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"ortgpu-{name}-") as scratch:
        benchmark = make(options, gpus, Path(scratch))
        for number, each in enumerate(chosen, 1):
            title, needs_gpu, take = figures[each]
            no_gpu = gpus.reason if needs_gpu and not gpus.visible else None
            progress = f"[{number}/{len(chosen)}, {time.monotonic() - started:.0f} s] {title}"
            outcome = _measure(each, functools.partial(take, benchmark), no_gpu, record)
            print(f"{progress}: {outcome}", file=sys.stderr, flush=True)
            record["seconds"] = time.monotonic() - started
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    _print_results(record, {each: title for each, (title, _, _) in figures.items()})
    return int(bool(record["failed"]))


def _measure(name: str, take: Callable[[], Figure], no_gpu: str | None, record: dict[str, Any]) -> str:
    """Add a figure to the record, or the reason why there is none. Return a line about it."""
    try:
        if no_gpu:
            raise NotApplicableError(f"needs an NVIDIA GPU: {no_gpu}")
        if _budget.left <= 0:
            raise NotApplicableError("no time was left")
        figure = record["figures"][name] = take().as_dict()
    except NotApplicableError as error:
        record["left out"][name] = str(error)
        return "left out"
    except Exception as error:
        record["failed"][name] = f"{type(error).__name__}: {error}"
        return "failed"
    return f"{readable(figure['ours']['median'])} | {readable(figure['plain']['median'])}"


def readable(seconds: float, *, signed: bool = False) -> str:
    scale, unit = (1e6, "µs") if abs(seconds) < 1e-3 else (1e3, "ms") if abs(seconds) < 10 else (1, "s")
    value = seconds * scale
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:+.{digits}f} {unit}" if signed else f"{value:.{digits}f} {unit}"


def _cell(of: Mapping[str, Any], *, signed: bool = False) -> str:
    """Return a median and, in brackets, the quartiles."""
    low, high = (readable(each, signed=signed) for each in of["quartiles"])
    return f"{readable(of['median'], signed=signed)} [{low}, {high}]"


def _table(figures: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Return a line for each figure. The median of the differences need not be the difference of the medians."""
    rows = [("figure (ours | plain)", "ours", "plain", "speed-up", "ours - plain", "n")]
    for name, figure in figures.items():
        ours, plain = _cell(figure["ours"]), _cell(figure["plain"])
        difference = _cell(figure["difference"], signed=True)
        times = f"{figure['plain']['median'] / figure['ours']['median']:.2f}"
        rows.append((titles[name], ours, plain, times, difference, str(figure["ours"]["n"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _note(value: object) -> str:
    """Return a note as text. Seconds are recognised by their form."""
    if isinstance(value, dict):
        if "median" in value:
            return _cell(value, signed=True)
        return ", ".join(f"{key} {readable(each) if isinstance(each, float) else each}" for key, each in value.items())
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _print_results(record: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    machine, versions = record["machine"], record["versions"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    print(f"{gpus}; driver {machine['driver']}; {machine['cpu']}, {machine['cores']} cores")
    print(f"{record['date']}, commit {record['commit']}{'; quick: not to be reported' * record['quick']}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()), end="\n\n")
    if record["figures"]:
        print(_table(record["figures"], titles), end="\n\n")
    for name, figure in record["figures"].items():
        for key, value in figure["notes"].items():
            print(f"{name}: {key}: {_note(value)}")
    for heading in ("left out", "failed"):
        for name, why in record[heading].items():
            print(f"{heading}: {name}: {why}")
