"""``ortgpu preflight``: find out if the ranks of a job can work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ortgpu.cli import output, signals
from ortgpu.distributed import current_rank
from ortgpu.distributed import preflight as run
from ortgpu.errors import DistributedError, GPUError

if TYPE_CHECKING:
    from ortgpu.distributed import PreflightReport, Rank


@click.command()
@click.option(  # Whole seconds, because "nan" is a float.
    "--timeout", type=click.IntRange(2, 3600), default=60, show_default=True, help="Seconds that all of it may take."
)
@output.json_option
@click.option(
    "--address", metavar="HOST:PORT", help="Where rank 0 is to listen. Needed by mpirun over several machines."
)
def preflight(timeout: int, as_json: bool, address: str | None) -> int:
    """Check that the ranks of a job reach each other, and that each has its own GPU.

    Run it as the program would be run. The ranks meet and compare GPUs, drivers and versions; then they run NCCL's
    AllReduce, AllGather and ReduceScatter between all GPUs and check the values. A rank that does not come, hangs, dies
    or has another rank's GPU ends the preflight before the deadline on all ranks. The error names this rank.

    \b
    For instance:
      torchrun --nproc-per-node 2 --no-python ortgpu preflight
      mpirun -n 2 ortgpu preflight
      srun ortgpu preflight

    Between hosts, and with --address, give all ranks one secret in ORTGPU_PREFLIGHT_SECRET, or in the file that
    ORTGPU_PREFLIGHT_SECRET_FILE names. Without it, whoever reaches rank 0's port can take a rank's place.

    Rank 0 writes the result or its JSON document. On a problem the other ranks write one line each to stderr, or the
    whole error if rank 0 is the problem. If the launcher's variables do not identify rank 0, every rank writes an error
    about that. Without a launcher only one rank is checked.

    Exit code 0: no problem. 1: a problem was found. 2: wrong usage.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", and "error" or:
      "rank" (of rank 0), "ranks", "differences", "collectives", "notes",
      "seconds"
    null means unknown.
    """
    rank: Rank | None = None
    try:
        rank = current_rank()
        with signals.raise_on_signals():
            report = run(timeout, rank=rank, address=address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--address") from None
    except GPUError as error:
        _show_problem(error, rank, as_json)
        return 1
    if rank.rank == 0:
        _show_report(report, as_json)
    return 0


def _show_problem(error: GPUError, rank: Rank | None, as_json: bool) -> None:
    """Show the error on rank 0. Every rank shows it if rank 0 is unknown or is itself the problem."""
    without_0 = isinstance(error, DistributedError) and 0 in error.ranks
    if rank is None or rank.rank == 0:
        if as_json:
            output.write_json(output.document(ok=False, error=output.error_document(error)))
        else:
            output.show_error(output.stdout(), error)
    elif without_0:
        output.show_error(output.stderr(), error)
    else:
        output.line(output.stderr(), f"rank {rank.rank}: {type(error).__name__}: {error.summary}")


def _show_report(report: PreflightReport, as_json: bool) -> None:
    if as_json:
        output.write_json(output.document(ok=True, **report.as_dict()))
        return
    console = output.stdout()
    count = report.rank.world_size
    started = f" started by {report.rank.launcher}" if report.rank.launcher else ""
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    output.line(console, f"OK: {ranks}{started} can work together", style="bold green")
    for note in report.notes:
        output.line(console, f"note: {note}", style="yellow")
    for difference in report.differences:
        output.line(console, f"different: {difference}", style="yellow")
    output.heading(console, "Ranks")
    facts = (
        (rank.rank, rank.host, rank.gpu, rank.uuid, rank.driver, rank.nccl, rank.onnxruntime) for rank in report.ranks
    )
    output.table(
        console,
        ("rank", "host", "GPU", "UUID", "driver", "NCCL", "ONNX Runtime"),
        (tuple("unknown" if value is None else value for value in values) for values in facts),
    )
    output.heading(console, "Collective operations, values checked")
    output.table(
        console,
        ("operation", "type", "elements", "milliseconds", "GB/s"),
        (
            (
                result.call.operation,
                result.call.dtype,
                result.call.count,
                f"{result.seconds * 1e3:.3f}",
                f"{result.bus_bandwidth / 1e9:.2f}" if result.bus_bandwidth is not None else "",
            )
            for result in report.collectives
        ),
    )
    output.line(console, f"in {report.seconds:.1f} s", style="dim")
