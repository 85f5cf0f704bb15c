"""What ortgpu costs on top of plain ONNX Runtime.

    python -m benchmarks.overhead [--quick] [--only FIGURE] [--json FILE]

Every figure compares ours with plain ONNX Runtime doing the same on the same machine in turns: inside one process where
the process is warm, in alternating fresh processes where the start is what is measured. Without a GPU, the figures that
need none are still taken, and the others are listed as left out. README.md beside this file says what each one means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.common import (
    ROOT,
    Child,
    child_environment,
    environment_record,
    find_gpus,
    overlay,
    print_machine,
    run_child,
    spread,
    without_cuda_variables,
)
from ortgpu.timing import in_turns

# The children below import nothing before their clock starts but what reads it, and print one line when all is done.

IMPORT = """
import time
started = time.perf_counter()
import {module}
seconds = time.perf_counter() - started
import json, sys
heavy = sorted({{"numpy", "onnx", "onnxruntime", "rich"}} & set(sys.modules))
print("RESULT", json.dumps({{"seconds": seconds, "heavy": heavy, "version": getattr({module}, "__version__", None)}}))
"""

FIRST_RUN = """
import numpy
shapes = {each.name: [n if isinstance(n, int) else 1 for n in each.shape] for each in session.get_inputs()}
session.run(None, {name: numpy.zeros(shape, numpy.float32) for name, shape in shapes.items()})
ran = time.perf_counter()
import json
if session.get_providers()[0] != "CUDAExecutionProvider":
    raise SystemExit("this session is on the CPU")
phases = {"before the session": loaded - started, "session": opened - loaded, "first run": ran - opened}
print("RESULT", json.dumps({"seconds": ran - started, "phases": phases}))
"""

COLD_OURS = (
    """
import time
started = time.perf_counter()
import sys
from ortgpu import GPUSession
loaded = time.perf_counter()
session = GPUSession(sys.argv[1])
opened = time.perf_counter()
"""
    + FIRST_RUN
)

COLD_PLAIN = (
    """
import time
started = time.perf_counter()
import sys
import onnxruntime
if sys.argv[2:]:
    onnxruntime.preload_dlls(cudnn=False, directory=sys.argv[2])
    onnxruntime.preload_dlls(cuda=False, directory=sys.argv[3])
else:
    onnxruntime.preload_dlls()
loaded = time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
opened = time.perf_counter()
"""
    + FIRST_RUN
)

BROKEN_OURS = """
import sys, time
import onnxruntime
started = time.perf_counter()
try:
    from ortgpu import GPUSession
    GPUSession(sys.argv[1])
    outcome = "opened"
except Exception as error:
    outcome = getattr(error, "code", type(error).__name__)
seconds = time.perf_counter() - started
import json
print("RESULT", json.dumps({"seconds": seconds, "outcome": outcome}))
"""

BROKEN_PLAIN = """
import sys, time
import onnxruntime
started = time.perf_counter()
try:
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    outcome = session.get_providers()[0]
except Exception as error:
    outcome = type(error).__name__
seconds = time.perf_counter() - started
import json
print("RESULT", json.dumps({"seconds": seconds, "outcome": outcome}))
"""


class NotApplicableError(Exception):
    """This figure makes no sense here; the text says why."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds of ours and of plain ONNX Runtime, taken in turns: the n-th of one belongs to the n-th of the other."""

    ours: Sequence[float]
    plain: Sequence[float]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        pairs = list(zip(self.ours, self.plain, strict=True))
        differences = [mine - theirs for mine, theirs in pairs]
        return {
            "unit": "s",
            "ours": spread(self.ours),
            "plain": spread(self.plain),
            "ratio": statistics.median(mine / theirs for mine, theirs in pairs),  # of neighbours: drift cancels
            "difference": spread(differences),
            "notes": dict(self.notes),
            "values": {"ours": list(self.ours), "plain": list(self.plain)},
        }


@dataclass(frozen=True, slots=True)
class Repeats:
    construct: int
    blocks: int
    calls: int
    imports: int
    cold: int
    cold_large: int
    broken: int


FULL = Repeats(construct=40, blocks=60, calls=1000, imports=15, cold=14, cold_large=9, broken=5)
QUICK = Repeats(construct=5, blocks=8, calls=500, imports=5, cold=3, cold_large=2, broken=3)


