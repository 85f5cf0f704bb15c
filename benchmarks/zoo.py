"""Measure every kind of network beside plain ONNX Runtime; the worst kind is named first.

    python -m benchmarks.zoo --out FILE [--kinds KIND ...] [--seconds SECONDS] [--parts PART ...] [--torch KIND ...]

Each part runs in a process of its own with a deadline, and what fails there ends that part alone. ``kinds`` are the
networks of zoo_models.py. ``graphs`` are outputs of 1 KB to 64 MB by CUDA graphs. ``copies`` are models whose copies
take four fifths of plain ONNX Runtime's time. ``tuned`` tunes each network first, for a batch of 32 with and without
float16 and for one item, and keeps the records in the folder of models. ``--torch`` compares tuned ``map`` with
torch.compile in these kinds. Ours and plain take turns in one process. Below 1 ours is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.children import report, run_child

MOST_ROUNDS, FEWEST_ROUNDS = 30, 3
SECONDS_OF_A_BLOCK = 0.03
STARTING = 4.0  # seconds for a process to start, and to make or load its model
SIZES = tuple(1 << bits for bits in range(10, 27, 2))  # bytes
COPIED = 64 << 20  # bytes
SHARE_OF_COPIES = 0.8
SMALL = 1e-3  # seconds that a constructor may take more, whatever the ratio
ODD_ONE = "recurrent"  # gains most; means are published without it too
SHARES = {32: 0.5, 1: 0.3}  # of the seconds of a kind, for tuning each batch
LARGEST_ERROR = 2e-2  # of the largest value; TF32 rounds, and layouts add in another order

# Figures in the order in which they are printed, with the bar for each kind and for the geometric mean
BARS: dict[str, tuple[float | None, float | None]] = {
    "tuned TF32 b32": (1.02, 0.80),
    "tuned TF32 without graphs b32": (1.02, None),
    "tuned float16 b32": (1.02, 0.62),
    "tuned float16 without graphs b32": (1.02, None),
    "tuned TF32 b1": (1.02, None),
    "tuned TF32 without graphs b1": (1.02, None),
    "map b1, tuned": (1.02, 0.42),
    "map b32, tuned": (1.02, 0.60),
    "map b32 by torch.compile, convolutional": (1.0, None),
    "map b32 by torch.compile, transformers": (1.05, None),
    "constructor": (1.02, None),
    "run b1": (1.02, None),
    "run b32": (1.02, None),
    "map b1": (1.02, 0.42),
    "map b32": (1.02, 0.60),
    "cuda_graph b1": (1.02, 0.46),
    "cuda_graph sweep": (1.02, None),
    "run, copies 80 %": (0.5, None),
    "map, copies 80 %": (1.02, None),
}


# Inside a child


class Turns:
    """The figures of one part, which are reported as they come. A figure that fails says so, and the next is taken."""

    def __init__(self, seconds: float, figures: int) -> None:
        self._ends = time.monotonic() + seconds
        self._left = figures

    def take(self, name: str, make: Callable[[], Mapping[str, Callable[[], object]]], notes: Any = None) -> None:
        """Report the seconds of "ours" and "plain", which ``make`` returns after it has compared their results."""
        deadline = time.monotonic() + max(0.5, (self._ends - time.monotonic()) / max(1, self._left))
        self._left -= 1
        try:
            actions = make()
            found = _in_turns(actions, deadline)
            report(f"figure {name}", {**found, "notes": notes})
        except Exception as error:
            traceback.print_exc()
            report(f"failed {name}", f"{type(error).__name__}: {error}"[:600])
        gc.collect()


def _in_turns(actions: Mapping[str, Callable[[], object]], deadline: float) -> dict[str, list[float]]:
    from ortgpu.process.timing import alternate

    def timed(action: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            started = time.perf_counter()
            action()
            return time.perf_counter() - started

        return seconds

    timers = {name: timed(action) for name, action in actions.items()}
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        names = list(actions)[:: -1 if number % 2 else 1]
        for name, taken in alternate({name: timers[name] for name in names}, 1).items():
            found[name] += taken
    return found


def _repeats(action: Callable[[], object]) -> int:
    """Return how often to repeat an action in a block, and warm it up."""
    action()
    started = time.perf_counter()
    action()
    return max(1, min(1000, round(SECONDS_OF_A_BLOCK / (time.perf_counter() - started))))


def _repeated(count: int, action: Callable[[], object]) -> Callable[[], object]:
    return lambda: deque((action() for _ in range(count)), 0)


def _ours(model: str, device: str, **arguments: Any) -> Any:
    from ortgpu import GPUSession

    session = GPUSession(model, allow_cpu=device == "cpu", **arguments)
    if session.device.kind != device:
        raise RuntimeError(f"the session is on {session.device}")
    return session


def _feeds(session: Any, batch: int, count: int = 4) -> list[dict[str, Any]]:
    import numpy as np

    random = np.random.default_rng(batch)
    shapes = {each.name: [n if isinstance(n, int) else batch for n in each.shape] for each in session.get_inputs()}
    return [{name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(count)]


def _compare(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise RuntimeError if results differ."""
    for ours, plain in zip(found, expected, strict=True):
        error = float(abs(ours - plain).max() / max(abs(plain).max(), 1e-30))
        if ours.shape != plain.shape or not error <= LARGEST_ERROR:
            raise RuntimeError(f"ours differs by {error} of the largest value, in the shape {ours.shape}")


