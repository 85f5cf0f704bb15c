"""Measure what options of the CUDA provider cost and gain, and so what ``CHOSEN_OPTIONS`` in
ortgpu/provider/requests.py should be.

    python -m benchmarks.options [--quick] [--cpu] [--only SET] [--budget MINUTES] [--json FILE]

For each set of options, beside ONNX Runtime's defaults, alternately and in one process: seconds of the first run of a
shape that the session has not seen; and in the notes the constructor, the first run of a session, and a run of each
batch size when all is warm. Of a ResNet-50. ``--cpu`` is to see that it works: there are no options.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

from benchmarks.figures import Figure, Figures, spread
from benchmarks.throughput import Benchmark, ratio, take_sweep

HEURISTIC = {"cudnn_conv_algo_search": "HEURISTIC"}
SETS: Mapping[str, Mapping[str, str]] = {
    "heuristic": HEURISTIC,
    "heuristic-small-workspace": {**HEURISTIC, "cudnn_conv_use_max_workspace": "0"},
    "heuristic-same-as-requested": {**HEURISTIC, "arena_extend_strategy": "kSameAsRequested"},
    "small-workspace": {"cudnn_conv_use_max_workspace": "0"},
    "default-search": {"cudnn_conv_algo_search": "DEFAULT"},
}
FIRST = 8  # the batch of first runs; new shapes are larger, one by one
BATCHES = (1, 8, 64)


def compare(benchmark: Benchmark, options: Mapping[str, str]) -> Figure:
    rounds = benchmark.repeats.first
    reports = benchmark.take("options", "resnet50", options=dict(options), first=FIRST, batches=BATCHES, rounds=rounds)
    notes = {}
    for name, seconds in reports.items():
        if name.startswith("seconds, "):
            notes[name.removeprefix("seconds, ")] = spread(seconds["ours"])
            notes[f"{name.removeprefix('seconds, ')} / plain"] = ratio(seconds["ours"], seconds["plain"])
    return Figure(reports["seconds"]["ours"], reports["seconds"]["plain"], {"options": dict(options), **notes})


FIGURES: Figures[Benchmark] = {
    name: (f"first run of a new shape: {name} | defaults", False, functools.partial(compare, options=options))
    for name, options in SETS.items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    description = "What options of the CUDA provider cost and gain, measured alternately."
    return take_sweep("options", description, FIGURES, arguments)


if __name__ == "__main__":
    sys.exit(main())
