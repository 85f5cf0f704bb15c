"""Find the best number of runs at a time: of ortgpu/running/pipeline.py and ortgpu/session/pool/sessions.py.

    python -m benchmarks.concurrency [--quick] [--cpu] [--budget MINUTES] [--json FILE]

Prints samples a second, taken alternately in one process for each model and batch: of threads that run and stage,
with ordinary and with pinned arrays, of a loop over plain ``run``, and of plain ONNX Runtime with its data on the GPU.
``--cpu`` is to see that it works.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Sequence

from benchmarks.figures import Figure, Figures
from benchmarks.throughput import Benchmark, take_sweep

THREADS = (1, 2, 3, 4, 6, 8)
ROUNDS = 4


def sweep(benchmark: Benchmark, model: str, batch: int) -> Figure:
    """Return the figure of the number of threads that is best with ordinary arrays, compared with plain ``run``."""
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
    description = "How many runs at a time are best, measured alternately."
    return take_sweep("concurrency", description, FIGURES, arguments)


if __name__ == "__main__":
    sys.exit(main())
