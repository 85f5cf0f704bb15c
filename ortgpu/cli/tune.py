"""``ortgpu tune``: find the fastest settings of a model on this GPU, and keep them for later sessions."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import Progress

from ortgpu.cli import output, report, signals
from ortgpu.cli.batches import parse_batches
from ortgpu.cli.bench import plot_option
from ortgpu.cli.inputs import read_inputs
from ortgpu.errors import GPUError
from ortgpu.process.late import late
from ortgpu.provider.settings import described
from ortgpu.session.tune import tune as search

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu.cli.figures import plot as pictures
    from ortgpu.provider.records import Choice
    from ortgpu.session.tuning.children import Objective, Precision, Trial, Tuning
else:
    pictures = late("ortgpu.cli.figures.plot")


@click.command()
@click.argument("model", type=output.MODEL_FILE)
@click.option("--device", metavar="D", help='Which GPU: an index, "cuda:1" or a UUID.')
@click.option("--batch", "batches", metavar="N,N,...", callback=parse_batches, help="Batch sizes.  [default: 1, or 32]")
@output.inputs_option
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput"]),
    default="latency",
    show_default=True,
    help="Single runs with data on the GPU, by default of 1 item; or four at a time, of 32 items.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16"]),
    default="fp32",
    show_default=True,
    help="fp16: also try float16 inside, with inputs and outputs as they are.",
)
@click.option("--budget", type=click.IntRange(min=1), default=60, show_default=True, help="Seconds to try settings.")
@click.option("--record", metavar="FILE", type=output.FileToWrite(), help="Write the record here, not to the cache.")
@plot_option
@output.json_option
def tune(
    model: Path,
    device: str | None,
    batches: tuple[int, ...] | None,
    inputs: Path | None,
    objective: Objective,
    precision: str,
    budget: int,
    record: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure which settings are fastest for MODEL on this GPU, and keep them for later sessions.

    Tries layouts of images, searches for convolutions, CUDA graphs, fixed shapes and more in a child process. Each
    candidate and plain ONNX Runtime run alternately. Every result is compared with the CPU's in float32. A later
    session of the same MODEL on the same kind of GPU applies only settings that leave inputs, outputs, errors and
    precision unchanged. With GPUSession(model, tuned=RECORD) it applies the other settings as well.

    Exit code 0: measured. 1: the model cannot be opened or run on the GPU. 2: wrong usage.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", "model", and "error" or:
      "device", "automatic", "named", "record", "no_record", "compared_with",
      "trials", "left_out", "shapes", "seconds"
    A "ratio" is the time divided by the time of plain ONNX Runtime.
    """
    if inputs is not None and batches is not None:
        raise click.UsageError("--inputs is one batch: leave --batch out")
    feeds = [read_inputs(inputs)] if inputs is not None else None
    float_type: Precision = "float16" if precision == "fp16" else "float32"
    bar = Progress(console=output.stderr(), transient=True, disable=not sys.stderr.isatty())
    task, started = bar.add_task("Opening the model", total=budget), time.monotonic()

    def show(trial: Trial) -> None:
        text = f"{described(trial.settings)}: {_speed_up(trial) or 'rejected'}"
        bar.update(task, completed=time.monotonic() - started, description=text)

    try:
        with report.quiet(), signals.raise_on_signals(), bar:
            tuning = search(
                model,
                device=device,
                feeds=feeds,
                batches=batches,
                objective=objective,
                precision=float_type,
                budget=budget,
                record=record,
                on_trial=show,
            )
    except Exception as error:  # noqa: BLE001 - an invalid model: ONNX Runtime raises many classes
        may_be_unfit = inputs is None and not isinstance(error, OSError)  # An OSError may be a timeout.
        also = (GPUError("if the model cannot run on made-up inputs, pass real ones with --inputs FILE"),)
        return output.show_problem(error, as_json, model=model, also=also if may_be_unfit else ())
    if as_json:
        output.write_json(output.document(ok=True, model=str(model), **tuning.as_dict()))
    else:
        _show(output.stdout(), str(model), tuning)
    if plot is not None:
        pictures.draw_trials(tuning.trials, f"{model.name} on {tuning.device}", plot)
        if not as_json:
            output.line(output.stdout(), f"Written: {plot}")
    return 0


def _show(console: Console, model: str, found: Tuning) -> None:
    output.heading(console, f"{model} on {found.device}")
    output.table(console, ("settings", "ms", "speed-up", "error", "verdict"), map(_row, found.trials))
    for text in found.left_out:
        output.line(console, f"not tried: {text}", style="yellow")
    output.line(console, f"Results were compared with {found.compared_with}.")
    best, all_of = found.automatic, found.named
    nothing_faster = "; nothing tried was faster" if not (best.settings or all_of.settings) else ""
    output.heading(console, f"Sessions will use {_settings(best)}{nothing_faster}")
    if all_of.settings != best.settings:
        output.heading(console, f"With tuned=RECORD they will use {_settings(all_of)}")
    output.line(console, f"Record: {found.record or f'none was written: {found.no_record}'}")


def _settings(choice: Choice) -> str:
    return described(choice.settings) + (f" (speed-up {1 / choice.ratio:.2f})" if choice.settings else "")


def _row(trial: Trial) -> tuple[str, ...]:
    times = ", ".join(f"{seconds * 1e3:.3f}" for seconds in trial.seconds)
    error = "" if trial.error is None else f"{trial.error:.1e}"
    return described(trial.settings), times, _speed_up(trial), error, trial.verdict


def _speed_up(trial: Trial) -> str:
    return f"{1 / trial.ratio:.2f}" if trial.ratio else ""