def _runs(ours: Any, plain: Any, feed: dict[str, Any]) -> dict[str, Callable[[], object]]:
    for _ in range(3):
        _compare(ours.run(None, feed), plain.run(None, feed))
    count = _repeats(lambda: plain.run(None, feed))
    return {
        "ours": _repeated(count, lambda: ours.run(None, feed)),
        "plain": _repeated(count, lambda: plain.run(None, feed)),
    }


def _maps(ours: Any, plain: Any, feeds: list[dict[str, Any]]) -> dict[str, Callable[[], object]]:
    expected = [plain.run(None, feed) for feed in feeds]
    for found, right in zip(ours.map(feeds), expected, strict=True):
        _compare(found, right)
    count = max(16, _repeats(lambda: plain.run(None, feeds[0])))

    def some() -> Iterator[dict[str, Any]]:
        return itertools.islice(itertools.cycle(feeds), count)

    listed = list(some())
    for _ in range(2):
        deque(ours.map(listed), 0)
    return {
        "ours": lambda: deque(ours.map(listed), 0),
        "plain": lambda: deque((plain.run(None, feed) for feed in some()), 0),
    }


def _constructors(model: str, device: str) -> dict[str, Callable[[], object]]:
    from tests.support.plain_session import plain_session

    def ours() -> None:
        _ours(model, device).close()

    def plain() -> None:
        plain_session(model, device)

    for _ in range(2):
        ours()
        plain()
    return {"ours": ours, "plain": plain}


def measure_kind(kind: str, folder: str, device: str, seconds: float) -> None:
    """Report the figures of a network."""
    from benchmarks import zoo_models
    from tests.support.plain_session import plain_session

    model = str(zoo_models.made(kind, Path(folder)))
    ours, plain = _ours(model, device), plain_session(model, device)
    report("options chosen", {name: list(chosen) for name, chosen in ours.options_chosen.items()})
    turns = Turns(seconds, 6)
    for batch in (1, 32):
        feeds = _feeds(plain, batch)
        turns.take(f"run b{batch}", functools.partial(_runs, ours, plain, feeds[0]))
        turns.take(f"map b{batch}", functools.partial(_maps, ours, plain, feeds))
    ours.close()

    def graphs() -> dict[str, Callable[[], object]]:
        return _runs(_ours(model, device, cuda_graph=device != "cpu"), plain, _feeds(plain, 1)[0])

    turns.take("cuda_graph b1", graphs)
    turns.take("constructor", functools.partial(_constructors, model, device))


def _record_of(folder: str, kind: str, batch: int) -> Path:
    return Path(folder, f"tuned-{kind}-b{batch}.json")


