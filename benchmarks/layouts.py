"""Measure for which networks the layout that a session chooses is faster; see ortgpu/session/chosen/choose.py.

    python -m benchmarks.layouts [--quick] [--cpu] [--only FIGURE] [--budget MINUTES] [--json FILE]

A run of torchvision's networks with its data on the GPU: a GPUSession beside plain ONNX Runtime, in turns and in one
process; in the notes each layout, whether chosen or not, with its ratio to plain and how far its results are from those
of plain ONNX Runtime. ``--cpu`` is to see that it works: there is one layout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from benchmarks.figures import Figure, Figures, spread
from benchmarks.models import VISION
from benchmarks.throughput import Benchmark, ratio, take_sweep

NETWORKS = ("resnet50", *VISION)
BATCHES = (64, 8, 1)


def compare(benchmark: Benchmark, network: str, batch: int) -> Figure:
    batches = max(3, min(benchmark.repeats.samples // batch // 10, 30))
    reports = benchmark.take("layouts", network, batch=batch, batches=batches, rounds=benchmark.repeats.rounds)
    seconds = reports["seconds"]
    notes = {"chosen": reports["chosen"], "largest relative errors": reports["largest errors"]}
    for name, values in seconds.items():
        if name not in ("ours", "plain"):
            notes[name] = spread(values)
            notes[f"{name} / plain"] = ratio(values, seconds["plain"])
    return Figure(seconds["ours"], seconds["plain"], notes)


FIGURES: Figures[Benchmark] = {
    f"{network}-b{batch}": (
        f"GPUSession | plain, {network}, batches of {batch}, data on the GPU",
        False,
        functools.partial(compare, network=network, batch=batch),
    )
    for network in NETWORKS
    for batch in BATCHES
}


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Layouts of images with networks of torchvision, measured in turns."
    return take_sweep("layouts", description, FIGURES, arguments)


if __name__ == "__main__":
    sys.exit(main())
