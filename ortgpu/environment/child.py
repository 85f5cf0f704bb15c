"""Run another program with a deadline, and collect all of its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ..process.late import late
from .packages.interpreter import is_frozen, this_interpreter
from .packages.metadata import search_path

if TYPE_CHECKING:
    import tempfile
else:
    tempfile = late("tempfile")

_DEATH = 2.0  # A killed process is waited for this many seconds. A process stuck in the driver never ends.


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child. ``returncode`` None: it could not be started, or was killed at the deadline."""

    returncode: int | None
    output: str  # text of its standard output
    errors: str  # text of its standard error, or the reason why it could not be started
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.returncode == 0


def run(
    command: Sequence[str],
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    grace: float = 0.0,
    together: bool = False,
) -> Ended:
    """Run a program and wait for it, at most ``timeout`` seconds. A failure of the program raises nothing.

    The program leads a process group. The group is killed at the deadline, or after the program's end, so nothing that
    it started in that group survives. With ``grace`` the program first gets SIGTERM and that many seconds to end. For
    mpirun this is needed: its processes are in groups of their own, and only mpirun can end them. With ``together``
    standard error goes into ``output``, in the order of writing.
    """
    try:
        with output_file() as output, output_file() as errors:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if together else errors,
                env=environ,
                start_new_session=True,
            )
            timed_out = not _ends(child, timeout, grace)
            text, error_text = (_content(file) for file in (output, errors))
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        return Ended(None, "", str(error))
    return Ended(None if timed_out else child.returncode, text, error_text, timed_out)


def output_file() -> IO[bytes]:
    """Return an empty file for output. With a pipe, any surviving process would keep the reader waiting."""
    try:
        return open(os.memfd_create("output"), "w+b")
    except (AttributeError, OSError):  # This is not Linux, or its kernel is old or restricted.
        return tempfile.TemporaryFile()


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _ends(child: subprocess.Popen[bytes], timeout: float, grace: float) -> bool:
    """Wait for a child and then kill its group. Return False if it did not end by itself."""
    try:
        child.wait(timeout)
        return True
    except subprocess.TimeoutExpired:
        if grace:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):  # The group is killed below.
                child.wait(grace)
        return False
    finally:
        kill_group(child)


def interpreter() -> str:
    """Return the path of the interpreter for children. Raises FileNotFoundError in a frozen program."""
    if is_frozen():
        raise FileNotFoundError("this program is frozen: it has no interpreter that could run a child process")
    path = this_interpreter()
    if not path:
        raise FileNotFoundError("sys.executable is empty: there is no interpreter that could run a child process")
    return path


def run_python(
    code: str,
    *arguments: str,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    together: bool = False,
) -> Ended:
    """Run code in another process of this interpreter, with this search path. The rest is as for :func:`run`."""
    try:
        command = python_command(code, *arguments)
    except FileNotFoundError as error:
        return Ended(None, "", str(error))
    return run(command, timeout=timeout, environ=environ, together=together)


_SET_PATH = "import sys; n = int(sys.argv[1]) + 2; sys.path[:] = sys.argv[2:n]; del sys.argv[1:n]"
# A child that hangs in a driver must not outlive the process that waits for it, however that ends.
_END_WITH_PARENT = """
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: linux/prctl.h
except (AttributeError, ImportError, OSError, TypeError):
    pass  # not Linux
"""


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in another process of this interpreter. Raises as :func:`interpreter`.

    The child gets ``sys.path`` and the isolation options of this interpreter, because it has to see the same
    environment. On Linux the child is killed when the thread that starts it ends.
    """
    path = search_path()  # Each entry is an argument of its own: Linux allows 128 KiB for one and 2 MiB for all.
    isolation = [option for flag, option in _ISOLATION.items() if getattr(sys.flags, flag, False)]
    if "-I" in isolation and "-s" not in isolation:  # A ._pth file of Windows set it, and isolates the child as well.
        isolation.remove("-I")
    return [interpreter(), *isolation, "-c", f"{_SET_PATH}{_END_WITH_PARENT}{code}", str(len(path)), *path, *arguments]


# These options make an interpreter ignore variables, the user's packages or ``site``.
_ISOLATION = {
    "isolated": "-I",
    "ignore_environment": "-E",
    "no_user_site": "-s",
    "no_site": "-S",
    "safe_path": "-P",  # new in Python 3.11
}


def parse_answer(output: str) -> Any:
    """Return the last line that is a JSON list, or None. Other lines come from libraries, some at the process's end."""
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, list):
            return answer
    return None


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def cause_of_death(returncode: int) -> str | None:
    """Return the signal or the exception of Windows that ended a process, from its exit code; None for neither."""
    if returncode < 0:
        return signal_name(-returncode)
    return f"exception 0x{returncode:08X}" if returncode >= 0xC0000000 else None  # winnt.h


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a process group, and the whole group. A process stuck in the driver is left."""
    with suppress(ProcessLookupError, PermissionError):  # It ended by itself.
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_DEATH)