def measure_tuned(kind: str, folder: str, device: str, seconds: float) -> None:
    """Tune a network, and report what that gains: device time as the tuner has it, ``map``, and the constructor."""
    from benchmarks import zoo_models
    from benchmarks.tuning import CLASSES, tune_wider
    from ortgpu.provider.records import read_record
    from ortgpu.session.tuning.children import Place, Trial, Wanted
    from tests.support.plain_session import plain_session

    def say(trial: Trial) -> None:
        print(trial.settings, trial.ratio, file=sys.stderr, flush=True)

    ends = time.monotonic() + seconds
    model = str(zoo_models.made(kind, Path(folder)))
    for batch, share in SHARES.items():
        record = _record_of(folder, kind, batch)
        wanted = Wanted(
            model,
            batches=(batch,),
            precision="float16" if batch > 1 else "float32",
            budget=share * seconds,
        )
        found, search = tune_wider(Place(0 if device == "cuda" else None), wanted, record, say)
        for name in [name for name in CLASSES if batch > 1 or "float16" not in name]:
            best = search.best[name]
            notes = {"settings": dict(best.settings), "times are": "relative to plain's"}
            report(f"figure tuned {name} b{batch}", {"ours": [best.ratio], "plain": [1.0], "notes": notes})
        rejected = [f"{trial.settings}: {trial.verdict}" for trial in found.trials if trial.ratio is None]
        trials = {"tried": len(found.trials), "not tried": found.left_out, "rejected": rejected}
        report(f"trials b{batch}", {**trials, "seconds": found.seconds, "compared with": found.compared_with})
        # map has several runs at a time at b32, where a graph has one; and equal precision
        best = search.best["TF32 without graphs" if batch > 1 else "TF32"]
        dataclasses.replace(read_record(record), named=best).write(record)
    turns = Turns(ends - time.monotonic(), 3)
    plain = plain_session(model, device)

    def mapped(batch: int) -> dict[str, Callable[[], object]]:
        record = _record_of(folder, kind, batch)
        ours = _ours(model, device, tuned=str(record))
        if device == "cuda" and read_record(record).named.settings and str(record) not in str(ours.options_chosen):
            raise RuntimeError("the session does not use the record")
        report(f"options chosen b{batch}", {name: list(chosen) for name, chosen in ours.options_chosen.items()})
        return _maps(ours, plain, _feeds(plain, batch))

    for batch in (1, 32):
        turns.take(f"map b{batch}, tuned", functools.partial(mapped, batch))
    turns.take("constructor", functools.partial(_constructors, model, device))


def measure_torch(kind: str, folder: str, device: str, seconds: float) -> None:
    """Report ``map`` of a network that was tuned, beside torch.compile: both with TF32, pinned and pipelined."""
    from benchmarks import zoo_models

    model, record = zoo_models.made(kind, Path(folder)), _record_of(folder, kind, 32)

    def both() -> dict[str, Callable[[], object]]:
        ours = _ours(str(model), device, tuned=str(record) if record.is_file() else True)
        from benchmarks import zoo_torch  # after ONNX Runtime: both take the CUDA libraries that are loaded first

        theirs = zoo_torch.Pipeline(model, device)
        feeds = _feeds(ours, 32) * 4
        for found, right in zip(ours.map(feeds), theirs.map(feeds), strict=True):
            _compare(found, [right])
        for _ in range(2):
            deque(theirs.map(feeds), 0)
            deque(ours.map(feeds), 0)
        return {"ours": lambda: deque(ours.map(feeds), 0), "plain": lambda: deque(theirs.map(feeds), 0)}

    group = "transformers" if "transformer" in kind else "convolutional"
    notes = {"plain is": "torch.compile", "record": record.name if record.is_file() else None}
    Turns(seconds, 1).take(f"map b32 by torch.compile, {group}", both, notes)


def measure_graphs(folder: str, device: str, seconds: float) -> None:
    """Report runs with CUDA graphs of outputs of many sizes, of models with inputs as large and with small ones."""
    from benchmarks import zoo_models
    from tests.support.plain_session import plain_session

    turns = Turns(seconds, 2 * len(SIZES))

    def sized(size: int, is_large_in: bool) -> dict[str, Callable[[], object]]:
        path = Path(folder, "sized.onnx")
        zoo_models.save_sized(path, size, is_large_in=is_large_in)
        ours = _ours(str(path), device, cuda_graph=device != "cpu")
        plain = plain_session(str(path), device)
        feed = _feeds(plain, 1)[0]
        _repeated(40, lambda: ours.run(None, feed))()  # it finds its way
        return _runs(ours, plain, feed)

    for size, is_large_in in itertools.product(SIZES, (False, True)):
        name = f"{_bytes(size)} out" + (", as much in" if is_large_in else "")
        turns.take(f"cuda_graph sweep: {name}", functools.partial(sized, size, is_large_in))


