"""Open the driver, the provider and a session in a child process: the last step of a diagnosis.

NVML may work where CUDA does not, and a library may abort the process that opens it, or never return. The child
reports each step before and after it is tried; the parent kills it, with all that it started, at a deadline.
"""

from __future__ import annotations

import json
import os
import tempfile
import time

from ...environment.child import run_python, signal_name
from ...model.files import write_temporary
from .result import ProbeResult, ProbeStep

MARK = "ORTGPU-PROBE "  # the start of a line of the report; libraries print the rest


def run_probe(model: str | os.PathLike[str] | bytes | None = None, *, timeout: float = 30.0) -> ProbeResult:
    """Run the child and wait for it, at most ``timeout`` seconds.

    Nothing is raised for what happens to it, nor where it cannot be started: ``died_in`` is "start" then. A model in
    bytes is written to a temporary file that no other user can read.
    """
    try:
        if not isinstance(model, bytes):
            return run_probe_child(_OPEN, os.path.abspath(os.fsdecode(model)) if model else "", timeout=timeout)
        with tempfile.TemporaryDirectory(prefix="ortgpu-probe-") as folder:
            copy = os.path.join(folder, "model")
            write_temporary(copy, model)
            return run_probe_child(_OPEN, copy, "bytes", timeout=timeout)
    except OSError as error:
        return _not_started(str(error), 0.0)


def run_probe_child(code: str, *arguments: str, timeout: float) -> ProbeResult:
    """Run ``code``, which calls a function of the module ``child``, in a process of its own."""
    started = time.monotonic()
    ended = run_python(f"from {__package__} import child; {code}", *arguments, timeout=timeout, together=True)
    seconds = time.monotonic() - started
    if ended.returncode is None and not ended.timed_out:
        return _not_started(ended.errors, seconds)
    return parse_report(ended.output, ended.returncode, seconds)


def _both_ends(lines: list[str]) -> list[str]:
    """Keep the first and the last lines: OpenBLAS prints a cause before NumPy's traceback, others print it last."""
    return lines if len(lines) <= 30 else [*lines[:10], *lines[-20:]]


def _not_started(why: str, seconds: float) -> ProbeResult:
    return ProbeResult((), False, None, None, False, "start", seconds, why)


# The guard is passed in, because it stands above the diagnosis.
_OPEN = "from ortgpu import uninstall; child.main(uninstall, *sys.argv[1:])"


def parse_report(text: str, returncode: int | None, seconds: float) -> ProbeResult:
    """Return the child's output as a result. ``returncode`` None: it was killed at the deadline."""
    steps: list[ProbeStep] = []
    current: str | None = None
    opening: str | None = None
    rest: list[str] = []
    before = 0  # the number of other lines when the current step began
    completed = False
    for line in text.splitlines():
        if not line.startswith(MARK):
            rest.append(line)
            continue
        try:
            entry = json.loads(line[len(MARK) :])
        except ValueError:  # cut off by the child's death
            continue
        if not isinstance(entry, dict):  # a library printed it
            continue
        if "begin" in entry:
            current, before = entry["begin"], len(rest)
        elif "end" in entry:
            data = entry.get("data", {})
            if not entry.get("ok") and (printed := [each for each in rest[before:] if each.strip()]):
                data = {**data, "printed": _both_ends(printed)}
            steps.append(ProbeStep(str(entry["end"]), bool(entry.get("ok")), entry.get("detail", ""), data))
            current = opening = None
        opening = entry.get("opening", opening)
        completed = completed or "done" in entry
    name = signal_name(-returncode) if returncode is not None and returncode < 0 else None
    return ProbeResult(
        tuple(steps),
        completed,
        returncode,
        name,
        returncode is None,
        None if completed else current or "start",
        seconds,
        "\n".join(rest[-20:]),
        None if completed else opening,
    )
