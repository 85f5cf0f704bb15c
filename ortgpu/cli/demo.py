"""``ortgpu demo``: run plain ONNX Runtime and then a GPUSession on this machine."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortgpu.cli import output, signals
from ortgpu.cli.model import BATCH, LAYERS, example_model
from ortgpu.environment.child import cause_of_death, run_python
from ortgpu.errors import GPUError
from ortgpu.model.files import write_temporary
from ortgpu.provider.requests import CPU, CUDA

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu.cli.report import SessionReport

_TOLERANCE = 2e-2  # relative to the largest output: TF32, which CUDA uses by default here, keeps 10 bits of a product
_SHOWN = 8  # lines of what ONNX Runtime writes

_REQUEST = (CUDA, CPU)

# The usual program. It reports through a file, because what ONNX Runtime writes to stdout and stderr is observed too.
_PROGRAM = """\
import json
from pathlib import Path

model, batch, width, providers, result = json.loads(sys.argv[1])
observed = {}
try:
    import numpy, onnxruntime
    observed["version"] = onnxruntime.__version__
    session = onnxruntime.InferenceSession(model, providers=providers)
    observed["bound"] = session.get_providers()
    observed["outputs"] = len(session.run(None, {"input": numpy.ones((batch, width), numpy.float32)}))
except Exception as error:
    observed["raised"] = f"{type(error).__name__}: {error}"
Path(result).write_text(json.dumps(observed))
"""


@click.command()
@click.option("--timeout", type=click.IntRange(min=1), default=120, show_default=True, help="Seconds for 1.")
def demo(timeout: float) -> int:
    """Show what plain ONNX Runtime does on this machine, and what a GPUSession does.

    1. An ordinary program, in a child process: an InferenceSession that asks for CUDA before the CPU.

    2. The same model in a GPUSession, which proves that it is on the GPU, with the results of the CPU, or raises.

    Exit code 0: the GPUSession did one of the two, or opened on the CPU because ORTGPU_ALLOW_CPU is set. 1: ONNX
    Runtime alone reached the GPU and the GPUSession did not, or the results differ.
    """
    console = output.stdout()
    model = example_model()

    output.heading(console, "1. Plain ONNX Runtime")
    output.line(console, f"  onnxruntime.InferenceSession(model, providers={list(_REQUEST)})")
    try:
        with signals.as_exceptions():
            alone = observe(model, BATCH, LAYERS[0], timeout=timeout)
    except GPUError:  # some are OSErrors too
        raise
    except OSError as error:  # no folder, or one without room for it
        raise click.ClickException(f"a folder for the model is needed, such as TMPDIR can name: {error}") from None
    _show_plain(console, alone)

    output.line(console)
    output.heading(console, "2. GPUSession")
    output.line(console, "  ortgpu.GPUSession(model)")
    try:
        found, difference, on_cpu_because = _open_and_compare(model)
    except GPUError as error:
        output.line(console)
        output.show_error(console, error)
        output.line(console)
        if alone.got_gpu:
            output.line(console, "Plain ONNX Runtime reached the GPU, so this refusal is wrong.", style="bold red")
            return 1
        output.line(console, "Raised instead of running on the CPU unnoticed.", style="bold")
        return 0
    if on_cpu_because is not None:
        output.line(console)
        output.show_why_on_cpu(console, on_cpu_because, "Opened", by_option=False)
        found.show(console)
        return int(alone.got_gpu)
    found.show(console, options=False)
    output.line(console, f"Largest difference from the CPU's results: {difference:.1e} of the largest output")
    if not difference <= _TOLERANCE:  # written so that NaN fails
        output.line(console, "The GPU computes something else than the CPU.", style="bold red")
        return 1
    output.line(console, "On the GPU, verified.", style="bold green")
    return 0


@dataclass(frozen=True, slots=True)
class PlainResult:
    """The observation of plain ONNX Runtime. A field is None if the program did not get that far."""

    version: str | None
    bound: tuple[str, ...] | None  # session.get_providers()
    ran: bool  # run() returned a result
    raised: str | None
    ended: str | None  # the signal or deadline that ended the process, if any
    written: tuple[str, ...]  # lines on stdout and stderr

    @property
    def got_gpu(self) -> bool:
        return self.bound is not None and self.bound[:1] == _REQUEST[:1]


def observe(model: bytes, batch: int, width: int, *, timeout: float) -> PlainResult:
    """Create an ``InferenceSession`` that asks for CUDA first and run it once, as most programs do."""
    with tempfile.TemporaryDirectory(prefix="ortgpu-demo-") as folder:
        path, result = (Path(folder) / name for name in ("model.onnx", "result.json"))
        write_temporary(path, model)
        request = json.dumps([str(path), batch, width, _REQUEST, str(result)])
        environ = {name: value for name, value in os.environ.items() if name != "ORTGPU_ENFORCE"}
        ended = None
        child = run_python(_PROGRAM, request, timeout=timeout, environ=environ, together=True)
        if child.returncode is None:
            ended = f"did not end within {timeout:.0f} s" if child.timed_out else child.errors
        elif (cause := cause_of_death(child.returncode)) is not None:
            ended = f"died of {cause}"
        observed = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    text = re.sub(r"\x1b\[[0-9;]*m", "", child.output)  # ONNX Runtime's log has colours even without a terminal
    return PlainResult(
        version=observed.get("version"),
        bound=tuple(observed["bound"]) if "bound" in observed else None,
        ran="outputs" in observed,
        raised=observed.get("raised"),
        ended=ended,
        written=tuple(line.rstrip() for line in text.splitlines() if line.strip()),
    )


def _show_plain(console: Console, result: PlainResult) -> None:
    facts: dict[str, object] = {"version": result.version or "unknown"}
    if result.bound is not None:
        facts["bound"] = ", ".join(result.bound)
    facts["raised"] = result.raised or "nothing"
    if result.ended:
        facts["process"] = result.ended
    facts["run()"] = "returned a result" if result.ran else "was not reached"
    facts["written"] = f"{len(result.written)} lines" if result.written else "nothing"
    output.facts(console, facts)
    for text in result.written[:_SHOWN]:
        output.line(console, f"    | {text}", style="dim")
    if len(result.written) > _SHOWN:
        output.line(console, f"    | ... {len(result.written) - _SHOWN} more", style="dim")
    output.line(console, f"  => {_verdict(result)}", style="bold")


def _verdict(result: PlainResult) -> str:
    if result.got_gpu:
        return "on the GPU"
    if result.ran:
        return "CUDA was asked for, the model runs on the CPU, and no exception says so"
    if result.bound is not None:
        return "no result"
    return "no session"


def _open_and_compare(model: bytes) -> tuple[SessionReport, float, GPUError | None]:
    """Return the report, the largest difference from the CPU's results, and why it runs on the CPU, or None."""
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.cli import report

    feeds = {"input": np.random.default_rng(1).standard_normal((BATCH, LAYERS[0]), dtype=np.float32)}
    with report.quiet() as caught, GPUSession(model) as session:
        found = report.read(session, feeds, runs=100)
        (on_gpu,) = session.run(None, feeds)
        import onnxruntime  # after the session, which loads its libraries first

        (on_cpu,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    on_cpu_because, _ = report.split_warnings(caught)
    return found, float(np.max(np.abs(on_gpu - on_cpu)) / np.max(np.abs(on_cpu))), on_cpu_because
