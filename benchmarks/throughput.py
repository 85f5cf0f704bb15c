"""Measure what ortgpu gains over a loop of plain ONNX Runtime's ``run``.

    python -m benchmarks.throughput [--quick] [--cpu] [--only FIGURE] [--json FILE]

Every figure compares ours with plain ONNX Runtime doing the same alternately in one process; README.md beside this file
says what each one means. ``--cpu`` takes them on the CPU with tiny models: to see that it works, where there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.figures import Figure, Figures, NotApplicableError, made_model, run_worker, spread, take_figures
from tests.support.children import child_environment
from tests.support.this_machine import GPUs

# A smaller model in the place of each; of other networks, "conv"
ON_THE_CPU = {"resnet50": "conv", "encoder": "mlp", "mlp": "mlp", "negate": "negate"}
_FLOATS_OF_A_MB = 10**6 // 4


@dataclass(frozen=True, slots=True)
class Repeats:
    rounds: int
    samples: int  # about as many go through a model in each round, in batches
    batches: int  # at least: of a few, much of the time is that of the first, with which nothing overlaps
    calls: int
    first: int


FULL = Repeats(rounds=9, samples=3000, batches=32, calls=300, first=9)
QUICK = Repeats(rounds=3, samples=60, batches=8, calls=20, first=3)


class Benchmark:
    """The figures. Each is a method that returns one or raises NotApplicableError; other errors end it alone."""

    def __init__(self, repeats: Repeats, device: str, no_gpu: str | None, others: bool) -> None:
        self.repeats = repeats
        self.device = device
        self.no_gpu = no_gpu
        self.others = others

    def throughput(self, name: str, batch: int) -> Figure:
        batches = max(self.repeats.batches, min(self.repeats.samples // batch, 300))
        torch_model = name if self.others and self._stand_in(name) in models.TORCH else None
        reports = self.take(
            "throughput", name, batch=batch, batches=batches, rounds=self.repeats.rounds, torch_model=torch_model
        )
        seconds, others = reports["seconds"], reports.get("seconds of others", {})
        beside = {key: values for key, values in seconds.items() if key not in ("ours", "plain")}
        per_second = {**seconds, **{key: values for key, values in others.items() if key != "ours"}}
        notes = {
            "batches a round": batches,
            "samples a second": {key: f"{batch / statistics.median(values):.0f}" for key, values in per_second.items()},
            **{key: spread(values) for key, values in per_second.items() if key not in ("ours", "plain")},
            **{f"ours / {key}": ratio(seconds["ours"], values) for key, values in beside.items() if "device" in key},
            **{f"ours / {key}": ratio(others["ours"], values) for key, values in others.items() if key != "ours"},
            **{f"left out: {key}": why for key, why in reports.get("left out", {}).items()},
        }
        return self._figure(name, reports, notes)

    def reused(self, name: str, batch: int) -> Figure:
        batches = max(self.repeats.batches, min(self.repeats.samples // batch, 300))
        reports = self.take("reused", name, batch=batch, batches=batches, rounds=self.repeats.rounds)
        seconds = reports["seconds"]
        notes = {
            "batches a round": batches,
            "samples a second": {key: f"{batch / statistics.median(values):.0f}" for key, values in seconds.items()},
            "ours, list": spread(seconds["ours, list"]),
            "ours / ours, list": ratio(seconds["ours"], seconds["ours, list"]),
        }
        return self._figure(name, reports, notes)

    def graph(self, name: str, batch: int) -> Figure:
        return self._latency(name, batch, self.repeats.calls * (10 if name == "mlp" else 1), cuda_graph=True)

    def run(self, name: str, batch: int) -> Figure:
        """``batch`` in images, or for the model without any work of its own in MB, in and out each."""
        size = batch * (_FLOATS_OF_A_MB if self.device == "cuda" else 1000) if name == "negate" else batch
        return self._latency(name, size, max(3, self.repeats.calls // batch), cuda_graph=False)

    def _latency(self, name: str, batch: int, calls: int, *, cuda_graph: bool) -> Figure:
        rounds = self.repeats.rounds
        reports = self.take("latency", name, batch=batch, calls=calls, rounds=rounds, cuda_graph=cuda_graph)
        return self._figure(name, reports, {"calls a round": calls})

    def new_shape(self, name: str, batch: int) -> Figure:
        return self._figure(name, self.take("new_shape", name, batch=batch, rounds=self.repeats.first), {})

    def first_run(self, name: str, batch: int) -> Figure:
        return self._figure(name, self.take("first_run", name, batch=batch, rounds=self.repeats.first), {})

    def take(self, worker: str, name: str, **arguments: Any) -> Any:
        """Return the reports of a worker about a model."""
        if self.no_gpu is not None:
            raise NotApplicableError(f"needs an NVIDIA GPU, or --cpu: {self.no_gpu}")
        env = (
            child_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"})
            if self.device == "cpu"
            else None
        )
        arguments = {"model": made_model(self._stand_in(name)), "device": self.device, **arguments}
        return run_worker(worker, arguments, env=env, deadline=600).reports

    def _stand_in(self, name: str) -> str:
        return name if self.device == "cuda" else ON_THE_CPU.get(name, "conv")

    def _figure(self, name: str, reports: Any, notes: dict[str, Any]) -> Figure:
        model = self._stand_in(name)
        notes = {"model": f"{model}: {models.recipe_of(model)}", "device": self.device, **notes}
        if "largest error" in reports:
            notes["largest relative error of ours"] = f"{reports['largest error']:.1e}"
        if "cut short" in reports:
            notes["cut short"] = reports["cut short"]
        return Figure(reports["seconds"]["ours"], reports["seconds"]["plain"], notes)


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(values, others, strict=True)):.3f}"


def _figures() -> Figures[Benchmark]:
    found: Figures[Benchmark] = {}

    def add(name: str, title: str, method: Any, model: str, batch: int) -> None:
        found[name] = (title, False, functools.partial(method, name=model, batch=batch))

    for model, title, batches in (("resnet50", "ResNet-50", (256, 64, 8, 1)), ("encoder", "encoder", (32, 1))):
        for batch in batches:
            name = f"map-{model}-b{batch}"
            add(name, f"map | loop over run, {title}, batches of {batch}", Benchmark.throughput, model, batch)
    for batch in (256, 8):
        title = f"map | loop over run, one array filled again, ResNet-50, batches of {batch}"
        add(f"map-reused-resnet50-b{batch}", title, Benchmark.reused, "resnet50", batch)
    add("graph-small", "cuda_graph | run, tiny model, a call", Benchmark.graph, "mlp", 1)
    add("graph-resnet50-b1", "cuda_graph | run, ResNet-50, batches of 1", Benchmark.graph, "resnet50", 1)
    add("first-run-resnet50-b8", "first run of a session, ResNet-50, batch of 8", Benchmark.first_run, "resnet50", 8)
    add("new-shape-resnet50", "first run of a new shape, ResNet-50", Benchmark.new_shape, "resnet50", 8)
    for size in (256, 64, 16, 4, 1):
        add(f"run-negate-{size}mb", f"run, {size} MB in and out, no work", Benchmark.run, "negate", size)
    add("run-resnet50-b256", "run, ResNet-50, batches of 256", Benchmark.run, "resnet50", 256)
    return found


def take_sweep(name: str, description: str, figures: Figures[Benchmark], arguments: Sequence[str] | None) -> int:
    """Run the command line of a benchmark of ortgpu's settings, which measures no other library."""

    def make(options: argparse.Namespace, gpus: GPUs, _: Path) -> Benchmark:
        no_gpu = None if options.cpu or gpus.visible else gpus.reason
        return Benchmark(QUICK if options.quick else FULL, "cpu" if options.cpu else "cuda", no_gpu, others=False)

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cpu", action="store_true", help="on the CPU with tiny models: to see that it works")

    return take_figures(name, description, figures, make, arguments, add_options)


def main(arguments: Sequence[str] | None = None) -> int:
    def make(options: argparse.Namespace, gpus: GPUs, _: Path) -> Benchmark:
        no_gpu = None if options.cpu or gpus.visible else gpus.reason
        device = "cpu" if options.cpu else "cuda"
        return Benchmark(QUICK if options.quick else FULL, device, no_gpu, not options.no_others)

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cpu", action="store_true", help="on the CPU with tiny models: to see that it works")
        parser.add_argument(
            "--no-others", action="store_true", help="without PyTorch and optimum, which take half of the time"
        )

    description = "What ortgpu gains over a loop of plain ONNX Runtime's run, measured alternately."
    return take_figures("throughput", description, _figures(), make, arguments, add_options)


if __name__ == "__main__":
    sys.exit(main())