class Benchmark:
    """The figures: each a method that returns one, or raises NotApplicableError, or fails and leaves the others be."""

    def __init__(self, repeats: Repeats, no_gpu: str | None, scratch: Path) -> None:
        self.repeats = repeats
        self.no_gpu = no_gpu  # why there is none; None: there is one
        self.scratch = scratch
        self._plain_libraries: list[str] | None = None

    # Warm: one process

    def session_small(self) -> Figure:
        return self._construct("mlp")

    def session_resnet50(self) -> Figure:
        return self._construct("resnet50")

    def _construct(self, name: str) -> Figure:
        model = self._model(name)
        child = self._worker("construct", {"model": model, "rounds": self.repeats.construct})
        seconds = child.reports["seconds"]
        return Figure(seconds["ours"], seconds["plain"], self._recipe(name))

    def run_small(self) -> Figure:
        rounds = {"rounds": self.repeats.blocks, "calls": self.repeats.calls}
        child = self._worker("run", {"model": self._model("mlp"), **rounds})
        seconds = child.reports["seconds"]
        noise = [again - plain for again, plain in zip(seconds["plain again"], seconds["plain"], strict=True)]
        between = [ours - plain for ours, plain in zip(seconds["ours"], seconds["plain"], strict=True)]
        notes = {
            "calls a block": self.repeats.calls,
            "plain is": "InferenceSession.run on the same session, so that only what we add differs",
            "ours - another session that is plain": spread(between),
            "that - yet another plain one": spread(noise),
            "device": child.reports["device"],
        }
        return Figure(seconds["ours"], seconds["inherited"], notes)

    # Cold: fresh processes

    def import_time(self) -> Figure:
        actions = {name: self._timed_import(module) for name, module in (("ours", "ortgpu"), ("plain", "onnxruntime"))}
        seconds = self._children_in_turns(actions, self.repeats.imports)
        heavy = result_of(self._python(IMPORT.format(module="ortgpu")))["heavy"]
        return Figure(seconds["ours"], seconds["plain"], {"heavy packages that ours imports": heavy})

    def cold_small(self) -> Figure:
        return self._cold("mlp", self.repeats.cold)

    def cold_resnet50(self) -> Figure:
        return self._cold("resnet50", self.repeats.cold_large)

    def _cold(self, name: str, pairs: int) -> Figure:
        model = self._model(name)
        told = self._libraries_for_plain()
        self._compile_packages()
        phases: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}

        def child(which: str, code: str, *arguments: str) -> Callable[[], float]:
            def action() -> float:
                result = result_of(self._python(code, model, *arguments))
                phases[which].append(result["phases"])
                return float(result["seconds"])

            return action

        actions = {"ours": child("ours", COLD_OURS), "plain": child("plain", COLD_PLAIN, *told)}
        seconds = self._children_in_turns(actions, pairs)
        notes: dict[str, Any] = {
            f"{which}, medians": {phase: statistics.median(each[phase] for each in taken) for phase in taken[0]}
            for which, taken in phases.items()
        }
        notes["plain was told where its libraries are"] = bool(told)
        return Figure(seconds["ours"], seconds["plain"], {**notes, **self._recipe(name)})

    def _compile_packages(self) -> None:
        """Byte-compile both, as pip does when it installs: on the path alone, neither is."""
        code = (
            "import compileall, importlib.util as u; "
            "[compileall.compile_dir(u.find_spec(name).submodule_search_locations[0], quiet=2) "
            "for name in ('ortgpu', 'onnxruntime')]; print('RESULT', '{}')"
        )
        self._python(code)

    def _libraries_for_plain(self) -> list[str]:
        """Nothing where ``preload_dlls()`` finds the libraries by itself, else the folders it has to be told."""
        if self._plain_libraries is None:
            model = self._model("conv")
            alone = self._python(COLD_PLAIN, model)
            self._plain_libraries = []
            if "RESULT" not in alone.stdout:
                found = self._worker("locate", {"model": model}).reports
                self._plain_libraries = [found["cuda"], found["cudnn"] or found["cuda"]]
        return self._plain_libraries

    # Broken environments

    def broken_no_device(self) -> Figure:
        return self._broken(child_environment({"CUDA_VISIBLE_DEVICES": "-1"}))

    def broken_libraries(self) -> Figure:
        packages = overlay(self.scratch / "packages", nvidia="none")
        return self._broken(child_environment(without_cuda_variables(), python_path=[packages]), "-S")

    def _broken(self, env: Mapping[str, str], *interpreter: str) -> Figure:
        """From after ``import onnxruntime`` to the exception; the plain one ends with a session on the CPU."""
        model = self._model("mlp")
        outcomes: dict[str, set[str]] = {"ours": set(), "plain": set()}

        def child(which: str, code: str) -> Callable[[], float]:
            def action() -> float:
                result = result_of(self._python(code, model, env=env, interpreter=interpreter))
                outcomes[which].add(str(result["outcome"]))
                return float(result["seconds"])

            return action

        actions = {"ours": child("ours", BROKEN_OURS), "plain": child("plain", BROKEN_PLAIN)}
        seconds = self._children_in_turns(actions, self.repeats.broken)
        if "opened" in outcomes["ours"]:
            raise NotApplicableError("it cannot be broken here: the session opens all the same")
        notes = {f"{which} ended with": ", ".join(sorted(each)) for which, each in outcomes.items()}
        return Figure(seconds["ours"], seconds["plain"], notes)

    # Diagnosis

    def diagnose(self) -> Figure:
        """Beside what ONNX Runtime has for the purpose, which prints and judges nothing."""
        ours = "import ortgpu.diagnosis; started = time.perf_counter(); ortgpu.diagnose()"
        plain = "import onnxruntime; started = time.perf_counter(); onnxruntime.print_debug_info()"
        return self._timed(ours, plain)

    def doctor(self) -> Figure:
        """The whole command, its child process included, beside printing ONNX Runtime's information."""

        def command(*arguments: str) -> Callable[[], float]:
            def action() -> float:
                child = run_child([sys.executable, *arguments], deadline=60, cwd=self.scratch)
                if child.returncode not in (0, 1):
                    raise RuntimeError(child.explain())
                return child.seconds

            return action

        plain = "import onnxruntime; onnxruntime.print_debug_info()"
        actions = {"ours": command("-m", "ortgpu", "doctor"), "plain": command("-c", plain)}
        seconds = self._children_in_turns(actions, self.repeats.broken)
        return Figure(seconds["ours"], seconds["plain"])

    def _timed(self, ours: str, plain: str) -> Figure:
        end = "seconds = time.perf_counter() - started\nimport json\nprint('RESULT', json.dumps({'seconds': seconds}))"

        def child(code: str) -> Callable[[], float]:
            return lambda: float(result_of(self._python(f"import time\n{code}\n{end}"))["seconds"])

        seconds = self._children_in_turns({"ours": child(ours), "plain": child(plain)}, self.repeats.broken)
        return Figure(seconds["ours"], seconds["plain"])

    # Tools

    def _model(self, name: str) -> str:
        return models.made(name)

    def _recipe(self, name: str) -> dict[str, str]:
        return {"model": f"{name}: {models.recipe_of(name)}"}

    def _worker(self, name: str, arguments: Mapping[str, Any]) -> Child:
        command = [sys.executable, str(ROOT / "benchmarks" / "workers.py"), name, json.dumps(dict(arguments))]
        child = run_child(command, deadline=150)
        if child.returncode != 0:
            raise RuntimeError(child.explain())
        return child

    def _python(
        self, code: str, *arguments: str, env: Mapping[str, str] | None = None, interpreter: Sequence[str] = ()
    ) -> Child:
        return run_child([sys.executable, *interpreter, "-c", code, *arguments], env=env, deadline=60, cwd=self.scratch)

    def _timed_import(self, module: str) -> Callable[[], float]:
        return lambda: float(result_of(self._python(IMPORT.format(module=module)))["seconds"])

    def _children_in_turns(self, actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        for action in actions.values():
            action()  # the first of each reads the files into the page cache, and writes bytecode
        return in_turns(actions, rounds)


FIGURES: dict[str, tuple[str, bool, Callable[[Benchmark], Figure]]] = {
    "import": ("import ortgpu | import onnxruntime", False, Benchmark.import_time),
    "session-small": ("session, tiny model, warm", True, Benchmark.session_small),
    "session-resnet50": ("session, ResNet-50, warm", True, Benchmark.session_resnet50),
    "run-small": ("run, tiny model, a call", True, Benchmark.run_small),
    "cold-small": ("cold start to first result, tiny model", True, Benchmark.cold_small),
    "cold-resnet50": ("cold start to first result, ResNet-50", True, Benchmark.cold_resnet50),
    "diagnose": ("ortgpu.diagnose() | onnxruntime.print_debug_info()", False, Benchmark.diagnose),
    "doctor": ("ortgpu doctor, with its child | print_debug_info", False, Benchmark.doctor),
    "broken-no-device": ("no GPU shown: to the exception | to the CPU", False, Benchmark.broken_no_device),
    "broken-libraries": ("no CUDA libraries: to the exception | to the CPU", False, Benchmark.broken_libraries),
}


def result_of(child: Child) -> dict[str, Any]:
    for line in reversed(child.stdout.splitlines()):
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise RuntimeError(child.explain())


def readable(seconds: float, *, signed: bool = False) -> str:
    scale, unit = (1e6, "µs") if abs(seconds) < 1e-3 else (1e3, "ms") if abs(seconds) < 10 else (1, "s")
    value = seconds * scale
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:+.{digits}f} {unit}" if signed else f"{value:.{digits}f} {unit}"


