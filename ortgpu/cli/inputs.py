"""Inputs for a model of a command, read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortgpu.model.files import open_model
from ortgpu.process.late import late

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ortgpu.provider.interfaces import Value
else:
    np = late("numpy")


def read_inputs(path: Path, descriptions: Sequence[Value] | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file of numpy.savez by name.

    ``descriptions`` are the inputs of the model. Without them the names are not compared.

    Raises:
        click.UsageError: it is no such file, or its names differ from the names of the model's inputs.
    """
    try:
        with open_model(path) as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, Mapping):
                raise ValueError("it has one array, without a name")
            values = dict(arrays)
    except Exception as error:  # noqa: BLE001 - a pickle, a broken archive: NumPy raises many classes
        # NumPy takes objects and files of other formats for pickles, and then recommends allow_pickle.
        why = "it holds something else than arrays of numbers or text" if "allow_pickle" in str(error) else error
        raise click.UsageError(f"--inputs: {path} is no file that numpy.savez wrote ({why})") from None
    input_names = {description.name for description in descriptions} if descriptions is not None else values.keys()
    if input_names != values.keys():
        has, takes = (", ".join(map(repr, sorted(names))) or "none" for names in (values.keys(), input_names))
        raise click.UsageError(f"--inputs: {path} has arrays of the names {has}, and the model takes {takes}")
    return values


def refusal(path: Path | None) -> str:
    """Return a message about a model that does not run on the inputs of a file, or on made-up inputs."""
    if path is None:
        return "the model does not run on made-up inputs (--inputs FILE gives it others)"
    return f"the model does not run on the inputs of {path}"
