"""How many runs at a time are best: what ``THREADS`` in ortgpu/pipeline.py and in ortgpu/pool_workers.py should be.

    python -m benchmarks.concurrency [--quick] [--cpu] [--budget MINUTES] [--json FILE]

Prints samples a second, taken in turns in one process for each model and batch: of so many threads that run and stage,
with ordinary and with pinned arrays, of a loop over plain ``run``, and of plain ONNX Runtime with its data on the GPU.
``--cpu`` is to see that it works.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import GPUs
from benchmarks.figures import Figure, Figures, take_figures
from benchmarks.throughput import FULL, QUICK, Benchmark

THREADS = (1, 2, 3, 4, 6, 8)
ROUNDS = 4


def sweep(benchmark: Benchmark, model: str, batch: int) -> Figure:
    """A figure of the number of threads that is best with ordinary arrays, beside plain ``run``."""
    batches = max(16, min(benchmark.repeats.samples // batch, 200))
    rounds = min(ROUNDS, benchmark.repeats.rounds)
    reports = benchmark.take("concurrency", model, batch=batch, batches=batches, rounds=rounds, threads=THREADS)
    seconds = reports["seconds"]
    rates = {name: batch / statistics.median(taken) for name, taken in seconds.items()}
    best = max((f"{count} threads" for count in THREADS), key=lambda name: rates[name])
    notes = {"best": best, "samples a second": {name: f"{rate:.0f}" for name, rate in rates.items()}}
    return Figure(seconds[best], seconds["plain"], notes)


FIGURES: Figures[Benchmark] = {
    f"{model}-b{batch}": (
        f"the best number of threads | loop over run, {model}, batches of {batch}",
        False,
        functools.partial(sweep, model=model, batch=batch),
    )
    for model, batches in (("resnet50", (256, 64, 8, 1)), ("encoder", (32, 1)))
    for batch in batches
}


def main(arguments: Sequence[str] | None = None) -> int:
    def make(options: argparse.Namespace, gpus: GPUs, _: Path) -> Benchmark:
        no_gpu = None if options.cpu or gpus.visible else gpus.reason
        return Benchmark(QUICK if options.quick else FULL, "cpu" if options.cpu else "cuda", no_gpu, others=False)

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cpu", action="store_true", help="on the CPU with tiny models: to see that it works")

    description = "How many runs at a time are best, measured in turns."
    return take_figures("concurrency", description, FIGURES, make, arguments, add_options)


if __name__ == "__main__":
    sys.exit(main())
