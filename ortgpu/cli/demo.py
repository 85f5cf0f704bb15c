"""``ortgpu demo``: run plain ONNX Runtime and then a GPUSession on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortgpu.cli import output, signals
from ortgpu.cli.check import check
from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.environment.child import cause_of_death, run_python
from ortgpu.environment.packages.plugins import environ_of_child
from ortgpu.process.late import late
from ortgpu.provider.requests import CPU, CUDA

if TYPE_CHECKING:
    import onnx
else:
    onnx = late("onnx")

_MARK = "ORTGPU-DEMO "  # The report begins with this mark. Libraries print the other lines.
_SHOWN = 8  # The most lines that are shown of ONNX Runtime's output.

# An ordinary program runs a model like this.
_PROGRAM = f"""
import json

model, observed = bytes.fromhex(sys.argv[1]), {{}}
try:
    import numpy, onnxruntime
    observed["version"] = onnxruntime.__version__
    session = onnxruntime.InferenceSession(model, providers={[CUDA, CPU]})
    observed["bound"] = ", ".join(session.get_providers())
    session.run(None, {{"x": numpy.ones(4, numpy.float32)}})
    observed["bound"] = ", ".join(session.get_providers())  # a run that fails may go to the CPU
    observed["run()"] = "returned a result"
except Exception as error:
    observed["raised"] = f"{{type(error).__name__}}: {{error}}"
print("\\n{_MARK}" + json.dumps(observed), flush=True)
"""


@click.command()
@click.option("--timeout", type=click.IntRange(min=1), default=120, show_default=True, help="Seconds for 1.")
@click.option(
    "--save",
    metavar="FILE",
    type=output.FileToWrite(),
    help="Also write a model to try: one Relu, input x, float32 [n, 4].",
)
def demo(timeout: float, save: Path | None) -> int:
    """Show what plain ONNX Runtime does on this machine, and what a GPUSession does.

    1. An ordinary program, in a child process: an InferenceSession that asks for CUDA before the CPU.

    2. The same model in a GPUSession, as `ortgpu check` opens it: the session proves that it is on the GPU, or raises.

    Exit code 0: the GPUSession did one of the two, or opened on the CPU because ORTGPU_ALLOW_CPU is set. 1: ONNX
    Runtime alone reached the GPU and the GPUSession did not.
    """
    console = output.stdout()
    if save is not None:
        save.write_bytes(example_model())
    output.heading(console, "1. Plain ONNX Runtime")
    output.line(console, f"  onnxruntime.InferenceSession(model, providers={[CUDA, CPU]})")
    with signals.raise_on_signals():
        alone = observe(timeout=timeout)
    output.facts(console, {"version": "unknown", "raised": "nothing", "run()": "was not reached", **alone.observed})
    for text in alone.written[:_SHOWN]:
        output.line(console, f"    | {text}", style="dim")
    if len(alone.written) > _SHOWN:
        output.line(console, f"    | ... {len(alone.written) - _SHOWN} more", style="dim")
    output.line(console, f"  => {alone.verdict}", style="bold")

    output.line(console)
    output.heading(console, "2. GPUSession")
    output.line(console, "  ortgpu.GPUSession(model)")
    if not check.main([], standalone_mode=False):
        return 0
    output.line(console)
    if alone.got_gpu:
        output.line(console, "Plain ONNX Runtime reached the GPU, so this refusal is wrong.", style="bold red")
        return 1
    output.line(console, "Raised instead of running on the CPU unnoticed.", style="bold")
    return 0


def example_model() -> bytes:
    """Return a model for the user's own programs: one Relu, with any number of rows."""
    text = '<ir_version: 8, opset_import: ["": 17]> relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
    return bytes(onnx.parser.parse_model(text).SerializeToString())


@dataclass(frozen=True, slots=True)
class PlainResult:
    """The observation of plain ONNX Runtime: facts by name, and the lines on stdout and stderr."""

    observed: Mapping[str, str]
    written: tuple[str, ...]

    @property
    def got_gpu(self) -> bool:
        return "run()" in self.observed and self.observed["bound"].startswith(CUDA)

    @property
    def verdict(self) -> str:
        if self.got_gpu:
            return "on the GPU"
        if "run()" in self.observed:
            return "CUDA was asked for, the model runs on the CPU, and no exception says so"
        return "no result" if "bound" in self.observed else "no session"


def observe(*, timeout: float) -> PlainResult:
    """Create an ``InferenceSession`` that asks for CUDA first and run it once, as most programs do."""
    child = run_python(_PROGRAM, RELU.hex(), timeout=timeout, environ=environ_of_child(), together=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", child.output)  # ONNX Runtime's log has colours even without a terminal.
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    observed = [line for line in lines if line.startswith(_MARK)]
    facts: dict[str, str] = json.loads(observed[-1].removeprefix(_MARK)) if observed else {}
    if child.returncode is None:
        facts["process"] = f"did not end within {timeout:.0f} s" if child.timed_out else child.errors
    elif (cause := cause_of_death(child.returncode)) is not None:
        facts["process"] = f"died of {cause}"
    return PlainResult(facts, tuple(line for line in lines if line not in observed))
