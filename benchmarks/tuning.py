"""Tune models on this machine's GPU, and print what was chosen, its time beside plain ONNX Runtime's, and its error.

    python -m benchmarks.tuning [--budget 40] [--grid 30] [--batch 32] [--objective latency] [--precision fp16]
                                [--minutes 5] [--json FILE] MODEL...
    python -m benchmarks.tuning --faults [--networks 30] [--json FILE] [MODEL...]

MODEL is a file, a kind of benchmarks.zoo_models, or a name that benchmarks.models makes. ``--grid`` then times the full
grid of settings, in random order for so many seconds, and compares the best of it with what was chosen. ``--faults``
plants faults instead: one wrong channel, a race between two runs, and fuse_conv_bias without prefer_nhwc, which 1.31
computes wrongly; accepted ones make the exit status 1. Without models it does so in small random networks, several at
the same time. Everything on the GPU happens in children with deadlines; a model that fails is a row of the table.
``--cpu`` is to see that it works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ortgpu.provider.records import Choice
from ortgpu.provider.settings import CAPTURE, FLOAT16, SETTINGS, Settings, described, options_of
from ortgpu.session.tuning.children import Place, Trial, Tuning, Wanted
from ortgpu.session.tuning.tuning import Search, normal, tune_at
from tests.support.children import child_environment, run_child
from tests.support.this_machine import environment_record, find_gpus

_TO_MAKE = 120.0  # seconds
_BUDGET, _BUDGET_OF_FAULTS = 40.0, 30.0  # seconds for each model
_HOPELESS = 3.0  # times plain ONNX Runtime's time alone: values that the grid leaves out
_PLANTED = {
    "one wrong channel": ("layout", "channels-last"),
    "fuse_conv_bias without prefer_nhwc": ("layout", "channels-last, biases fused"),
    "a race": ("workspace", "small"),
}
# Which settings a figure may have: all of them are published without CUDA graphs too
CLASSES: dict[str, Callable[[Settings], bool]] = {
    "TF32": lambda settings: FLOAT16 not in options_of(settings),
    "TF32 without graphs": lambda settings: {FLOAT16, CAPTURE}.isdisjoint(options_of(settings)),
    "float16": lambda _: True,
    "float16 without graphs": lambda settings: CAPTURE not in options_of(settings),
}


class WiderSearch(Search):
    """A search that goes on after its choice.

    It times the full grid of settings, as far as ``seconds_of_grid`` go, and names the best of each of CLASSES. A best
    one counts with the longer of two measurements: among many, the shortest time was luck.
    """

    seconds_of_grid = 0.0

    def run(self) -> None:
        super().run()
        self._confirmed = {_key(self.automatic.settings), _key(self.named.settings)}
        self.timed, self.hopeless = 0, list[str]()
        self.grid = self._grid() if self.seconds_of_grid else []
        end, self.end = time.monotonic() + self.seconds_of_grid, math.inf
        for settings in self.grid:
            if time.monotonic() > end:
                break
            self.try_all([settings])
            self.timed += 1
        end = max(self._started + self._wanted.budget, time.monotonic() + self.seconds_of_grid / 3)
        self.best = {name: self._best(fits, end) for name, fits in CLASSES.items()}

    def _grid(self) -> list[Settings]:
        start: Settings = {"search": "heuristic"} if self._begun.convolves else {}
        values: list[list[tuple[str, str]]] = []
        for name, each in self.spaces(tuple(SETTINGS)):
            alone = {value: self._ratio(normal({**start, name: value})) for value in each}
            self.hopeless += [f"{name} {value}" for value in each if _HOPELESS < alone[value] < math.inf]
            values.append([(name, value) for value in each if not _HOPELESS < alone[value] < math.inf])
        found = [normal(dict(pairs)) for pairs in itertools.product(*values)]
        random.Random(0).shuffle(found)
        return found

    def _best(self, fits: Callable[[Settings], bool], end: float) -> Choice:
        while True:
            usable = [each for each in self.trials if each.ratio is not None and fits(each.settings)]
            if time.monotonic() > end:
                usable = [each for each in usable if _key(each.settings) in self._confirmed]
            best = min(usable, key=lambda each: each.ratio or 0, default=None)
            if best is None or best.ratio is None or best.ratio >= 1:
                return Choice({}, 1.0)
            if _key(best.settings) in self._confirmed:
                return Choice(best.settings, best.ratio)
            self._confirmed.add(_key(best.settings))
            self.try_all([best.settings], again=True)


class FaultSearch(Search):
    """A search over the settings in which faults are planted."""

    def spaces(self, names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        planted = {name for name, _ in _PLANTED.values()}
        return [(name, values) for name, values in super().spaces(names) if name in planted]


def _key(settings: Settings) -> frozenset[tuple[str, str]]:
    return frozenset(settings.items())


def tune_wider(
    place: Place, wanted: Wanted, record: Path, on_trial: Callable[[Trial], object], seconds_of_grid: float = 0.0
) -> tuple[Tuning, WiderSearch]:
    """Tune, and return the search too."""
    searches: list[WiderSearch] = []

    def begun(*arguments: Any) -> WiderSearch:
        searches.append(WiderSearch(*arguments))
        searches[-1].seconds_of_grid = seconds_of_grid
        return searches[-1]

    return tune_at(place, wanted, record, begun, on_trial), searches[-1]


def file_of(name: str) -> Path:
    """Return the file of a model. Makes it if it is none. Raises RuntimeError."""
    if Path(name).is_file():
        return Path(name)
    from benchmarks import zoo_models

    if name in zoo_models.KINDS:
        return zoo_models.made(name)
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
    wanted = Wanted(
        str(file_of(name)),
        batches=tuple(options.batch),
        objective=options.objective,
        precision="float16" if options.precision == "fp16" else "float32",
        budget=budget,
    )
    if options.faults:
        from tests.support.tuning_faults import open_planted
    place = Place(None if options.cpu else 0, open_planted if options.faults else None)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        if options.faults:
            found = tune_at(place, wanted, record, FaultSearch, say)
            return {"model": Path(name).stem, **found.as_dict(), "faults": faults(found.trials)}
        found, search = tune_wider(place, wanted, record, say, options.grid)
    row = {"model": name, **found.as_dict()}
    row["best"] = {name: {"settings": each.settings, "ratio": each.ratio} for name, each in search.best.items()}
    if search.grid:
        best = search.best["float16"]  # of all that were candidates
        row["grid"] = {
            "timed": search.timed,
            "of": len(search.grid),
            "hopeless": search.hopeless,
            "best": described(best.settings),
            "chosen over best": found.named.ratio / best.ratio,
        }
    return row


def faults(trials: Iterable[Trial]) -> dict[str, str]:
    """Return what became of each planted fault: "rejected: ...", "accepted" or "not tried"."""
    found = {}
    for fault, (name, value) in _PLANTED.items():
        faulty = [each for each in trials if each.settings.get(name) == value]
        accepted = any(each.ratio is not None for each in faulty)
        found[fault] = "accepted" if accepted else faulty[0].verdict if faulty else "not tried"
    return found


def take_networks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plant faults in random networks, each in a process with a lock of its own: no time of theirs matters."""
    from tests.support.networks import random_network

    end = time.monotonic() + 60 * options.minutes

    def one(number: int, folder: Path) -> dict[str, Any]:
        name = f"network-{number}"
        scratch = folder / name
        scratch.mkdir(mode=0o700)
        model, results = scratch / f"{name}.onnx", scratch / "results.json"
        model.write_bytes(random_network(number))
        if time.monotonic() > end:
            return {"model": name, "failed": "not begun: the time was up"}
        arguments = ["--faults", "--budget", str(options.budget), "--batch", "2", "--json", str(results), str(model)]
        command = [sys.executable, "-m", "benchmarks.tuning", *arguments, *(["--cpu"] if options.cpu else [])]
        env = child_environment({"XDG_RUNTIME_DIR": str(scratch)})
        child = run_child(command, env=env, deadline=3 * options.budget + 30)
        print(f"[{child.seconds:.0f} s] {name}: {child.ended}", file=sys.stderr, flush=True)
        if not results.exists():
            return {"model": name, "failed": f"{child.ended}: {child.stderr[-500:]}"}
        row: dict[str, Any] = json.loads(results.read_text())["rows"][0]
        return row

    at_once = max(1, min(10, (os.cpu_count() or 1) // 2 + 2))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as executor:
        done = [executor.submit(one, number, Path(folder)) for number in range(options.networks)]
        return [each.result() for each in done]


def show(rows: list[dict[str, Any]]) -> None:
    sound = [row for row in rows if "failed" not in row]
    for row in rows:
        if "failed" in row:
            print(f"{row['model']}: FAILED: {row['failed']}")
    if any("faults" in row for row in sound):
        show_faults(sound)
        return
    print("| model | by itself | to plain | named | to plain | error | trials | s |\n|---|---|---|---|---|---|---|---|")
    for row in sound:
        kept = [row["automatic"]["settings"], row["named"]["settings"]]
        errors = [each["error"] for each in row["trials"] if each["settings"] in kept and each["error"] is not None]
        cells = [row["model"]]
        for choice in (row["automatic"], row["named"]):
            cells += [described(choice["settings"]), f"{choice['ratio']:.3f}"]
        cells += [f"{max(errors, default=math.nan):.1e}", str(len(row["trials"])), f"{row['seconds']:.0f}"]
        print(f"| {' | '.join(cells)} |")
    ratios = {name: [row["best"][name]["ratio"] for row in sound] for name in CLASSES}
    ratios |= {kind: [row[kind]["ratio"] for row in sound] for kind in ("automatic", "named")}
    for name, values in ratios.items():
        if values:
            mean = statistics.geometric_mean(values)
            print(f"{name}: geometric mean {mean:.3f}, worst {max(values):.3f}, best {min(values):.3f}")
    for row in sound:
        if "grid" in row:
            grid = row["grid"]
            left = f", without {', '.join(grid['hopeless'])}" if grid["hopeless"] else ""
            said = f"{grid['chosen over best']:.3f} of the best of {grid['timed']} of {grid['of']} settings{left}"
            print(f"{row['model']}: chosen takes {said}: {grid['best']} (bar 1.03)")
    for row in sound:
        for trial in row["trials"]:
            if trial["ratio"] is None:
                print(f"{row['model']}: {described(trial['settings'])}: {trial['verdict']}")
        for text in row["left_out"]:
            print(f"{row['model']}: not tried: {text}")


def show_faults(rows: list[dict[str, Any]]) -> None:
    for fault in _PLANTED:
        became = {row["model"]: row["faults"][fault] for row in rows}
        accepted = [model for model, verdict in became.items() if verdict == "accepted"]
        untried = [model for model, verdict in became.items() if verdict == "not tried"]
        said = f"accepted {len(accepted)} of {len(rows) - len(untried)} (bar 0)"
        print(f"{fault}: {said}{': ' * bool(accepted)}{', '.join(accepted)}")
        if untried:
            print(f"    not tried in {', '.join(untried)}")
    for row in rows:
        for fault, verdict in row["faults"].items():
            print(f"    {row['model']}, {fault}: {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description="Tune models, and print a table.")
    parser.add_argument("names", nargs="*", metavar="MODEL", help="a file, a kind of the zoo, or of benchmarks.models")
    parser.add_argument("--budget", type=float, help="seconds for each model (default: 40, with --faults 30)")
    parser.add_argument("--minutes", type=float, default=5.0, help="no model is begun later")
    parser.add_argument("--grid", type=float, default=0.0, help="seconds to time the full grid, after each model")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--objective", choices=["latency", "throughput"], default="latency")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    parser.add_argument("--faults", action="store_true", help="plant faults; none may be accepted")
    parser.add_argument("--networks", type=int, default=30, help="random networks for --faults without models")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: to see that it works")
    parser.add_argument("--json", type=Path, help="write all trials there, after each model")
    options = parser.parse_args()
    if options.budget is None:
        options.budget = _BUDGET_OF_FAULTS if options.faults else _BUDGET
    if not options.names and not options.faults:
        parser.error("name at least one model")
    end = time.monotonic() + 60 * options.minutes
    where = environment_record(find_gpus())
    rows = [] if options.names else take_networks(options)
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
        _write(options, where, rows)
    _write(options, where, rows)
    show(rows)
    wrong = [row for row in rows if "failed" in row or set(row.get("faults", {}).values()) & {"accepted", "not tried"}]
    return int(bool(wrong))


def _write(options: argparse.Namespace, where: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if options.json is not None:
        document = {"benchmark": "tuning", **where, "arguments": sys.argv[1:], "rows": rows}
        options.json.write_text(json.dumps(document, indent=1, default=str))


if __name__ == "__main__":
    sys.exit(main())
