"""Tune models on this machine's GPU, and print what was chosen, its time beside plain ONNX Runtime's, and its error.

    python -m benchmarks.tuning [--budget 40] [--batch 32] [--objective latency] [--precision fp16] [--faults]
                                [--minutes 5] [--json FILE] MODEL...

MODEL is a file, or a name that benchmarks.models makes. ``--faults`` plants faults instead: one wrong channel, a race
between two runs, and fuse_conv_bias without prefer_nhwc, which 1.31 computes wrongly; accepted ones make the exit
status 1. Everything on the GPU happens in children with deadlines; a model that fails is a row of the table. ``--cpu``
is to see that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ortgpu.provider.settings import described
from ortgpu.session.tuning.children import Place
from ortgpu.session.tuning.tuning import Trial, Tuning, Wanted, tune_at
from tests.support.children import run_child
from tests.support.this_machine import environment_record, find_gpus

_TO_MAKE = 120.0  # seconds
_PLANTED = {"layout": ("channels-last", "channels-last, biases fused"), "workspace": ("small",)}


def file_of(name: str) -> Path:
    """Return the file of a model. Makes it if it is none. Raises RuntimeError."""
    if Path(name).is_file():
        return Path(name)
    made = run_child([sys.executable, "-m", "benchmarks.models", name], deadline=_TO_MAKE)
    path = (made.reports.get(name) or {}).get("path")
    if path is None:
        raise RuntimeError(f"not made: {(made.reports.get(name) or {}).get('error') or made.ended}")
    return Path(path)


def say(trial: Trial) -> None:
    ratio = "rejected" if trial.ratio is None else f"{trial.ratio:.3f}"
    times = " ".join(f"{each * 1e3:.3f} ms" for each in trial.seconds)
    error = "" if trial.error is None else f"error {trial.error:.1e}"
    why = trial.verdict if trial.ratio is None else ""
    print(f"    {ratio:8} {times:12} {error:14} {described(trial.settings)} {why}", file=sys.stderr, flush=True)


def take(name: str, options: argparse.Namespace, budget: float) -> dict[str, Any]:
    """Tune one model, and return its row."""
    ordinal = None if options.cpu else 0
    opener = "tests.support.tuning_faults:open_planted" if options.faults else Place().opener
    wanted = Wanted(
        str(file_of(name)),
        batches=tuple(options.batch),
        objective=options.objective,
        precision="float16" if options.precision == "fp16" else "float32",
        budget=budget,
        on_trial=say,
    )
    with tempfile.TemporaryDirectory() as folder:
        found: Tuning = tune_at(Place(ordinal, opener), wanted, Path(folder, "record.json"))
    return {"model": name, **found.as_dict(), "accepted": accepted(found.trials) if options.faults else None}


def accepted(trials: tuple[Trial, ...]) -> list[str]:
    """Return the settings with planted faults that were accepted."""
    faulty = (each for each in trials if any(each.settings.get(name) in bad for name, bad in _PLANTED.items()))
    return [described(each.settings) for each in faulty if each.ratio is not None]


def show(rows: list[dict[str, Any]]) -> None:
    print("| model | by itself | to plain | named | to plain | error | trials | s |\n|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"| {row['model']} | FAILED: {row['failed']} | | | | | | |")
            continue
        errors = [each["error"] for each in row["trials"] if each["verdict"] == "kept" and each["error"] is not None]
        cells = [row["model"]]
        for choice in (row["automatic"], row["named"]):
            cells += [described(choice["settings"]), f"{choice['ratio']:.3f}"]
        cells += [f"{max(errors, default=math.nan):.1e}", str(len(row["trials"])), f"{row['seconds']:.0f}"]
        print(f"| {' | '.join(cells)} |")
    sound = [row for row in rows if "failed" not in row]
    for kind in ("automatic", "named"):
        ratios = [row[kind]["ratio"] for row in sound]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{kind}: geometric mean {mean:.3f}, worst {max(ratios):.3f}, best {min(ratios):.3f}")
    for row in sound:
        for trial in row["trials"]:
            if trial["ratio"] is None:
                where = f" ({trial['divergence']})" if trial["divergence"] else ""
                print(f"{row['model']}: {described(trial['settings'])}: {trial['verdict']}{where}")
        for text in row["left_out"]:
            print(f"{row['model']}: not tried: {text}")
        if row["accepted"] is not None:
            print(f"{row['model']}: planted faults accepted: {', '.join(row['accepted']) or 'none'}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description="Tune models, and print a table.")
    parser.add_argument("names", nargs="+", metavar="MODEL", help="a file, or a name of benchmarks.models")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each model")
    parser.add_argument("--minutes", type=float, default=5.0, help="no model is begun later")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--objective", choices=["latency", "throughput"], default="latency")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    parser.add_argument("--faults", action="store_true", help="plant faults; none may be accepted")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: to see that it works")
    parser.add_argument("--json", type=Path, help="write all trials there, after each model")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    where = environment_record(find_gpus())
    rows: list[dict[str, Any]] = []
    for name in options.names:
        left = end - time.monotonic()
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            if left < options.budget / 2:
                raise TimeoutError("not begun: the time was up")
            rows.append(take(name, options, min(options.budget, left)))
        except Exception as error:  # the next model may still be tuned
            rows.append({"model": name, "failed": f"{type(error).__name__}: {error}".splitlines()[0]})
            print(f"    {rows[-1]['failed']}", file=sys.stderr, flush=True)
        if options.json is not None:
            document = {"benchmark": "tuning", **where, "arguments": sys.argv[1:], "rows": rows}
            options.json.write_text(json.dumps(document, indent=1, default=str))
    show(rows)
    return int(any("failed" in row or row["accepted"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
