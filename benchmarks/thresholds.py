"""From which size on arrays should be staged inside ``run``, in how many threads, in pieces of how many bytes.

    python -m benchmarks.thresholds [--quick] [--cpu] [--json FILE]

Prints the ratio of staged runs to plain ones, taken in turns, for arrays of growing size: as much out as in ("both"),
next to nothing out ("in"), and as much out as in while the caller keeps results, so that most have to be in fresh
memory ("kept"). Below each table stands what follows for the constants in ortgpu/staging.py. ``--cpu`` is to see that
it works: there nothing is staged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import child_environment, environment_record, find_gpus
from benchmarks.figures import made_model, readable, run_worker

MIB = 1 << 20
SIZES = [1 * MIB, 2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB, 12 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB]
THREADS = [2, 4, 8, 12]
PIECES = [2 * MIB, 4 * MIB, 8 * MIB]
CASES = {"both": ("negative", False), "in": ("largest", False), "kept": ("negative", True)}

# A ratio of less is a gain: the same work measured twice differs by up to so much.
GAIN = 0.97


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thresholds", description="When staging pays.")
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats: to see that it works")
    parser.add_argument("--cpu", action="store_true", help="without a GPU: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)
    gpus = find_gpus()
    if not gpus.visible and not options.cpu:
        print(f"left out: needs an NVIDIA GPU, or --cpu: {gpus.reason}")
        return 0
    sweep: dict[str, Any] = {"sizes": SIZES, "threads": THREADS, "pieces": PIECES, "rounds": 5}
    if options.quick:
        sweep = {"sizes": SIZES[:5:2], "threads": [2, 4], "pieces": [MIB], "rounds": 3}
    record: dict[str, Any] = {"benchmark": "thresholds", **environment_record(gpus), "sweep": sweep, "cases": {}}
    for case, (model, kept) in CASES.items():
        record["cases"][case] = found = _take(model, kept, sweep, "cpu" if options.cpu else "cuda")
        print(f"\n{case}: ratio to plain run, by threads x KiB a piece\n{_table(found)}", flush=True)
        print(_conclusion(found))
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _take(model: str, kept: bool, sweep: Mapping[str, Any], device: str) -> dict[int, dict[str, Any]]:
    """By bytes of an array: ratios by configuration, seconds of plain run, and what the first staged call took."""
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}) if device == "cpu" else None
    given = {"model": made_model(model), "device": device, "kept": kept, **sweep}
    reports = run_worker("thresholds", given, env=env, deadline=1200).reports
    found = {}
    for size in sweep["sizes"]:
        seconds = reports[str(size)]["seconds"]
        plain = seconds.pop("plain")
        ratios = {
            name: statistics.median(ours / theirs for ours, theirs in zip(values, plain, strict=True))
            for name, values in seconds.items()
        }
        found[size] = {**reports[str(size)], "ratios": ratios, "plain": statistics.median(plain)}
    return found


def _table(found: Mapping[int, Mapping[str, Any]]) -> str:
    names = list(next(iter(found.values()))["ratios"])
    titles = [f"{threads}x{int(piece) >> 10}" for threads, piece in (name.split(" x ") for name in names)]
    rows = [["MiB", "plain", "first call", *titles]]
    for size, each in found.items():
        ratios = [f"{each['ratios'][name]:.2f}" for name in names]
        first = readable(each["first call"]) if each["staged"] else "not staged"
        rows.append([f"{size / MIB:g}", readable(each["plain"]), first, *ratios])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def _conclusion(found: Mapping[int, Mapping[str, Any]]) -> str:
    """The best configuration over all sizes, and from which size on it gains at each larger one."""
    if not all(each["staged"] for each in found.values()):
        return "nothing was staged: there is nothing to conclude"
    names = next(iter(found.values()))["ratios"]
    best = min(names, key=lambda name: statistics.fmean(each["ratios"][name] for each in found.values()))
    threads, piece = best.split(" x ")
    from_size = None
    for size, each in sorted(found.items(), reverse=True):
        if each["ratios"][best] > GAIN:
            break
        from_size = size
    start = "no size: nothing is gained" if from_size is None else f"{from_size / MIB:g} MiB"
    return f"COPY_THREADS = {threads}, PIECE = {int(piece) / MIB:g} MiB, STAGED_FROM = {start}"


if __name__ == "__main__":
    sys.exit(main())
