"""``ortgpu bench``: measure the speed of a model on this machine, in each way of running it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortgpu.cli import output, report, shape_times
from ortgpu.cli.batches import parse_batches
from ortgpu.cli.figures.measuring import RUN, Bench, LeftOut, recommend
from ortgpu.cli.inputs import read_inputs, refusal
from ortgpu.environment.packages.installer import install_extra
from ortgpu.errors import GPUError
from ortgpu.process.late import late
from ortgpu.session.tuning.children import first_line

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu.cli.figures import plot as pictures
    from ortgpu.cli.figures.measuring import Feed, Figure
    from ortgpu.provider.devices import Device
    from ortgpu.running import made_inputs
else:
    pictures = late("ortgpu.cli.figures.plot")
    made_inputs = late("ortgpu.running.made_inputs")

PLOTS = (".png", ".svg")
_DEFAULT_BATCHES = (1, 8, 64)


def check_plot(_ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the file of an option --plot. Raises click.BadParameter for other endings, and without matplotlib."""
    if path is None:
        return None
    if path.suffix.lower() not in PLOTS:
        raise click.BadParameter(f"{path.name!r} ends in none of {', '.join(PLOTS)}")
    try:
        importlib.import_module("ortgpu.cli.figures.plot")
    except ImportError as error:
        raise click.BadParameter(f"a plot needs matplotlib ({error}): {install_extra('bench')}") from None
    return path


plot_option = click.option(
    "--plot",
    metavar="FILE",
    type=output.FileToWrite(),
    callback=check_plot,
    help=f"Draw the figures into a file ({', '.join(PLOTS)}); needs the extra 'bench'.",
)


