"""``ortgpu doctor``: show problems with their causes and fixes, and the facts of this machine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import click

import ortgpu
from ortgpu.cli import output, redaction, signals
from ortgpu.cli.findings import Report
from ortgpu.cli.other_python import diagnose_in, python_option
from ortgpu.diagnosis.requirements import check_inference
from ortgpu.distributed.diagnosis.requirements import check_training
from ortgpu.distributed.diagnosis.training import TrainingFacts


@click.command()
@output.json_option
@click.option("--verbose", is_flag=True, help="Show all evidence, and every unusable library with the reason.")
@click.option(
    "--model",
    metavar="M",
    type=output.MODEL_FILE,
    help="Judge what this model needs as well, and open it.",
)
@python_option
@click.option(
    "--profile",
    type=click.Choice(["inference", "training"]),
    default="inference",
    show_default=True,
    help="What to judge: whether a session opens on the GPU, or whether processes can train together.",
)
@click.option(
    "--ssh",
    "hosts",
    metavar="HOST",
    multiple=True,
    help="With --profile training: reach this host without a password. Can be given again.",
)
@click.option(
    "--shared-folder",
    metavar="DIR",
    type=click.Path(),
    help="With --profile training: meet all ranks in this folder; start the doctor with mpirun.",
)
@click.option(
    "--redact",
    is_flag=True,
    help="Leave out user names, home folders, the name of the host, and credentials in addresses.",
)
@click.option("--no-probe", is_flag=True, help="Only look: open neither the driver nor a session.")
@output.probe_timeout_option
def doctor(
    as_json: bool,
    verbose: bool,
    model: Path | None,
    python: str | None,
    profile: Literal["inference", "training"],
    hosts: tuple[str, ...],
    shared_folder: str | None,
    redact: bool,
    no_probe: bool,
    timeout: int,
) -> int:
    """Find out why the GPU cannot be used, and how to fix it.

    Looks at packages, libraries, driver and GPUs, and judges them. Then, in a child process with a deadline, the
    driver, the provider and a session are really opened: a library that ends its process ends only the child.

    With --python the other environment needs neither ortgpu nor its dependencies: ortgpu doctor --python .venv

    With --profile training: the training package of ONNX Runtime, MPI, NCCL, the network; in child processes, the
    driver, onnxruntime.training and MPI are really started. --ssh HOST runs `true` there, with ssh's BatchMode.
    With --shared-folder DIR every rank writes a token into DIR and reads the tokens of the others. Without a launcher
    this only shows that this process can write there.

    Exit code 0: no problem keeps a session off the GPU, or with --profile training, the driver, the training API or MPI
    from working. 1: a problem does. 2: wrong usage.

    \b
    The JSON document has "schema" (1), "ortgpu", "ok", "model", and
      "problems"      the likeliest cause first: type, code, severity, summary,
                      evidence, fixes, consequence_of, others, details
      "requirements"  name, minimum, recommended, found, status_minimum,
                      status_recommended, note
      "environment"   host, installer, packages, extension, bridge, provider,
                      libraries, mapped, driver, variables,
                      system_libraries_missing, cudnn_architectures,
                      release_wanted, libraries_by_cuda; null means unknown
      "probe"         steps, completed, returncode, signal, timed_out, died_in,
                      opening, seconds, output; null with --no-probe
      "training"      with --profile training: environment, ssh, shared_folder
    or "error", if the launcher's variables do not tell the rank of this process,
    or if the interpreter of --python does not run this library.
    """
    if profile == "inference" and (hosts or shared_folder is not None):
        raise click.UsageError("--ssh and --shared-folder need --profile training")
    if shared_folder == "":  # An unset variable, as in "$FOLDER", gives an empty text.
        raise click.UsageError("--shared-folder is empty")
    if profile == "training" and model is not None:
        raise click.UsageError("--model is for --profile inference")
    with output.progress("Looking at this machine"), signals.raise_on_signals():
        judge = ortgpu.diagnose if python is None else functools.partial(diagnose_in, python)
        diagnosis = judge(
            model, probe=not no_probe, timeout=timeout, profile=profile, ssh=hosts, shared_folder=shared_folder
        )
    environment, training = diagnosis.environment, diagnosis.training
    if isinstance(training, TrainingFacts):
        rows = check_training(environment, training.environment)
    else:
        rows = check_inference(environment)
    report = Report(str(model) if model else None, diagnosis, rows)
    if redact:
        report = redaction.redact(report, redaction.redactor_for_this_process())
    if as_json:
        output.write_json(report.document())
    else:
        report.show(output.stdout(), verbose=verbose)
    return 0 if report.ok else 1
