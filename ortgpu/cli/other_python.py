"""A diagnosis of the environment of another interpreter. Neither ortgpu nor its dependencies are installed there."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import ortgpu
from ortgpu.environment.child import run
from ortgpu.environment.packages.interpreter import this_interpreter
from ortgpu.errors import GPUError
from ortgpu.process.temporary import private_folder

_BESIDE = 90.0  # Seconds for the child's work without a limit of its own: it reads files, and asks the driver.
_LIMITED = 3  # The probe, MPI and the shared folder have the limit, one after another. So has each host.

# The folder with this library replaces the working directory in sys.path. A portable Python for Windows has no such
# entry.
_PROGRAM = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("it is Python %d.%d, and ortgpu needs 3.10 or newer" % sys.version_info[:2])
folder, settings, lender = sys.argv[1:]
sys.path[:] = [folder, *filter(None, sys.path)]
import json, pickle
from ortgpu import diagnose
from ortgpu.environment.packages import interpreter
interpreter.lender = lender or None
from ortgpu.errors import GPUError
try:
    found = diagnose(**json.loads(settings))
except GPUError as error:
    found = error
with open(folder + "/result", "wb") as file:
    pickle.dump(found, file)
"""


def find_python(_ctx: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
    """Return the path of an interpreter, from its path, its name on PATH, or the folder of its virtual environment."""
    if given is None:
        return None
    inside = [os.path.join(given, *parts) for parts in (("bin", "python"), ("Scripts", "python.exe"))]
    interpreter_path = next((path for path in inside if os.path.isfile(path)), None) or shutil.which(given)
    if interpreter_path is None:
        raise click.BadParameter(f"{given!r} is neither an interpreter nor the folder of a virtual environment")
    return os.path.abspath(interpreter_path)  # The target of a link would be outside of the environment.


python_option = click.option(
    "--python",
    metavar="PYTHON",
    callback=find_python,
    help="Use the environment of this interpreter, or the virtual environment in this folder.",
)


def diagnose_in(
    python: str,
    model: Path | None,
    *,
    timeout: float,
    ssh: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> ortgpu.Diagnosis:
    """Return the diagnosis of :func:`ortgpu.diagnose` in a process of the interpreter ``python``.

    ``environ``: the variables of that process; None means the variables of this process.

    Raises:
        GPUError: as :func:`ortgpu.diagnose` raises.
        click.ClickException: the interpreter does not run this library.
    """
    with private_folder("ortgpu-doctor-") as folder:
        for name in ("ortgpu", "pynvml"):  # A copy of another package would hide that it is missing there.
            spec = find_spec(name)
            if spec is not None and spec.origin is not None:
                _lend(Path(spec.origin), Path(folder))
        settings_json = json.dumps({"model": model, "timeout": timeout, "ssh": ssh, **settings}, default=os.fspath)
        variables = os.environ if environ is None else environ
        environ = {name: value for name, value in variables.items() if name != "ORTGPU_ENFORCE"}
        lender = "" if python == this_interpreter() else this_interpreter()
        environ["ORT_DISABLE_TELEMETRY"] = "1"
        longest = timeout * (_LIMITED + len(ssh)) + _BESIDE
        ended = run([python, "-c", _PROGRAM, folder, settings_json, lender], timeout=longest, environ=environ)
        result = Path(folder, "result")
        if not result.exists():
            last = (ended.errors.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
            raise click.ClickException(f"{python}: {'it did not answer in time' if ended.timed_out else last}")
        answer = pickle.loads(result.read_bytes())  # noqa: S301 - of a child that ran this very library
    if isinstance(answer, GPUError):
        raise answer
    assert isinstance(answer, ortgpu.Diagnosis)
    return answer


def _lend(origin: Path, folder: Path) -> None:
    """Copy a module or a package into a folder. Few users of Windows may make a link."""
    if origin.name == "__init__.py":
        without = shutil.ignore_patterns("__pycache__")  # Other processes write and rename files there meanwhile.
        shutil.copytree(origin.parent, folder / origin.parent.name, ignore=without)
    else:
        shutil.copy(origin, folder)
