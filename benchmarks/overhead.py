"""Measure what ortgpu costs on top of plain ONNX Runtime.

    python -m benchmarks.overhead [--quick] [--only FIGURE] [--json FILE]

Every figure compares ours with plain ONNX Runtime doing the same on one machine, alternately: inside one process where
the process is warm, in alternating fresh processes where the start is what is measured. Without a GPU, the figures that
need none are still taken, and the others are listed as left out. README.md beside this file says what each one means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.figures import Figure, Figures, NotApplicableError, made_model, run_worker, spread, take_figures
from ortgpu.process.timing import alternate
from tests.support.children import Child, child_environment, run_child
from tests.support.this_machine import GPUs, overlay, without_cuda_variables

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

# As pip does when it installs: what is on the path alone is not byte-compiled.
COMPILE = """
import compileall, importlib.util
for name in ("ortgpu", "onnxruntime", "elftools", "pynvml"):
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        compileall.compile_dir(spec.submodule_search_locations[0], quiet=2)
    elif spec is not None:
        compileall.compile_file(spec.origin, quiet=2)
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
    """The figures. Each is a method that returns one or raises NotApplicableError; other errors end it alone."""

    def __init__(self, repeats: Repeats, scratch: Path) -> None:
        self.repeats = repeats
        self.scratch = scratch
        self._plain_libraries: list[str] | None = None
        self._compiled = False

    # Warm: one process

    def session_small(self) -> Figure:
        return self._construct("mlp")

    def session_conv(self) -> Figure:
        return self._construct("conv")

    def session_options(self) -> Figure:
        return self._construct("conv", with_options=True)

    def session_resnet50(self) -> Figure:
        return self._construct("resnet50")

    def session_resnet50_options(self) -> Figure:
        return self._construct("resnet50", with_options=True)

    def session_allow_cpu(self) -> Figure:
        """Measure sessions without a GPU, from the second on, and plain sessions that ask for the CPU."""
        arguments = {"model": made_model("mlp"), "rounds": self.repeats.construct}
        child = run_worker("construct_on_cpu", arguments, env=child_environment({"CUDA_VISIBLE_DEVICES": "-1"}))
        seconds = child.reports["seconds"]
        notes = {"plain, with its placement recorded and read": spread(seconds["plain, placement read"])}
        return Figure(seconds["ours"], seconds["plain"], {**notes, **self._recipe("mlp")})

    def _construct(self, name: str, *, with_options: bool = False) -> Figure:
        arguments = {"model": made_model(name), "rounds": self.repeats.construct, "with_options": with_options}
        child = run_worker("construct", arguments)
        seconds = child.reports["seconds"]
        return Figure(seconds["ours"], seconds["plain"], self._recipe(name))

    def run_small(self) -> Figure:
        rounds = {"rounds": self.repeats.blocks, "calls": self.repeats.calls}
        child = run_worker("run", {"model": made_model("mlp"), **rounds})
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
        model = made_model(name)
        told = self._libraries_for_plain()
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

    def _libraries_for_plain(self) -> list[str]:
        """Return nothing if ``preload_dlls()`` finds the libraries by itself, else the folders that it needs."""
        if self._plain_libraries is None:
            model = made_model("conv")
            alone = self._python(COLD_PLAIN, model)
            self._plain_libraries = []
            if "RESULT" not in alone.stdout:
                found = run_worker("locate", {"model": model}).reports
                self._plain_libraries = [found["cuda"], found["cudnn"] or found["cuda"]]
        return self._plain_libraries

    # Broken environments

    def broken_no_device(self) -> Figure:
        return self._broken(child_environment({"CUDA_VISIBLE_DEVICES": "-1"}))

    def broken_libraries(self) -> Figure:
        packages = overlay(self.scratch / "packages", nvidia="none")
        return self._broken(child_environment(without_cuda_variables(), python_path=[packages]), "-S")

    def _broken(self, env: Mapping[str, str], *interpreter: str) -> Figure:
        """Measure from after ``import onnxruntime`` to the exception. The plain one ends with a session on the CPU."""
        model = made_model("mlp")
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
        """Compare with ONNX Runtime's own function, which prints and judges nothing."""
        ours = "import ortgpu.diagnosis; started = time.perf_counter(); ortgpu.diagnose()"
        plain = "import onnxruntime; started = time.perf_counter(); onnxruntime.print_debug_info()"
        return self._timed(ours, plain)

    def doctor(self) -> Figure:
        """Compare the whole command, with its child process, with printing ONNX Runtime's information."""

        def command(*arguments: str) -> Callable[[], float]:
            def action() -> float:
                child = run_child([sys.executable, *arguments], deadline=60, cwd=self.scratch)
                if child.returncode not in (0, 1):
                    raise RuntimeError(child.output)
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

    def _recipe(self, name: str) -> dict[str, str]:
        return {"model": f"{name}: {models.recipe_of(name)}"}

    def _python(
        self, code: str, *arguments: str, env: Mapping[str, str] | None = None, interpreter: Sequence[str] = ()
    ) -> Child:
        return run_child([sys.executable, *interpreter, "-c", code, *arguments], env=env, deadline=60, cwd=self.scratch)

    def _timed_import(self, module: str) -> Callable[[], float]:
        return lambda: float(result_of(self._python(IMPORT.format(module=module)))["seconds"])

    def _children_in_turns(self, actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        if not self._compiled:
            self._python(COMPILE)
            self._compiled = True
        for action in actions.values():
            action()  # the first of each reads the files into the page cache
        return alternate(actions, rounds)


FIGURES: Figures[Benchmark] = {
    "import": ("import ortgpu | import onnxruntime", False, Benchmark.import_time),
    "session-small": ("session, tiny model, warm", True, Benchmark.session_small),
    "session-conv": ("session, one convolution, warm", True, Benchmark.session_conv),
    "session-options": ("session, one convolution, with SessionOptions", True, Benchmark.session_options),
    "session-resnet50": ("session, ResNet-50, warm", True, Benchmark.session_resnet50),
    "session-resnet50-options": (
        "session, ResNet-50, with SessionOptions",
        True,
        Benchmark.session_resnet50_options,
    ),
    "session-allow-cpu": ("session on the CPU, allowed, no GPU shown", False, Benchmark.session_allow_cpu),
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
    raise RuntimeError(child.output)


def main(arguments: Sequence[str] | None = None) -> int:
    def make(options: argparse.Namespace, _: GPUs, scratch: Path) -> Benchmark:
        return Benchmark(QUICK if options.quick else FULL, scratch)

    description = "What ortgpu costs on top of plain ONNX Runtime, measured alternately."
    return take_figures("overhead", description, FIGURES, make, arguments)


if __name__ == "__main__":
    sys.exit(main())
