"""A machine of the lab: a child process there sees nothing else, and what came of it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.lab.overlay import Overlay
from tests.lab.stubs import NVML, Cuda, Stubs
from tests.support.children import (
    DEADLINE_VARIABLE,
    REPORT_VARIABLE,
    ROOT,
    Child,
    python_arguments,
    run_child,
)

PROBE = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")

#: For a child whose working directory is removed. Before 3.13.3, Python 3.13 then raises SystemError where a module
#: lacks an attribute, unless the search path is without that folder (CPython issue 130932): NumPy and socket meet it.
WITHOUT_ITS_FOLDER: Mapping[str, str] = {"PYTHONSAFEPATH": "1"} if (3, 13) <= sys.version_info < (3, 13, 3) else {}

#: Longer than any case needs on a slow machine: a case that reaches it hangs.
DEADLINE = 60.0


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
    result: Child
    again: Outcome | None = None  # of the second session, where one was asked for

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
    ) -> Child:
        """Run ``code``, or the interpreter's arguments ``argv``, in the overlay's interpreter, and wait for its end.

        The child sees only what it is given: PATH to the overlay and the system's tools, a home of its own, no variable
        of this process, and nothing of CUDA that this machine has. The loader finds the stubs as if installed. A
        variable that is None in ``env`` is taken out of those defaults. ``code`` may call ``report(value)``. ``first``
        is shell text, run by /bin/sh in the process that then becomes the interpreter: what it exports, unsets or
        installs is in force, and its exit status is among the reports as "first_status".
        """
        libraries = [*([self.stubs.cuda] if self.cuda else []), *([self.stubs.nvml] if self.nvml else [])]
        command = [str(self.overlay.python), *([*argv] if code is None else ["-c", f"{PROBE}\n{code}", *argv])]
        if first is not None:
            script = f"""{first}\nprintf '["first_status", %s]\\n' $? >> "${REPORT_VARIABLE}"\nexec "$@\""""
            command = ["/bin/sh", "-c", script, "sh", *command]
        with tempfile.TemporaryDirectory(prefix="ortgpu-lab-") as home:
            variables: dict[str, str | None] = {
                "PATH": os.pathsep.join([str(self.overlay.python.parent), "/usr/local/bin", "/usr/bin", "/bin"]),
                "HOME": home,
                "TMPDIR": home,
                "LANG": "C.UTF-8",
                "VIRTUAL_ENV": str(self.overlay.root),
                "PYTHONDONTWRITEBYTECODE": "1",  # the overlay's folders may be those of the real environment
                "OPENBLAS_NUM_THREADS": "1",  # as tests/conftest.py says
                "LD_LIBRARY_PATH": os.pathsep.join(str(library.parent) for library in libraries) or None,
                "LD_AUDIT": str(self.stubs.hide_from_loader),
                "LD_PRELOAD": str(self.stubs.hide_from_search),
                **(self.cuda.variables() if self.cuda else {}),
                **(self.nvml.variables() if self.nvml else {}),
                **self.env,
                **(env or {}),
            }
            if cwd is None:
                cwd = Path(home, "work")
                cwd.mkdir()
            known = {name: value for name, value in variables.items() if value is not None}
            return run_child(command, env=known, deadline=timeout, cwd=cwd)

    def run_program(
        self,
        program: str,
        *arguments: str,
        behind: str = "machines",
        env: Mapping[str, str | None] | None = None,
        timeout: float = DEADLINE,
        first: str | None = None,
    ) -> Child:
        """Run a program of tests/programs, or code behind them: it sees these tests beside the machine."""
        command = [*python_arguments(program, behind), *arguments]
        variables = {DEADLINE_VARIABLE: str(timeout), **(env or {})}
        return self.run(argv=command, env=variables, cwd=ROOT, timeout=timeout + 5, first=first)

    def open_session(self, model: Path, **arguments: Any) -> Outcome:
        """What ``GPUSession(model, **arguments)`` does here. Arguments must have a ``repr`` that is their source."""
        return outcome_of(self.run(f"open_session({str(model)!r}, {arguments!r})"))

    def open_plain_session(self, model: Path, **arguments: Any) -> Outcome:
        """What ``onnxruntime.InferenceSession`` does here, after ``preload_dlls()`` unless ``preload=False``."""
        arguments.setdefault("providers", ["CUDAExecutionProvider"])
        return outcome_of(self.run(f"open_plain_session({str(model)!r}, {arguments!r})"))


def outcome_of(result: Child) -> Outcome:
    """What a child reported that opened a session."""
    return _outcome(result.json or {}, result)


def _outcome(seen: Mapping[str, Any], result: Child) -> Outcome:
    return Outcome(
        error=problem_from(seen.get("error")),
        providers=tuple(seen["providers"]) if seen.get("providers") is not None else None,
        device=seen.get("device"),
        warnings=tuple(Warned(w["type"], w["text"], problem_from(w["error"])) for w in seen.get("warnings", ())),
        result=result,
        again=_outcome(seen["again"], result) if "again" in seen else None,
    )


def problem_from(data: dict[str, Any] | None) -> Problem | None:
    if data is None:
        return None
    others = tuple(problem for problem in map(problem_from, data["others"]) if problem)
    lists = {name: tuple(data[name]) for name in ("bases", "evidence", "fixes", "remedies")}
    return Problem(**{**data, **lists, "others": others})
