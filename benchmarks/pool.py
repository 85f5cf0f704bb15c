"""Compare a GPUSessionPool on several GPUs with plain ONNX Runtime, with a session and three threads for each GPU.

    python -m benchmarks.pool [--quick] [--cpu] [--only FIGURE] [--json FILE]

Every figure is a pair, taken alternately in one process; README.md beside this file says what each one means. ``--cpu``
takes them on the CPU with a tiny model, a session in the place of each GPU: to see that it works, where there is none.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import models
from benchmarks.figures import Figure, Figures, NotApplicableError, made_model, run_worker, spread, take_figures
from benchmarks.throughput import ON_THE_CPU, ratio
from tests.support.children import child_environment
from tests.support.this_machine import GPUs

BATCH = 256


@dataclass(frozen=True, slots=True)
class Repeats:
    rounds: int
    batches: int  # for each GPU


FULL = Repeats(rounds=9, batches=32)
QUICK = Repeats(rounds=3, batches=8)


class Benchmark:
    def __init__(self, repeats: Repeats, device: str, gpus: GPUs) -> None:
        self.repeats = repeats
        self.device = device
        self.gpus = gpus

    def pool(self, count: int, *, reused: bool = False) -> Figure:
        on_cpu, shown = self.device == "cpu", len(self.gpus.visible)
        if not on_cpu and shown < count:
            raise NotApplicableError(self.gpus.reason or f"needs {count} GPUs, and the driver shows {shown}")
        name = ON_THE_CPU["resnet50"] if on_cpu else "resnet50"
        env = child_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}) if on_cpu else None
        arguments = {
            "model": made_model(name),
            "gpus": count,
            "batch": BATCH,
            "batches": self.repeats.batches,
            "rounds": self.repeats.rounds,
            "device": self.device,
            "reused": reused,
        }
        reports = run_worker("pool", arguments, env=env, deadline=300).reports
        seconds = reports["seconds"]
        notes = {
            "model": f"{name}: {models.recipe_of(name)}",
            "device": self.device,
            "batches a round": count * self.repeats.batches,
            "samples a second": {key: f"{BATCH / statistics.median(taken):.0f}" for key, taken in seconds.items()},
            "ours, one GPU": spread(seconds["ours, one GPU"]),
            "times one GPU": ratio(seconds["ours, one GPU"], seconds["ours"]),
            "largest relative error of ours": f"{reports['largest error']:.1e}",
            **({"cut short": reports["cut short"]} if "cut short" in reports else {}),
        }
        return Figure(seconds["ours"], seconds["plain"], notes)

    def isolated(self, name: str, batch: int, count: int) -> Figure:
        """``batch`` in images, or for the model without any work of its own in MB, in and out each."""
        on_cpu, shown = self.device == "cpu", len(self.gpus.visible)
        if not on_cpu and shown < count:
            raise NotApplicableError(self.gpus.reason or f"needs {count} GPUs, and the driver shows {shown}")
        model = ON_THE_CPU[name] if on_cpu else name
        size = batch * (1000 if on_cpu else 10**6 // 4) if name == "negate" else batch
        env = child_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}) if on_cpu else None
        batches = self.repeats.batches * (4 if name == "resnet50" else 2)
        arguments = {
            "model": made_model(model),
            "gpus": count,
            "batch": size,
            "batches": batches,
            "rounds": self.repeats.rounds,
            "device": self.device,
        }
        reports = run_worker("isolated", arguments, env=env, deadline=300).reports
        seconds = reports["seconds"]
        ours, plain = (seconds[f"one array filled again: {which}"] for which in ("ours", "plain"))
        notes = {
            "model": f"{model}: {models.recipe_of(model)}",
            "device": self.device,
            "batches a round": count * batches,
            "batches a second": {key: f"{1 / statistics.median(taken):.1f}" for key, taken in seconds.items()},
            "throughput, times that of threads": ratio(seconds["plain"], seconds["ours"]),
            "one array filled again: throughput, times that of threads": ratio(plain, ours),
            "seconds to replace": [f"{each:.2f}" for each in reports.get("seconds to replace", [])],
            "largest relative error of ours": f"{reports['largest error']:.1e}",
            **({"cut short": reports["cut short"]} if "cut short" in reports else {}),
        }
        return Figure(seconds["ours"], seconds["plain"], notes)


FIGURES: Figures[Benchmark] = {
    f"pool-{kind}resnet50-b{BATCH}-x{count}": (
        f"pool | a plain session for each, {title}ResNet-50, batches of {BATCH}, GPUs: {count}",
        False,
        functools.partial(Benchmark.pool, count=count, reused=bool(kind)),
    )
    for kind, title in (("", ""), ("reused-", "one array filled again, "))
    for count in (1, 2, 4, 8)
}
FIGURES |= {
    f"isolated-{name}-{size}-x{count}": (
        f"pool with a process for each session | with threads, {title}, GPUs: {count}",
        False,
        functools.partial(Benchmark.isolated, name=name, batch=batch, count=count),
    )
    for name, size, batch, title in (
        ("resnet50", "b64", 64, "ResNet-50, batches of 64"),
        ("negate", "64mb", 64, "64 MB in and out, no work"),
    )
    for count in (1, 2)
}


def main(arguments: Sequence[str] | None = None) -> int:
    def make(options: argparse.Namespace, gpus: GPUs, _: Path) -> Benchmark:
        return Benchmark(QUICK if options.quick else FULL, "cpu" if options.cpu else "cuda", gpus)

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cpu", action="store_true", help="on the CPU with a tiny model: to see that it works")

    description = "What a GPUSessionPool makes of several GPUs, measured alternately."
    return take_figures("pool", description, FIGURES, make, arguments, add_options)


if __name__ == "__main__":
    sys.exit(main())
