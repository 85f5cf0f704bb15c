"""``ortgpu demo``: run plain ONNX Runtime and then a GPUSession on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ortgpu.cli import output, signals
from ortgpu.errors import GPUError

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu.cli.plain import PlainResult
    from ortgpu.cli.report import SessionReport

_TOLERANCE = 2e-2  # relative to the largest output: TF32, which CUDA uses by default here, keeps 10 bits of a product
_SHOWN = 8  # lines of what ONNX Runtime writes


@click.command()
@click.option("--timeout", type=click.IntRange(min=1), default=120, show_default=True, help="Seconds for 1.")
def demo(timeout: float) -> int:
    """Show what plain ONNX Runtime does on this machine, and what a GPUSession does.

    1. An ordinary program, in a child process: an InferenceSession that asks for CUDA before the CPU.

    2. The same model in a GPUSession, which proves that it is on the GPU, with the results of the CPU, or raises.

    Exit code 0: the GPUSession did one of the two, or opened on the CPU because ORTGPU_ALLOW_CPU is set. 1: ONNX
    Runtime alone reached the GPU and the GPUSession did not, or the results differ.
    """
    from ortgpu.cli import plain
    from ortgpu.cli.model import BATCH, LAYERS, example_model

    console = output.stdout()
    model = example_model()

    output.heading(console, "1. Plain ONNX Runtime")
    output.line(console, f"  onnxruntime.InferenceSession(model, providers={list(plain.REQUEST)})")
    try:
        with signals.as_exceptions():
            alone = plain.observe(model, BATCH, LAYERS[0], timeout=timeout)
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
    """Open the model and compare its outputs with those of the CPU.

    Returns the report of the session, the largest difference relative to the largest output, and the error for which
    ORTGPU_ALLOW_CPU let the session onto the CPU, or None.
    """
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.cli import report
    from ortgpu.cli.model import BATCH, LAYERS

    feeds = {"input": np.random.default_rng(1).standard_normal((BATCH, LAYERS[0]), dtype=np.float32)}
    with report.quiet() as caught, GPUSession(model) as session:
        found = report.read(session, feeds, runs=100)
        (on_gpu,) = session.run(None, feeds)
        import onnxruntime  # after the session, which loads its libraries first

        (on_cpu,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    on_cpu_because, _ = report.split_warnings(caught)
    return found, float(np.max(np.abs(on_gpu - on_cpu)) / np.max(np.abs(on_cpu))), on_cpu_because
