"""The model that a user names for a command."""

from __future__ import annotations

from pathlib import Path

import click

from ortgpu.errors import GPUError

inputs_option = click.option(
    "--inputs",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run on these inputs, of a file that numpy.savez wrote, by their names (.npz).",
)


def known_of(model: Path | None, problem: Exception) -> tuple[GPUError, ...]:
    """Return what our own reader finds wrong with a model that ONNX Runtime refused."""
    if model is None or isinstance(problem, GPUError):
        return ()
    from ortgpu.diagnosis.checks.model import judge_file
    from ortgpu.model.contents import read_model

    return judge_file(read_model(model))
