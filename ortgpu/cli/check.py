"""``ortgpu check``: open a model on the GPU and prove that it runs there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ortgpu.cli import output, signals
from ortgpu.cli.model import example_model, inputs_option, known_of

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu.cli.report import SessionReport
    from ortgpu.errors import GPUError
    from ortgpu.session.placement_details import PlacementDetails

CpuNodes = Literal["allow", "warn", "forbid"]


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
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
@inputs_option
@click.option("--placement", is_flag=True, help="Also why nodes are not on the GPU, and the copies; opens MODEL again.")
@click.option(
    "--html",
    metavar="FILE",
    type=output.FileToWrite(),
    help="Write a page that shows the graph, its CPU islands and the copies; opens MODEL again.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document, also when there is a problem.")
def check(
    model: Path | None,
    device: str | None,
    cpu_nodes: CpuNodes,
    allow_cpu: bool,
    runs: int,
    inputs: Path | None,
    placement: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """Open MODEL on the GPU and prove that it runs there. Without MODEL, a small built-in one is used.

    Shows the device, where every node was placed, the options bound, the GPU memory of the process, and the time of a
    few runs on made-up inputs (free dimensions are 1), or on those of --inputs.

    Exit code 0: the model is open on the GPU, or on the CPU with --allow-cpu or ORTGPU_ALLOW_CPU=1. 1: it is not, or
    it does not run on the inputs of --inputs, and the reason is printed. 2: wrong usage, for instance no such file.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", "model", and either
      "error"             type, code, summary, evidence, fixes, details, others
    or
      "device"            is_gpu, ordinal, uuid, name, compute_capability,
                          total_memory, driver_version
      "providers"         those bound, in order
      "provider_options"  of the CUDA provider, as bound
      "placement"         known, by_provider, cpu_compute_nodes
      "gpu_memory"        bytes used by this process; null: the driver does not say
      "latency_ms"        first, median, min, runs; or null, and
      "latency_error"     why the model was not run; with --inputs, "ok" is false
                          where it does not run on them
      "warnings"          texts
      "on_cpu_because"    the error for which it is on the CPU, which was
                          allowed; else null
      "placement_details" with --placement or --html: model, copies, on_cpu
                          (nodes with reason), graph; null on the CPU
    """
    from ortgpu.cli import report

    look_closer = placement or html is not None
    found: SessionReport | None = None
    problem: Exception | None = None
    details: PlacementDetails | None = None
    with report.quiet() as caught:
        try:
            found = _open_and_run(model, device, cpu_nodes, allow_cpu, runs, inputs)
            if look_closer and found.device.is_gpu:
                details = _look_closer(model, device, html)
        except click.UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - an invalid model: ONNX Runtime raises many classes
            problem = error
    outcome = _Outcome(model, found, details, problem, *report.split_warnings(caught))
    ok = problem is None and not outcome.refuses_inputs(inputs)
    if as_json:
        document = output.document(ok=ok, model=outcome.name)
        output.write_json(document | outcome.as_dict(with_details=look_closer))
    else:
        outcome.show(output.stdout(), allow_cpu, inputs, placement, html)
    return 0 if ok else 1


@dataclass(frozen=True, slots=True)
class _Outcome:
    model: Path | None
    found: SessionReport | None
    details: PlacementDetails | None
    problem: Exception | None
    on_cpu_because: GPUError | None
    warnings: list[str]

    @property
    def name(self) -> str | None:
        return str(self.model) if self.model else None

    def as_dict(self, *, with_details: bool) -> dict[str, object]:
        if self.problem:
            return {"error": output.error_document(self.problem, known_of(self.model, self.problem))}
        document = self.found.as_dict() if self.found else {}
        document["warnings"] = self.warnings
        if with_details:
            document["placement_details"] = self.details.as_dict() if self.details else None
        document["on_cpu_because"] = output.error_document(self.on_cpu_because) if self.on_cpu_because else None
        return document

    def refuses_inputs(self, file: Path | None) -> bool:
        """Return True if the model did not run on inputs of the user. Failing on made-up inputs proves nothing."""
        return file is not None and self.found is not None and self.found.latency_error is not None

    def show(self, console: Console, allow_cpu: bool, file: Path | None, placement: bool, html: Path | None) -> None:
        for text in self.warnings:
            output.line(console, f"warning: {text}", style="yellow")
        if self.problem:
            output.show_error(console, self.problem, known_of(self.model, self.problem))
            return
        if self.found and self.refuses_inputs(file):
            output.line(console, str(self.found.latency_error), style="bold red")
        if self.on_cpu_because:
            output.show_why_on_cpu(console, self.on_cpu_because, "Opened", by_option=allow_cpu)
        elif self.found and self.found.is_idle:
            said = f"{self.name} is open on the GPU, and none of its nodes runs there"
            output.line(console, said, style="bold yellow")
        elif self.found and not self.refuses_inputs(file):
            output.line(console, f"OK: {self.name or 'the built-in model'} runs on the GPU", style="bold green")
        if self.found:
            self.found.show(console)
        if self.details and placement:
            output.line(console, "")
            for text in str(self.details).splitlines():
                output.line(console, text)
        if html:
            output.line(console, f"Written: {html}" if self.details else f"{html} is not written: nothing is on a GPU.")


def _open_and_run(
    model: Path | None, device: str | None, cpu_nodes: CpuNodes, allow_cpu: bool, runs: int, file: Path | None
) -> SessionReport:
    from ortgpu import GPUSession
    from ortgpu.cli import report

    source = str(model) if model else example_model()
    with GPUSession(source, device=device, cpu_nodes=cpu_nodes, allow_cpu=allow_cpu or None) as session:
        from ortgpu.cli import inputs  # after the session, which reports a missing NumPy better

        if runs == 0:
            return report.read(session, None, runs)
        declared = session.get_inputs()
        if file is not None:
            feeds = inputs.read_inputs(file, declared)
            return report.read(session, feeds, runs, refused=f"the model does not run on the inputs of {file}")
        try:
            feeds = inputs.make_inputs(declared)
        except inputs.UnknownInputError as error:
            return report.read(session, None, runs, str(error))
        return report.read(session, feeds, runs, refused=inputs.REFUSED)


def _look_closer(model: Path | None, device: str | None, page: Path | None) -> PlacementDetails:
    from ortgpu.cli.placement_page import render
    from ortgpu.session.placement_details import explain_placement

    doing = "Opening the model once more, to see why its nodes are where they are"
    with output.progress(doing), signals.as_exceptions():
        details = explain_placement(str(model) if model else example_model(), device=device)
    if page is not None:
        page.write_text(render(details), encoding="utf-8")
    return details