@click.command()
@click.argument("model", type=output.MODEL_FILE)
@click.option("--batch", "batches", metavar="N,N,...", callback=parse_batches, help="Batch sizes.  [default: 1,8,64]")
@click.option(
    "--rounds", type=click.IntRange(min=5), default=10, show_default=True, help="Blocks of calls for each way."
)
@output.inputs_option
@click.option("--allow-cpu", is_flag=True, help="If no GPU can be used, measure on the CPU, and say so.")
@plot_option
@output.json_option
def bench(
    model: Path,
    batches: tuple[int, ...] | None,
    rounds: int,
    inputs: Path | None,
    allow_cpu: bool,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure the speed of MODEL on this machine, with plain ONNX Runtime and with ortgpu.

    All ways run in one process, alternately: a block of calls of each way in every round. The inputs are made up (free
    dimensions other than the batch are 1), or come from --inputs as one batch. Speed-up is the median of items per
    second, divided by plain ONNX Runtime's: above 1, ortgpu is faster, in the plot too. Settings are recommended if
    the difference is larger than the spread. With several batches it also shows the cost of a change of batch and the
    gain by plans, as `ortgpu check --shapes` does. `ortgpu tune` tries further settings: layouts of images, searches
    and more.

    \b
    plain   onnxruntime.InferenceSession.run
    run     GPUSession.run
    map     GPUSession.map: several requests at work, pinned memory
    graph   GPUSession(cuda_graph=True).run
    pool    GPUSessionPool.map: all GPUs

    Exit code 0: measured, with one batch size at least. 1: the model cannot be opened on the GPU, or runs with no batch
    size. 2: wrong usage, for instance a batch size for a model with a fixed batch dimension.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", "model", and "error" or:
      "device", "on_cpu_because", "rounds", "warnings", "figures", "left_out",
      "recommended", "shapes"
    A "batch" of null means a fixed batch. In "left_out" it means all batches.
    """
    try:
        with report.quiet() as caught, contextlib.ExitStack() as stack:
            with output.progress("Opening the model in each way"):
                opened = Bench(str(model), stack, allow_cpu=allow_cpu or None)
            feeds = _feeds(opened, batches, inputs)
            with output.progress("Measuring"):
                figures = [figure for batch, feed in feeds.items() for figure in opened.measure(batch, feed, rounds)]
                times = _times_of_shapes(opened, figures)
    except click.UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an invalid model: ONNX Runtime raises many classes
        return output.show_problem(error, as_json, model=model)
    if opened.error is not None and not figures:
        return output.show_problem(opened.error, as_json, model=model, also=(GPUError(refusal(inputs)),))
    device, recommended = opened.session.device, recommend(figures)
    on_cpu_because, warned = report.split_warnings(caught)
    if as_json:
        output.write_json(
            output.document(
                ok=True,
                model=str(model),
                device=report.device_document(device),
                on_cpu_because=output.error_document(on_cpu_because) if on_cpu_because else None,
                rounds=rounds,
                warnings=warned,
                figures=[figure.document() for figure in figures],
                left_out=[dataclasses.asdict(way) for way in opened.left_out],
                recommended=recommended,
                shapes=[dataclasses.asdict(shape) for shape in times],
            )
        )
    else:
        console = output.stdout()
        report.show_warnings(console, warned)
        if on_cpu_because:
            output.show_error(console, on_cpu_because)
        output.heading(console, f"{model} on {_place(device)}")
        _show(console, figures, opened.left_out, recommended)
        if times:
            shape_times.show(console, times)
        if on_cpu_because:
            output.show_that_on_cpu(console, f"{model} was measured", by_option=allow_cpu)
    if plot is not None:  # The plot comes after the figures, since a full disk must not lose them.
        pictures.draw(figures, f"{model.name} on {_place(device)}", plot)
        if not as_json:
            output.line(output.stdout(), f"Written: {plot}")
    return 0


def _place(device: Device) -> str:
    return str(device) if device.is_gpu else "the CPU"


def _show(console: Console, figures: list[Figure], left_out: list[LeftOut], recommended: list[str]) -> None:
    columns = ("batch", "way", "items/s", "speed-up", "quartiles", "p50 ms", "p90 ms", "p99 ms")
    output.table(console, columns, map(_row, figures))
    for (batch, why), alike in itertools.groupby(left_out, lambda each: (each.batch, each.why)):
        ways = ", ".join(entry.way for entry in alike)
        where = f", batch {batch}" if batch is not None else ""
        output.line(console, f"not measured: {ways}{where}: {why}", style="yellow")
    if recommended:
        output.heading(console, "Recommended settings")
    for sentence in recommended:
        output.line(console, f"  {sentence}")


def _times_of_shapes(opened: Bench, figures: list[Figure]) -> list[shape_times.ShapeTimes]:
    """Return the cost of a change between the measured batches. With one batch the list is empty."""
    sizes = [figure.batch for figure in figures if figure.way == RUN and figure.batch is not None]
    try:
        return shape_times.measure(opened.session, sizes) if len(sizes) > 1 else []
    except Exception as error:  # noqa: BLE001 - the figures are shown without it
        opened.left_out.append(LeftOut("shapes", None, first_line(error)))
        return []


def _feeds(opened: Bench, batches: tuple[int, ...] | None, inputs: Path | None) -> dict[int | None, Feed]:
    declared: list[Any] = opened.session.get_inputs()
    if inputs is not None:
        if batches is not None:
            raise click.UsageError("--inputs is one batch: leave --batch out")
        return {None: read_inputs(inputs, declared)}
    is_fixed = made_inputs.batch_dimension(declared) is None
    if is_fixed and batches is not None:
        shapes = ", ".join(f"{entry.name} {entry.shape}" for entry in declared) or "it has no inputs"
        raise click.UsageError(f"MODEL has no free batch dimension ({shapes}): leave --batch out")
    feeds: dict[int | None, Feed] = {}
    for size in (None,) if is_fixed else batches or _DEFAULT_BATCHES:
        try:
            feeds[size] = made_inputs.make_inputs(declared, size or 1)
        except made_inputs.UnknownInputError as error:
            opened.leave_out(size, error)
    return feeds


def _row(figure: Figure) -> tuple[str, ...]:
    latency, ratio, rate = figure.latency or {}, figure.ratio, figure.rate.median
    return (
        "fixed" if figure.batch is None else str(figure.batch),
        figure.way,
        f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}",  # A large model may do less than one item a second.
        f"{ratio.median:.2f}" if ratio else "",
        f"{ratio.low:.2f} - {ratio.high:.2f}" if ratio else "",
        *("" if (time := latency.get(name)) is None else f"{time:.3f}" for name in ("p50", "p90", "p99")),
    )
