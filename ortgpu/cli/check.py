"""``ortgpu check``: open a model on the GPU and prove that it runs there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

import ortgpu
from ortgpu.cli import output, report, shape_times, signals
from ortgpu.cli.batches import parse_batches
from ortgpu.cli.bench import plot_option
from ortgpu.cli.inputs import read_inputs, refusal
from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.process.late import late

if TYPE_CHECKING:
    from ortgpu.cli import divergence
    from ortgpu.cli.figures import plot as pictures
    from ortgpu.running import made_inputs
    from ortgpu.session import placement_details
else:
    placement_details = late("ortgpu.session.placement_details")
    pictures = late("ortgpu.cli.figures.plot")
    made_inputs = late("ortgpu.running.made_inputs")
    divergence = late("ortgpu.cli.divergence")


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1, type=output.MODEL_FILE)
@click.option("--device", metavar="D", help='Which GPU: an index, "cuda:1", a UUID, or "auto" (most free memory).')
@click.option(
    "--cpu-nodes",
    type=click.Choice(["allow", "warn", "forbid"]),
    default="warn",
    show_default=True,
    help="What to do about nodes that compute on the CPU.",
)
@click.option("--allow-cpu", is_flag=True, help="If no GPU can be used, open the model on the CPU, and say so.")
@click.option("--runs", type=click.IntRange(min=0), default=10, show_default=True, help="Timed runs; 0: none at all.")
@output.inputs_option
@click.option("--placement", is_flag=True, help="Also why nodes are not on the GPU, and the copies; opens MODEL again.")
@click.option("--compare", type=click.Choice(["cpu"]), help="Compare the results with the CPU's in float32.")
@click.option(
    "--shapes",
    metavar="N,N,...",
    callback=parse_batches,
    help="Batch sizes: what a change of shape costs, and what plans for several shapes gain.",
)
@click.option(
    "--fit",
    metavar="[N,N,...]",
    is_flag=False,
    flag_value="1,8,32",
    callback=parse_batches,
    help="Only measure the GPU memory that batches take (1,8,32), and which fit; also whether several models do. "
    "--plot draws it.",
)
@plot_option
@click.option("--verbose", is_flag=True, help="Also show the options bound to the CUDA provider.")
@output.json_option
def check(
    models: tuple[Path, ...],
    device: str | None,
    cpu_nodes: Literal["allow", "warn", "forbid"],
    allow_cpu: bool,
    runs: int,
    inputs: Path | None,
    placement: bool,
    compare: str | None,
    shapes: tuple[int, ...] | None,
    fit: tuple[int, ...] | None,
    plot: Path | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Open MODEL on the GPU and prove that it runs there.

    Without MODEL, a built-in model with a single node is used. Shows the device, the placement of every node, the GPU
    memory of the process, and the time of a few runs. The inputs are made up (free dimensions are 1) or come from
    --inputs. The last line is the verdict.

    Exit code 0: the model is open on the GPU, or on the CPU with --allow-cpu or ORTGPU_ALLOW_CPU=1. 1: it is not, or
    it does not run on the inputs of --inputs, or --compare finds wrong results or none. The reason is printed. With
    --fit, 1: no batch of a model fits, or the models do not fit together. 2: wrong usage, for instance no such file.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", "model", and "error" or:
      "device", "providers", "provider_options", "placement",
      "gpu_memory" (bytes), "latency_ms", "latency_error", "tuned", "warnings",
      "on_cpu_because" and, with --placement, "placement_details",
      with --compare "compared" and "compared_with"; with --shapes "shapes";
      with --fit "fit" alone, and "model" is a list for several models
    null means unknown.
    """
    if fit is not None:
        return _show_fit(models, fit, device, inputs, plot, allow_cpu=allow_cpu, as_json=as_json)
    if plot is not None or len(models) > 1:
        raise click.UsageError(f"{'--plot' if plot is not None else 'more than one MODEL'} needs --fit")
    model = models[0] if models else None
    name = str(model) if model else None
    source = name or RELU
    feeds, reason, compared, compared_with, details = None, None, None, None, None
    times: list[shape_times.ShapeTimes] = []
    try:
        with report.quiet() as caught:
            with ortgpu.GPUSession(source, device=device, cpu_nodes=cpu_nodes, allow_cpu=allow_cpu or None) as session:
                declared = session.get_inputs()
                try:
                    if runs > 0 or compare:
                        feeds = made_inputs.make_inputs(declared) if inputs is None else read_inputs(inputs, declared)
                except made_inputs.UnknownInputError as error:
                    reason = str(error)
                session_report = report.read(session, feeds if runs > 0 else None, runs, reason, refusal(inputs))
                try:
                    times = shape_times.measure(session, shapes) if shapes is not None else []
                except made_inputs.UnknownInputError as error:
                    raise click.UsageError(f"--shapes: {error}") from error
                if compare and feeds is not None and session_report.latency_error is None:
                    compared, compared_with = divergence.compare_with_cpu(session, source, feeds)
            if placement and session_report.device.is_gpu:
                doing = "Opening the model once more, to see why its nodes are where they are"
                with output.progress(doing), signals.raise_on_signals():
                    details = placement_details.explain_placement(source, device=device)
    except click.UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an invalid model: ONNX Runtime raises many classes
        if not as_json:
            report.show_warnings(output.stdout(), report.split_warnings(caught)[1])
        return output.show_problem(error, as_json, model=model)
    on_cpu_because, warned = report.split_warnings(caught)
    # A failure on made-up inputs proves nothing, but it leaves nothing to compare.
    refused = session_report.latency_error is not None and (inputs is not None or compare is not None)
    wrong = compared.wrong if compared is not None else None
    failed = refused or wrong is not None
    if as_json:
        document = output.document(ok=not failed, model=name, **session_report.document(), warnings=warned)
        if placement:
            document["placement_details"] = details.as_dict() if details else None
        if compare is not None:
            document["compared"] = {"error": compared.error, "wrong": wrong} if compared is not None else None
            document["compared_with"] = compared_with
        if shapes is not None:
            document["shapes"] = [asdict(shape) for shape in times]
        document["on_cpu_because"] = output.error_document(on_cpu_because) if on_cpu_because else None
        output.write_json(document)
        return int(failed)
    console = output.stdout()
    report.show_warnings(console, warned)
    if on_cpu_because:
        output.show_error(console, on_cpu_because)
    session_report.show(console, verbose=verbose)
    if times:
        shape_times.show(console, times)
    if placement and not details:
        output.line(console, "--placement shows nothing more: nothing is on a GPU.", style="yellow")
    elif details:
        output.line(console)
        output.line(console, str(details).partition("\n")[0])
        rows = [(node, node.kind, reason or "unknown") for node, reason in details.off_gpu]
        output.table(console, ("on the CPU", "kind", "reason"), rows)
    if compared is not None and wrong is None:
        difference = f"at most {compared.error:.1e} of the largest value" if compared.error else "no difference"
        output.line(console, f"Results: {difference} from {compared_with}")
    shown = name or "the built-in model"
    if wrong is not None:
        output.line(console, f"WRONG: results of {shown} differ from {compared_with}: {wrong}", style="bold red")
    elif refused:
        output.line(console, str(session_report.latency_error), style="bold red")
    elif on_cpu_because:
        output.show_that_on_cpu(console, f"{shown} is open", by_option=allow_cpu)
    elif session_report.is_idle:
        output.line(console, f"{shown} is open on the GPU, and none of its nodes runs there", style="bold yellow")
    else:
        output.line(console, f"OK: {shown} runs on the GPU", style="bold green")
    return int(failed)


