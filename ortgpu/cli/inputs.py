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
    """Return the arrays of a file that numpy.savez wrote, by the names of the inputs.

    Without ``descriptions`` of the model's inputs, the names are not compared with theirs.

    Raises:
        click.UsageError: it is no such file, or its names are not those of the model's inputs.
    """
    try:
        with open_model(path) as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, Mapping):
                raise ValueError("it has one array, without a name")
            found = dict(arrays)
    except Exception as error:  # noqa: BLE001 - a pickle, a broken archive: NumPy raises what it likes
        # NumPy takes objects and foreign files for pickles, and then recommends allow_pickle.
        why = "it holds something else than arrays of numbers or text" if "allow_pickle" in str(error) else error
        raise click.UsageError(f"--inputs: {path} is no file that numpy.savez wrote ({why})") from None
    wanted = {each.name for each in descriptions} if descriptions is not None else found.keys()
    if wanted != found.keys():
        has, takes = (", ".join(map(repr, sorted(names))) or "none" for names in (found.keys(), wanted))
        raise click.UsageError(f"--inputs: {path} has arrays of the names {has}, and the model takes {takes}")
    return found


def refusal(path: Path | None) -> str:
    """Return the words for a model that does not run on the inputs of a file, or on made-up ones."""
    if path is None:
        return "the model does not run on made-up inputs (--inputs FILE gives it others)"
    return f"the model does not run on the inputs of {path}"