def measure_copies(folder: str, device: str, seconds: float) -> None:
    """Report ``run`` and ``map`` of models whose copies take four fifths of plain ONNX Runtime's time."""
    from benchmarks import zoo_models
    from tests.support.plain_session import plain_session

    size = COPIED if device == "cuda" else COPIED >> 6
    path = Path(folder, "chain.onnx")

    def times(operators: int, width: int, wider: int) -> tuple[float, float]:
        """Return the seconds of a run with copies, and without."""
        zoo_models.save_chain(path, operators, (1, width), wider)
        plain = plain_session(str(path), device)
        feed, binding = _feeds(plain, 1, 1)[0], plain.io_binding()
        binding.bind_cpu_input("x", feed["x"])
        binding.bind_output("y", device)
        found = []
        runs: list[Callable[[], object]] = [lambda: plain.run(None, feed), lambda: plain.run_with_iobinding(binding)]
        for run in runs:
            run()
            taken = []
            for _ in range(5):
                started = time.perf_counter()
                run()
                taken.append(time.perf_counter() - started)
            found.append(min(taken))
        return found[0], found[1]

    turns = Turns(seconds, 8)
    for wider, is_free in itertools.product((1, 16), (False, True)):
        width = size // 4 // wider
        name = f"{_bytes(4 * width)} in, {_bytes(size)} out, {'free' if is_free else 'fixed'} batch"
        try:
            few, many = times(4, width, wider), times(36, width, wider)
            operator = max((many[1] - few[1]) / 32, 1e-9)
            copies = few[0] - few[1]
            count = max(1, min(2000, round((copies * (1 - SHARE_OF_COPIES) / SHARE_OF_COPIES) / operator)))
            total, computing = times(count, width, wider)
            notes = {"operators": count, "share of copies": 1 - computing / total}
            zoo_models.save_chain(path, count, ("batch" if is_free else 1, width), wider)
            ours, plain = _ours(str(path), device), plain_session(str(path), device)
            feeds = _feeds(plain, 1, 2)
        except Exception as error:
            traceback.print_exc()
            report(f"failed run, copies 80 %: {name}", f"{type(error).__name__}: {error}"[:600])
            continue
        turns.take(f"run, copies 80 %: {name}", functools.partial(_runs, ours, plain, feeds[0]), notes)
        turns.take(f"map, copies 80 %: {name}", functools.partial(_maps, ours, plain, feeds), notes)
        ours.close()


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def work(part: str, arguments: Mapping[str, Any]) -> None:
    import logging
    import warnings

    import ortgpu

    ortgpu.preload()  # else a plain session that comes first takes other libraries than a record was made with
    warnings.simplefilter("ignore")  # of nodes on the CPU
    logging.getLogger("ortgpu").addHandler(logging.NullHandler())
    parts: dict[str, Callable[..., None]] = {
        "kind": measure_kind,
        "tuned": measure_tuned,
        "torch": measure_torch,
        "graphs": measure_graphs,
        "copies": measure_copies,
    }
    parts[part](**arguments)


# The parent


def _parts(options: argparse.Namespace, kinds: Sequence[str]) -> list[tuple[str, str, dict[str, str]]]:
    """Return title, function and arguments of each part."""
    found: list[tuple[str, str, dict[str, str]]] = []
    if "graphs" in options.parts:
        found.append(("graphs", "graphs", {}))
    if "copies" in options.parts:
        found.append(("copies", "copies", {}))
    if "kinds" in options.parts:
        found += [(kind, "kind", {"kind": kind}) for kind in kinds]
    if "tuned" in options.parts:
        small_first = reversed(kinds)  # what they leave of their time goes to the others
        found += [(f"{kind}, tuned", "tuned", {"kind": kind}) for kind in small_first]
    found += [(f"{kind}, torch", "torch", {"kind": kind}) for kind in options.torch]
    return found


def _take(title: str, part: str, arguments: dict[str, str], options: argparse.Namespace, seconds: float) -> Any:
    """Return what a part reported: its figures, and what failed."""
    given = {**arguments, "folder": str(options.folder), "device": options.device, "seconds": seconds}
    command = [sys.executable, "-m", "benchmarks.zoo", "--work", part, json.dumps(given)]
    child = run_child(command, deadline=3 * seconds + 10 * STARTING)
    figures, failed = {}, {}
    for key, value in child.reports.items():
        what, _, name = key.partition(" ")
        if what == "figure":
            pairs = list(zip(value["ours"], value["plain"], strict=True))
            figures[name] = {**value, "ratio": statistics.median(ours / plain for ours, plain in pairs)}
        elif what == "failed":
            failed[name] = value
    if child.returncode != 0:
        failed[f"the process of {title}"] = f"{child.ended}: {child.stderr[-1500:]}"
    return {
        "figures": figures,
        "failed": failed,
        "seconds": child.seconds,
        "options": child.reports.get("options chosen"),
        "notes": {key: value for key, value in child.reports.items() if key.startswith(("options", "trials"))},
    }


