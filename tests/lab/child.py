"""Code in a child process: with a deadline, a known environment, and all of its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.lab.overlay import Overlay
from tests.lab.stubs import NVML, Cuda, Stubs

PROBE = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")

#: For a child whose working directory is removed. Before 3.13.3, Python 3.13 then raises SystemError where a module
#: lacks an attribute, unless the search path is without that folder (CPython issue 130932): NumPy and socket meet it.
WITHOUT_ITS_FOLDER: Mapping[str, str] = {"PYTHONSAFEPATH": "1"} if (3, 13) <= sys.version_info < (3, 13, 3) else {}

#: Longer than any case needs on a slow machine: a case that reaches it hangs.
DEADLINE = 60.0


@dataclass(frozen=True)
class ChildResult:
    """How a child process ended. ``json``: what it handed to ``report()``, or None; ``returncode`` -n: signal n.

    ``first_status``: exit status of the commands that were to be run first, None where there were none.
    """

    returncode: int
    stdout: str
    stderr: str
    json: Any
    timed_out: bool
    seconds: float
    first_status: int | None = None

    @property
    def output(self) -> str:
        """Everything that the child wrote, for the message of an assertion."""
        return f"exit status {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def ok(self) -> ChildResult:
        """This result, or AssertionError with the output when the child did not exit with 0."""
        assert self.returncode == 0, self.output
        return self


@dataclass(frozen=True)
class Problem:
    """An exception in the child, as plain data. What only ``ortgpu``'s errors have is empty for others."""

    type: str
    bases: tuple[str, ...]
    text: str
    code: str | None = None
    summary: str | None = None
    evidence: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    others: tuple[Problem, ...] = ()
    remedies: tuple[Mapping[str, Any], ...] = ()  # the fixes with their kind and what they need
    details: Mapping[str, Any] = field(default_factory=dict)
    severity: str | None = None
    consequence_of: str | None = None

    @property
    def other_types(self) -> tuple[str, ...]:
        return tuple(other.type for other in self.others)


@dataclass(frozen=True)
class Warned:
    """A Python warning in the child, and the error that a ``CPUExecutionWarning`` carries."""

    type: str
    text: str
    error: Problem | None


@dataclass(frozen=True)
class Outcome:
    """What came of opening a session in a child: an error, or the providers that it is bound to."""

    error: Problem | None
    providers: tuple[str, ...] | None
    device: str | None
    warnings: tuple[Warned, ...]
    result: ChildResult

    @property
    def signs(self) -> frozenset[str]:
        """By which ways the child said that something is wrong: aborted, raised, warned, printed, logged."""
        return frozenset(
            name
            for name, present in {
                "aborted": self.error is None and self.providers is None,
                "raised": self.error is not None,
                "warned": bool(self.warnings),
                "printed": bool(self.result.stdout.strip()),
                "logged": "onnxruntime:" in self.result.stderr,
            }.items()
            if present
        )


def run_child(
    code: str | None = None,
    *,
    argv: Sequence[str] = (),
    overlay: Overlay,
    libraries: Sequence[Path] = (),
    hiding: Stubs | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float = DEADLINE,
    first: str | None = None,
) -> ChildResult:
    """Run ``code``, or the interpreter's arguments ``argv``, in an overlay's interpreter, and wait for its end.

    The child sees only what it is given: PATH to the overlay and the system's tools, a home of its own, no variable of
    this process, and, when ``hiding`` brings the libraries for it, nothing of CUDA that this machine has. ``libraries``
    are found by the loader as if installed. A variable that is None in ``env`` is taken out of those defaults. ``code``
    may call ``report(value)``. ``first`` is shell text, run by /bin/sh in the process that then becomes the
    interpreter: what it exports, unsets or installs is in force.

    The child leads a process group that is killed at the deadline, and after the child has ended: nothing it started
    survives. Output is what was written to its file descriptors, by Python or not.
    """
    with tempfile.TemporaryDirectory(prefix="ortgpu-lab-") as scratch:
        home = Path(scratch)
        report = home / "report.json"
        (home / "work").mkdir()
        variables = {
            **_variables(overlay, libraries, hiding, home),
            "LAB_REPORT": str(report),
            "LAB_FIRST_STATUS": str(home / "status"),
            **(env or {}),
        }
        command = [str(overlay.python), *([*argv] if code is None else ["-c", f"{PROBE}\n{code}", *argv])]
        if first is not None:
            script = f'{first}\nprintf %s $? > "$LAB_FIRST_STATUS"\nexec "$@"'
            command = ["/bin/sh", "-c", script, "sh", *command]
        started = time.monotonic()
        returncode, timed_out = _run_to_its_end(command, variables, home, cwd or home / "work", timeout)
        return ChildResult(
            returncode=returncode,
            stdout=(home / "stdout").read_text(encoding="utf-8", errors="replace"),
            stderr=(home / "stderr").read_text(encoding="utf-8", errors="replace"),
            json=json.loads(report.read_text(encoding="utf-8")) if report.exists() else None,
            timed_out=timed_out,
            seconds=time.monotonic() - started,
            first_status=int(status.read_text(encoding="utf-8")) if (status := home / "status").exists() else None,
        )