def _show_fit(
    models: tuple[Path, ...],
    batches: tuple[int, ...],
    device: str | None,
    file: Path | None,
    plot: Path | None,
    *,
    allow_cpu: bool,
    as_json: bool,
) -> int:
    """Show the measurements of ``ortgpu.fit``, and return the exit code."""
    if not models:
        raise click.UsageError("--fit needs a MODEL")
    feeds = [read_inputs(file)] if file is not None else None
    names = [str(model) for model in models]
    try:
        fit = ortgpu.fit(names, batches, feeds, device, allow_cpu=allow_cpu or None)
    except Exception as error:  # noqa: BLE001 - an invalid model: ONNX Runtime raises many classes
        return output.show_problem(error, as_json, model=models[0] if len(models) == 1 else None)
    has_run = all(any(row.error is None for row in model.rows) for model in fit.models)
    ok = has_run and fit.fit_together is not False
    if as_json:
        output.write_json(output.document(ok=ok, model=names[0] if len(names) == 1 else names, fit=fit.as_dict()))
    else:
        for text in str(fit).splitlines():
            output.line(output.stdout(), text)
    if plot is not None:
        pictures.draw_fit(fit, plot)
        if not as_json:
            output.line(output.stdout(), f"Written: {plot}")
    return int(not ok)