def summary(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return range and geometric mean of each figure, the worst first."""
    ratios: dict[str, dict[str, float]] = {}
    within = set[str]()  # kinds whose constructor takes hardly longer
    for title, part in parts.items():
        for name, figure in part["figures"].items():
            figure_name, _, variant = name.partition(": ")
            kind = variant or title.partition(",")[0]
            ratios.setdefault(figure_name, {})[kind] = figure["ratio"]
            if name == "constructor" and statistics.median(figure["ours"]) - statistics.median(figure["plain"]) < SMALL:
                within.add(kind)
    found = {}
    for name in [*BARS, *(ratios.keys() - BARS.keys())]:
        if name in ratios:
            ordered = sorted(ratios[name].items(), key=lambda item: -item[1])
            mean = statistics.geometric_mean(ratios[name].values())
            rest = [ratio for kind, ratio in ordered if kind != ODD_ONE]
            bar, bar_of_mean = BARS.get(name, (None, None))
            over = [kind for kind, ratio in ordered if bar is not None and ratio > bar]
            found[name] = {
                "worst": list(ordered[0]),
                "best": list(ordered[-1]),
                "geometric mean": mean,
                f"geometric mean without {ODD_ONE}": statistics.geometric_mean(rest) if rest else None,
                "missed by": [kind for kind in over if name != "constructor" or kind not in within],
                "bar": bar,
                "bar of the mean": bar_of_mean,
                "all": dict(ordered),
            }
    return found


def _print(record: Mapping[str, Any]) -> None:
    machine = record["machine"]
    print(f"{', '.join(machine['gpus']) or 'no GPU'}; {machine['cores']} cores; commit {record['commit']}")
    for name, each in record["summary"].items():
        (worst, most), (best, least) = each["worst"], each["best"]
        bars = [f"bar {each[key]}" + " of the mean" * (key != "bar") for key in ("bar", "bar of the mean") if each[key]]
        mean = each["geometric mean"]
        said = f"worst {worst} {most:.3f}, best {best} {least:.3f}, geometric mean {mean:.3f} of {len(each['all'])}"
        if (rest := each[f"geometric mean without {ODD_ONE}"]) is not None and ODD_ONE in each["all"]:
            said += f", {rest:.3f} without {ODD_ONE}"
        print(f"{name}: {said}{' (' * bool(bars)}{', '.join(bars)}{')' * bool(bars)}")
        print("    " + ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in each["all"].items()))
        if each["missed by"]:
            print(f"    misses its bar: {', '.join(each['missed by'])}")
    for title, part in record["parts"].items():
        for name, why in part["failed"].items():
            print(f"failed: {title}, {name}: {why}")
    for title in record["left out"]:
        print(f"left out for want of time: {title}")


def main(arguments: Sequence[str] | None = None) -> int:
    from benchmarks import models, zoo_models
    from tests.support.this_machine import environment_record, find_gpus

    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="Measure every kind of network.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write everything there, as JSON")
    parser.add_argument("--kinds", nargs="+", choices=list(zoo_models.KINDS), default=list(zoo_models.KINDS))
    parser.add_argument(
        "--parts", nargs="*", choices=("graphs", "copies", "kinds", "tuned"), default=["graphs", "copies", "kinds"]
    )
    parser.add_argument(
        "--torch", nargs="+", choices=list(zoo_models.KINDS), default=[], metavar="KIND", help="also by torch.compile"
    )
    parser.add_argument("--seconds", type=float, default=150, help="for all together (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=models.folder(), help="where models are kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # to see it work
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(options, options.kinds)
    record: dict[str, Any] = {
        "benchmark": "zoo",
        **environment_record(find_gpus()),
        "parts": {},
        "left out": [],
        "summary": {},
    }
    ends = time.monotonic() + options.seconds
    for number, (title, part, given) in enumerate(parts):
        left = ends - time.monotonic()
        seconds = left / (len(parts) - number) - STARTING
        if left <= 0:
            record["left out"].append(title)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            continue
        found = record["parts"][title] = _take(title, part, given, options, max(2.0, seconds))
        record["summary"] = summary(record["parts"])
        ratios = ", ".join(f"{name} {figure['ratio']:.2f}" for name, figure in found["figures"].items())
        failed = f"; failed: {', '.join(found['failed'])}" if found["failed"] else ""
        print(f"[{found['seconds']:.0f} s] {title}: {ratios}{failed}", file=sys.stderr, flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    _print(record)
    return int(any(part["failed"] for part in record["parts"].values()) or not record["parts"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
