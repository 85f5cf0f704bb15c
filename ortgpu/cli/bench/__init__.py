"""``ortgpu bench``: measure the speed of a model on this machine, in each way of running it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortgpu.cli import output
from ortgpu.cli.model import inputs_option, known_of
from ortgpu.errors import GPUError

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu.cli.bench.measuring import Bench, Feed, Figure, LeftOut, Spread
    from ortgpu.provider.devices import Device

PLOTS = (".png", ".svg", ".html")
_DEFAULT_BATCHES = (1, 8, 64)


def parse_batches(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Return the sizes of an option --batch. Raises click.BadParameter."""
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise click.BadParameter(f"{text!r} is no list of positive whole numbers, such as 1,8,64")
    return tuple(dict.fromkeys(sizes))


def check_plot(_ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the file of an option --plot. Raises click.BadParameter for other endings, and without matplotlib."""
    if path is None:
        return None
    if path.suffix.lower() not in PLOTS:
        raise click.BadParameter(f"{path.name!r} ends in none of {', '.join(PLOTS)}")
    try:
        importlib.import_module("ortgpu.cli.bench.plot")
    except ImportError as error:
        raise click.BadParameter(f"a plot needs matplotlib ({error}): pip install 'ortgpu[bench]'") from None
    return path


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--batch", "batches", metavar="N,N,...", callback=parse_batches, help="Batch sizes.  [default: 1,8,64]")
@click.option(
    "--rounds", type=click.IntRange(min=5), default=10, show_default=True, help="Blocks of calls for each way."
)
@inputs_option
@click.option("--allow-cpu", is_flag=True, help="If no GPU can be used, measure on the CPU, and say so.")
@click.option(
    "--plot",
    metavar="FILE",
    type=output.FileToWrite(),
    callback=check_plot,
    help=f"Draw the figures into a file ({', '.join(PLOTS)}); needs the extra 'bench'.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document, also when there is a problem.")
def bench(
    model: Path,
    batches: tuple[int, ...] | None,
    rounds: int,
    inputs: Path | None,
    allow_cpu: bool,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure MODEL on this machine: plain ONNX Runtime and the ways of ortgpu, in turns, in one process.

    Each way is run in blocks of calls, one block of each way a round, on inputs made up from what the model declares
    (free dimensions but the batch are 1), or on those of --inputs, which are one batch. Times plain is items a second
    by those of plain ONNX Runtime, both medians: more is better, in the plot too. Settings are recommended where the
    difference is larger than the spread. `ortgpu tune` tries what is left: layouts of images, searches and more.

    \b
    plain   onnxruntime.InferenceSession.run
    run     GPUSession.run
    map     GPUSession.map: several requests at work, pinned memory
    graph   GPUSession(cuda_graph=True).run
    pool    GPUSessionPool.map: all GPUs

    Exit code 0: measured, with one batch size at least. 1: the model cannot be opened on the GPU, or runs with none. 2:
    wrong usage, for instance a batch size for a model whose batch dimension is fixed.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", "model", and "error" or:
      "device", "on_cpu_because", "rounds", "warnings", "figures", "left_out",
      "recommended"
    A "batch" of null is a fixed one. In "left_out" it means all of them.
    """
    from ortgpu.cli import report

    try:
        with report.quiet() as caught:
            found = _measure(model, batches, inputs, rounds, allow_cpu)
    except click.UsageError:
        raise
    except _InputsRefusedError as refused:
        return output.show_problem(refused.error, (GPUError(str(refused)),), as_json, model=str(model))
    except Exception as error:  # noqa: BLE001 - an invalid model: ONNX Runtime raises many classes
        return output.show_problem(error, known_of(model, error), as_json, model=str(model))
    on_cpu_because, warned = report.split_warnings(caught)
    if as_json:
        document = output.document(
            ok=True,
            model=str(model),
            device=report.device_document(found.device),
            on_cpu_because=output.error_document(on_cpu_because) if on_cpu_because else None,
            rounds=rounds,
            warnings=warned,
            **found.as_dict(),
        )
        output.write_json(document)
        found.draw(model.name, plot)
        return 0
    console = output.stdout()
    report.show_warnings(console, warned)
    if on_cpu_because:
        output.show_why_on_cpu(console, on_cpu_because, "Measured", by_option=allow_cpu)
    found.show(console, str(model))
    found.draw(model.name, plot)
    if plot is not None:
        output.line(console, f"Written: {plot}")
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Results:
    device: Device
    figures: list[Figure]
    left_out: list[LeftOut]
    recommended: list[str]

    @property
    def where(self) -> str:
        return str(self.device) if self.device.is_gpu else "the CPU"

    def as_dict(self) -> dict[str, object]:
        return {
            "figures": [_document(figure) for figure in self.figures],
            "left_out": [dataclasses.asdict(each) for each in self.left_out],
            "recommended": self.recommended,
        }

    def draw(self, model: str, path: Path | None) -> None:
        """Draw the figures. Call it after writing them, since a full disk must not lose them."""
        if path is not None:
            from ortgpu.cli.bench.plot import draw

            draw(self.figures, f"{model} on {self.where}", path)

    def show(self, console: Console, model: str) -> None:
        output.heading(console, f"{model} on {self.where}")
        columns = ("batch", "way", "items/s", "times plain", "quartiles", "p50 ms", "p90 ms", "p99 ms")
        output.table(console, columns, map(_row, self.figures))
        for (batch, why), alike in itertools.groupby(self.left_out, lambda each: (each.batch, each.why)):
            ways = ", ".join(each.way for each in alike)
            where = f", batch {batch}" if batch is not None else ""
            output.line(console, f"not measured: {ways}{where}: {why}", style="yellow")
        if self.recommended:
            output.heading(console, "What these figures speak for")
        for sentence in self.recommended:
            output.line(console, f"  {sentence}")


class _InputsRefusedError(Exception):
    def __init__(self, text: str, error: Exception) -> None:
        super().__init__(text)
        self.error = error


def _measure(
    model: Path, batches: tuple[int, ...] | None, inputs: Path | None, rounds: int, allow_cpu: bool
) -> _Results:
    from ortgpu.cli.bench.measuring import Bench, recommend
    from ortgpu.cli.inputs import refusal

    with contextlib.ExitStack() as stack:
        with output.progress("Opening the model in each way"):
            opened = stack.enter_context(Bench(str(model), allow_cpu=allow_cpu or None))
        feeds = _feeds(opened, batches, inputs)
        figures: list[Figure] = []
        with output.progress("Measuring"):
            refused: Exception | None = None
            for batch, feed in feeds.items():
                try:
                    figures += opened.measure(batch, feed, rounds)
                except Exception as error:  # noqa: BLE001 - a model may run one size only, a GPU have memory for some
                    opened.leave_out(batch, error)
                    refused = refused or error
            if refused is not None and not figures:
                if isinstance(refused, GPUError):
                    raise refused
                raise _InputsRefusedError(refusal(inputs), refused) from refused
        return _Results(opened.session.device, figures, opened.left_out, recommend(figures))


def _feeds(opened: Bench, batches: tuple[int, ...] | None, inputs: Path | None) -> dict[int | None, Feed]:
    from ortgpu.cli.inputs import UnknownInputError, batch_dimension, make_inputs, read_inputs

    declared: list[Any] = opened.session.get_inputs()
    if inputs is not None:
        if batches is not None:
            raise click.UsageError("--inputs is one batch: leave --batch out")
        return {None: read_inputs(inputs, declared)}
    is_fixed = batch_dimension(declared) is None
    if is_fixed and batches is not None:
        shapes = ", ".join(f"{each.name} {each.shape}" for each in declared) or "it has no inputs"
        raise click.UsageError(f"MODEL has no free batch dimension ({shapes}): leave --batch out")
    feeds: dict[int | None, Feed] = {}
    refused: UnknownInputError | None = None
    for size in (None,) if is_fixed else batches or _DEFAULT_BATCHES:
        try:
            feeds[size] = make_inputs(declared, size or 1)
        except UnknownInputError as error:
            opened.leave_out(size, error)
            refused = refused or error
    if not feeds:
        raise click.UsageError(f"MODEL cannot be measured: {refused}")
    return feeds


def _row(figure: Figure) -> tuple[str, ...]:
    latency = figure.latency
    percentiles = (latency.p50, latency.p90, latency.p99) if latency else (None, None, None)
    ratio = figure.ratio
    return (
        "fixed" if figure.batch is None else str(figure.batch),
        figure.way,
        _rate(figure.rate.median),
        f"{ratio.median:.2f}" if ratio else "",
        f"{ratio.low:.2f} - {ratio.high:.2f}" if ratio else "",
        *("" if each is None else f"{each * 1e3:.3f}" for each in percentiles),
    )


def _rate(items: float) -> str:
    return f"{items:,.0f}" if items >= 99.5 else f"{items:.3g}"  # a large model may do less than one a second


def _document(figure: Figure) -> dict[str, object]:
    return {
        "way": figure.way,
        "batch": figure.batch,
        "items_per_second": _spread(figure.rate),
        "ratio_to_plain": _spread(figure.ratio) if figure.ratio else None,
        "latency_ms": figure.latency.as_dict() if figure.latency else None,
    }


def _spread(spread: Spread) -> dict[str, object]:
    return {"median": spread.median, "quartiles": [spread.low, spread.high]}