def _variables(overlay: Overlay, libraries: Sequence[Path], hiding: Stubs | None, home: Path) -> dict[str, str | None]:
    return {
        "PATH": os.pathsep.join([str(overlay.python.parent), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": str(home),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "VIRTUAL_ENV": str(overlay.root),
        "PYTHONDONTWRITEBYTECODE": "1",  # the overlay's folders may be those of the real environment
        "LD_LIBRARY_PATH": os.pathsep.join(str(library.parent) for library in libraries) or None,
        "LD_AUDIT": str(hiding.hide_from_loader) if hiding else None,
        "LD_PRELOAD": str(hiding.hide_from_search) if hiding else None,
    }


def _run_to_its_end(
    command: Sequence[str], variables: Mapping[str, str | None], home: Path, cwd: Path, timeout: float
) -> tuple[int, bool]:
    """The exit status, and whether it was the deadline that ended it."""
    timed_out = False
    with (home / "stdout").open("wb") as stdout, (home / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={name: value for name, value in variables.items() if value is not None},
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):  # the usual case: nobody of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, timed_out


@dataclass(frozen=True)
class Machine:
    """An overlay, a driver or none, an NVML or none, and variables: everything that a child sees of a machine."""

    overlay: Overlay
    stubs: Stubs
    cuda: Cuda | None = None
    nvml: NVML | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)

    def but(self, **changes: Any) -> Machine:
        """The same machine with other parts, on the same overlay."""
        return replace(self, **changes)

    def run(
        self,
        code: str | None = None,
        *,
        argv: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout: float = DEADLINE,
        first: str | None = None,
    ) -> ChildResult:
        """Run code, or an argument list such as ``["-m", "ortgpu", "doctor"]``, on this machine."""
        libraries = [*([self.stubs.cuda] if self.cuda else []), *([self.stubs.nvml] if self.nvml else [])]
        variables = {
            **(self.cuda.variables() if self.cuda else {}),
            **(self.nvml.variables() if self.nvml else {}),
            **self.env,
            **(env or {}),
        }
        return run_child(
            code,
            argv=argv,
            overlay=self.overlay,
            libraries=libraries,
            hiding=self.stubs,
            env=variables,
            cwd=cwd,
            timeout=timeout,
            first=first,
        )

    def open_session(self, model: Path, **arguments: Any) -> Outcome:
        """What ``GPUSession(model, **arguments)`` does here. Arguments must have a ``repr`` that is their source."""
        return outcome_of(self.run(f"open_session({str(model)!r}, {arguments!r})"))

    def open_plain_session(self, model: Path, **arguments: Any) -> Outcome:
        """What ``onnxruntime.InferenceSession`` does here, after ``preload_dlls()`` unless ``preload=False``."""
        arguments.setdefault("providers", ["CUDAExecutionProvider"])
        return outcome_of(self.run(f"open_plain_session({str(model)!r}, {arguments!r})"))


def outcome_of(result: ChildResult) -> Outcome:
    """What a child reported that opened a session."""
    seen = result.json or {}
    return Outcome(
        error=problem_from(seen.get("error")),
        providers=tuple(seen["providers"]) if seen.get("providers") is not None else None,
        device=seen.get("device"),
        warnings=tuple(Warned(w["type"], w["text"], problem_from(w["error"])) for w in seen.get("warnings", ())),
        result=result,
    )


def problem_from(data: dict[str, Any] | None) -> Problem | None:
    if data is None:
        return None
    others = tuple(problem for problem in map(problem_from, data["others"]) if problem)
    lists = {name: tuple(data[name]) for name in ("bases", "evidence", "fixes", "remedies")}
    return Problem(**{**data, **lists, "others": others})