def cell(of: Mapping[str, Any], *, signed: bool = False) -> str:
    """A median and, in brackets, the quartiles."""
    low, high = (readable(each, signed=signed) for each in of["quartiles"])
    return f"{readable(of['median'], signed=signed)} [{low}, {high}]"


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a figure. The difference is that of pairs, so that its median need not be that of the medians."""
    rows = [("figure (ours | plain)", "ours", "plain", "ratio", "ours - plain", "n")]
    for name, figure in figures.items():
        ours, plain, difference = cell(figure["ours"]), cell(figure["plain"]), cell(figure["difference"], signed=True)
        rows.append((FIGURES[name][0], ours, plain, f"{figure['ratio']:.3f}", difference, str(figure["ours"]["n"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def note(value: object) -> str:
    """A note as text; seconds among them are told by their shape."""
    if isinstance(value, dict):
        if "median" in value:
            return cell(value, signed=True)
        return ", ".join(f"{key} {readable(each) if isinstance(each, float) else each}" for key, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def print_results(record: Mapping[str, Any]) -> None:
    print_machine(record)
    if record["figures"]:
        print(table(record["figures"]), end="\n\n")
    for name, figure in record["figures"].items():
        for key, value in figure["notes"].items():
            print(f"{name}: {key}: {note(value)}")
    for heading in ("left out", "failed"):
        for name, why in record[heading].items():
            print(f"{heading}: {name}: {why}")


def main(arguments: Sequence[str] | None = None) -> int:
    description = "What ortgpu costs on top of plain ONNX Runtime, measured in turns."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=description)
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works, not to report")
    parser.add_argument("--only", action="append", choices=list(FIGURES), help="this figure only; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, anew after each figure")
    options = parser.parse_args(arguments)

    gpus = find_gpus()
    record: dict[str, Any] = {
        "benchmark": "overhead",
        **environment_record(gpus),
        "quick": options.quick,
        "figures": {},
        "left out": {},
        "failed": {},
    }
    chosen = options.only or list(FIGURES)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ortgpu-overhead-") as scratch:
        benchmark = Benchmark(QUICK if options.quick else FULL, None if gpus.visible else gpus.reason, Path(scratch))
        for number, name in enumerate(chosen, 1):
            progress = f"[{number}/{len(chosen)}, {time.monotonic() - started:.0f} s] {FIGURES[name][0]}"
            print(f"{progress}: {measure(benchmark, name, record)}", file=sys.stderr, flush=True)
            record["seconds"] = time.monotonic() - started
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    print_results(record)
    return int(bool(record["failed"]))


def measure(benchmark: Benchmark, name: str, record: dict[str, Any]) -> str:
    """Take one figure into the record, or the reason why there is none. Returns what to say of it at once."""
    _, needs_gpu, take = FIGURES[name]
    try:
        if needs_gpu and benchmark.no_gpu:
            raise NotApplicableError(f"needs an NVIDIA GPU: {benchmark.no_gpu}")
        figure = record["figures"][name] = take(benchmark).as_dict()
    except NotApplicableError as error:
        record["left out"][name] = str(error)
        return "left out"
    except Exception as error:
        record["failed"][name] = f"{type(error).__name__}: {error}"
        return "failed"
    return f"{readable(figure['ours']['median'])} | {readable(figure['plain']['median'])}"


if __name__ == "__main__":
    sys.exit(main())
