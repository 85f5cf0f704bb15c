"""Measure from which size on ``run`` should stage arrays, in how many threads, and in pieces of how many bytes.

    python -m benchmarks.thresholds [--quick] [--cpu] [--only SIZE] [--budget MINUTES] [--json FILE]

For each size of an array, staged runs and plain ones, taken alternately in one process: as much out as in ("both"), one
element out ("in"), and as much out as in while the caller keeps the results of a round, so that most are in fresh
memory ("kept"). Below the table stands what follows for the constants in ortgpu/running/staging.py and copying.py.
``--cpu`` is to see that it works: there nothing is staged.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, Figures, made_model, readable, take_figures
from benchmarks.throughput import FULL, QUICK, Benchmark
from tests.support.this_machine import GPUs

MIB = 1 << 20
SIZES = (16, 4, 8, 64, 2, 256, 1, 32, 12)  # MiB; what decides most comes first, for a budget that ends early
THREADS = (8, 12, 16)
PIECES = (8, 32)  # MiB at most; 16 is as good as 32, and 4 threads were slower everywhere
CASES = ("both", "in", "kept")
ROUNDS = 5

# A ratio of less is a gain: the same work measured twice differs by up to so much.
GAIN = 0.97


class Sweep(Benchmark):
    """``ratios`` to plain ``run``: by MiB of an array, by case, by threads and MiB a piece."""

    def __init__(self, quick: bool, device: str, no_gpu: str | None) -> None:
        super().__init__(QUICK if quick else FULL, device, no_gpu, others=False)
        self.ratios: dict[int, dict[str, dict[tuple[int, int], float]]] = {}
        self.is_staged = True

    def size(self, mib: int) -> Figure:
        """Return the figure of the threads and pieces that are best for arrays of this size, of the case "both"."""
        small = 1 if self.device == "cuda" else 64  # a CPU would take minutes
        reports = self.take(
            "thresholds",
            "negate",
            summing=made_model("sum"),
            size=mib * MIB // small,
            threads=THREADS,
            pieces=[piece * MIB for piece in PIECES],
            rounds=min(ROUNDS, self.repeats.rounds),
        )
        seconds = reports["seconds"]
        self.is_staged = self.is_staged and reports["staged"]
        self.ratios[mib] = found = {
            case: {
                (threads, piece): statistics.median(
                    ours / plain
                    for ours, plain in zip(
                        seconds[f"{case}, {threads} x {piece * MIB}"], seconds[f"{case}, plain"], strict=True
                    )
                )
                for threads in THREADS
                for piece in PIECES
            }
            for case in CASES
        }
        threads, piece = min(found["both"], key=lambda way: max(found[case][way] for case in CASES))
        notes = {
            "best": f"{threads} x {piece}",
            **{
                f"{case} / plain, by threads x MiB a piece": {
                    f"{threads} x {piece}": f"{ratio:.2f}" for (threads, piece), ratio in of_case.items()
                }
                for case, of_case in found.items()
            },
            "first staged call": readable(reports["first"]),
            "staged": reports["staged"],
        }
        return Figure(seconds[f"both, {threads} x {piece * MIB}"], seconds["both, plain"], notes)

    def conclusion(self) -> str:
        """Return the threads and pieces that are best over all sizes, and the size from which on they always gain."""
        if not self.ratios or not self.is_staged:
            return "nothing was staged: there is nothing to conclude"

        def of(way: tuple[int, int]) -> float:
            return statistics.fmean(each[case][way] for each in self.ratios.values() for case in CASES)

        best = min(((threads, piece) for threads in THREADS for piece in PIECES), key=of)
        gains = {case: self._gains_from(case, best) for case in CASES}
        by_case = ", ".join(f"{case} from {mib or 'no'} MiB" for case, mib in gains.items())
        staged_from = "" if None in gains.values() else f", STAGED_FROM = {max(filter(None, gains.values()))} << 20"
        return f"COPY_THREADS = {best[0]}, PIECE = {best[1]} << 20{staged_from} ({by_case})"

    def _gains_from(self, case: str, way: tuple[int, int]) -> int | None:
        """Return MiB, or None if the largest size gains nothing."""
        found = None
        for mib, each in sorted(self.ratios.items(), reverse=True):
            if each[case][way] > GAIN:
                break
            found = mib
        return found


FIGURES: Figures[Sweep] = {
    f"{mib}mib": (f"staged | plain run, {mib} MiB in and out", False, functools.partial(Sweep.size, mib=mib))
    for mib in SIZES
}


def main(arguments: Sequence[str] | None = None) -> int:
    made: list[Sweep] = []

    def make(options: argparse.Namespace, gpus: GPUs, _: Path) -> Sweep:
        no_gpu = None if options.cpu or gpus.visible else gpus.reason
        made.append(Sweep(options.quick, "cpu" if options.cpu else "cuda", no_gpu))
        return made[0]

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cpu", action="store_true", help="on the CPU with small arrays: to see that it works")

    description = "From which size on arrays should be staged, measured alternately."
    status = take_figures("thresholds", description, FIGURES, make, arguments, add_options)
    print(f"\n{made[0].conclusion()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
