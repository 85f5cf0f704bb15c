"""Child processes with a deadline: what tests, the lab and benchmarks start, and how it ended.

Only the standard library is imported here, so that a child that reports pays for nothing but what it measures or tests.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPORT_VARIABLE = "CHILD_REPORT"  # names the file that a child's reports go to, each a line: [name, value]
DEADLINE_VARIABLE = "CHILD_DEADLINE"  # seconds after which a program of tests/programs may say where it hangs


@dataclass(frozen=True, slots=True)
class Child:
    """How a child process ended, what it printed, and what it reported before that."""

    command: tuple[str, ...]
    returncode: int | None  # -n: signal n; None: it was killed at its deadline
    seconds: float
    stdout: str
    stderr: str
    reports: Mapping[str, Any]

    @property
    def json(self) -> Any:
        """The value reported under this name, which is that of the lab's programs; None where there is none."""
        return self.reports.get("json")

    @property
    def ended(self) -> str:
        if self.returncode is None:
            return f"killed at its deadline after {self.seconds:.0f} s"
        if self.returncode < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-self.returncode).name} after {self.seconds:.1f} s"
        return f"exit status {self.returncode} after {self.seconds:.1f} s"

    @property
    def output(self) -> str:
        """The end of the child and everything that it wrote, for the message of an assertion."""
        error = self.reports.get("error")
        parts = [f"child {self.ended}", f"reported: {', '.join(self.reports) or 'nothing'}"]
        parts += [str(error)] if error else []
        return "\n".join([*parts, "--- stdout", self.stdout, "--- stderr", self.stderr])

    def ok(self) -> Child:
        """This child, or AssertionError with the output when it did not exit with 0."""
        assert self.returncode == 0, self.output
        return self


def run_child(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, deadline: float = 60, cwd: Path = ROOT
) -> Child:
    """Run a command and wait for its end; ``env`` is all that it has of variables, or else :func:`child_environment`.

    Whatever the child does comes back as facts; nothing of it raises. It leads a session of its own, of which nothing
    is left at its end or at the deadline. Output goes through files: a grandchild that kept a pipe open would hold the
    caller.
    """
    with tempfile.TemporaryDirectory(prefix="ortgpu-child-") as scratch:
        reports, out, err = (Path(scratch, name) for name in ("reports", "out", "err"))
        variables = {DEADLINE_VARIABLE: str(deadline), **(child_environment() if env is None else env)}
        variables[REPORT_VARIABLE] = str(reports)
        started = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=variables,
                cwd=cwd,
                start_new_session=True,
            )
            returncode: int | None = None
            try:
                returncode = _wait(process, deadline)
            finally:
                with suppress(ProcessLookupError):  # the usual case: nobody of the group is left
                    if sys.platform != "win32":
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.wait()
        return finished(command, returncode, time.monotonic() - started, Path(scratch))


def finished(command: Sequence[str], returncode: int | None, seconds: float, scratch: Path) -> Child:
    """Return how a child ended that left the files ``out``, ``err`` and ``reports`` in a folder."""
    printed, logged = ((scratch / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    return Child(tuple(command), returncode, seconds, printed, logged, _read_reports(scratch / "reports"))


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Wait for the end of a process, and return its exit status; None at the deadline."""
    with suppress(AttributeError, OSError):  # no such call here
        return process.wait() if ends(process.pid, deadline) else None
    try:
        return process.wait(deadline)
    except subprocess.TimeoutExpired:
        return None


def ends(pid: int, deadline: float) -> bool:
    """Wait for the end of a process, and return False at the deadline."""
    descriptor = os.pidfd_open(pid)
    try:
        waiting = select.poll()  # Popen.wait looks every 50 ms, which thousands of short children would wait for
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(deadline * 1000))
    finally:
        os.close(descriptor)


def run_python(
    program: str, *arguments: str, behind: str = "", env: Mapping[str, str] | None = None, deadline: float = 60
) -> Child:
    """Run a program in a fresh interpreter: ``"folder.module.function"`` of tests/programs, or a few lines of code.

    Code may be indented. It finds what the modules of tests/programs define that are named in ``behind``, with spaces
    between their names.
    """
    return run_child([sys.executable, *python_arguments(program, behind), *arguments], env=env, deadline=deadline)


def program_text(program: str) -> str:
    """The text of a module of tests/programs that is written to a file elsewhere, such as tests of an inner pytest."""
    return Path(program_path(program)).read_text(encoding="utf-8")


def program_path(program: str) -> str:
    """The path of a module of tests/programs."""
    return str(ROOT / "tests/programs" / f"{program.replace('.', '/')}.py")


def python_arguments(program: str, behind: str = "") -> list[str]:
    """The interpreter's arguments that :func:`run_python` runs a program with."""
    if re.fullmatch(r"\w+(\.\w+)+", program):
        return ["-m", "tests.programs", program]
    shared = "".join(f"from tests.programs.{module} import *\n" for module in behind.split())
    return ["-c", shared + textwrap.dedent(program)]


def report(name: str, value: object) -> None:
    """In a child: hand `value` to the parent at once, so that it survives whatever ends the child afterwards."""
    path = os.environ.get(REPORT_VARIABLE)
    line = json.dumps([name, value], default=str)
    if path is None:
        print(line, flush=True)  # noqa: T201 - a person runs the program by hand
        return
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def _read_reports(path: Path) -> dict[str, Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError):  # a line that a killed child did not finish
            name, value = json.loads(line)
            found[name] = value
    return found


def child_environment(
    changes: Mapping[str, str | None] | None = None, *, python_path: Iterable[str | Path] | None = None
) -> dict[str, str]:
    """This process's environment for a child, with this repository first on PYTHONPATH.

    A change to None removes the variable. ``python_path`` replaces what PYTHONPATH names besides the repository.
    """
    env = dict(os.environ)
    inherited = [os.path.abspath(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [str(ROOT), *(inherited if python_path is None else map(str, python_path))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    env["PYTHONUNBUFFERED"] = "1"
    for name in ("ORTGPU_ALLOW_CPU", "PYTHONWARNINGS"):
        env.pop(name, None)
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env
