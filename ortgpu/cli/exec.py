"""``ortgpu exec``: run a command under the guard, so that every InferenceSession is verified like a GPUSession."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ortgpu.cli import output
from ortgpu.environment import child
from ortgpu.session.guard.inheritance import prepare

_PYTHON = re.compile(r"(python|pypy)w?[\d.]*t?(\.exe)?", re.IGNORECASE)
_IS_REACHED = "import sys; print('_ortgpu_hook' in sys.modules)"
# With these options Python does not read PYTHONPATH, or runs no sitecustomize.
_IGNORED = {"E": "the variables", "I": "the variables", "S": "the start-up file"}


@click.command(name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec(command: tuple[str, ...]) -> int:  # noqa: A001 - the name of the command
    """Run a command in which every InferenceSession is on the GPU or raises the cause.

    The guard is in force in COMMAND and in every Python that COMMAND starts. A session that asks for CUDA, or for no
    provider, is verified to run on the GPU, or its constructor raises an error that names the cause. Sessions that ask
    only for the CPU stay as they are. The program need not be changed, and its environment need not have ortgpu.

    \b
    For instance:
      ortgpu exec -- python app.py
      ortgpu exec -- gunicorn app:server

    COMMAND replaces this process, so signals and exit code are its own. 127: COMMAND was not found. 126: it cannot be
    executed. 2: no COMMAND was given.

    Not reached: interpreters that ignore PYTHONPATH (python -I, -E, -S; a portable one for Windows, unless ortgpu is
    installed in it), and programs that do not use Python.
    """
    if not command[0]:  # An unset variable, as in "$APP", gives an empty text.
        raise click.UsageError("COMMAND is empty")
    reject_isolated_python(command)
    environment = dict(os.environ)
    prepare(environment)
    try:
        if os.name == "nt":
            return _call(command, environment)
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would inherit that.
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - the user's own command line
    except OSError as error:
        reason = error.strerror or str(error)
        output.line(output.stderr(), f"ortgpu exec: {command[0]}: {reason}")
        return 127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126


def _call(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command on Windows, where exec would return to the shell at once, and return its exit code."""
    # Windows itself would look beside this interpreter first, in the base of a virtual environment.
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "not found")
    reject_portable_python(program, environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, and the command decides when to end.
    code = subprocess.call([program, *command[1:]], env=environment)
    return code - 2**32 if code >= 2**31 else code  # For sys.exit, a code of a crash such as 0xC0000005 is negative.


def reject_portable_python(program: str, environment: Mapping[str, str]) -> None:
    """Raise UsageError if a file beside ``program``, a Python for Windows, isolates it from the guard."""
    files = sorted(Path(program).parent.glob("python*._pth")) if _PYTHON.fullmatch(os.path.basename(program)) else []
    if files and "True" not in child.run([program, "-c", _IS_REACHED], environ=environment, timeout=60).output:
        raise click.UsageError(
            f"{program} ignores the variables by which the guard reaches it, because of {files[0].name}. "
            "Install ortgpu there, or call ortgpu.install() at the start of the program"
        )


def reject_isolated_python(command: Sequence[str]) -> None:
    """Raise UsageError if the command runs Python with an option that keeps the guard out."""
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        return
    arguments = iter(command[1:])
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-", "--"):
            return
        if argument.startswith("--"):
            continue
        for position, letter in enumerate(argument[1:], start=2):
            if letter in _IGNORED:
                reason = f"ignores {_IGNORED[letter]} by which the guard reaches it"
                raise click.UsageError(f"{command[0]} -{letter} {reason}")
            if letter in "cm":
                return
            if letter in "WX":  # The value is the rest of the argument, or the next argument.
                if position == len(argument):
                    next(arguments, None)
                break
