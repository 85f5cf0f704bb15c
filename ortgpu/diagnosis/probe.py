"""The last step of a diagnosis: really open the driver, the provider and a session, in a child process.

NVML being well says nothing of CUDA, and a library may abort the process that opens it, or never return. The child
reports each step before and after it is tried, so that a death has a place; the parent has a deadline and kills the
child with all that it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from ..environment.cuda import CudaDevice, CudaState

MARK = "ORTGPU-PROBE "  # what a line of the child's report begins with; everything else on its output is other people's


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One thing that was tried. ``detail``: what it gave, or the words of its failure."""

    name: str
    ok: bool
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the child did. ``died_in``: the step during which it was killed, crashed or ran out of time."""

    steps: tuple[ProbeStep, ...]
    completed: bool
    returncode: int | None
    signal: str | None
    timed_out: bool
    died_in: str | None
    seconds: float
    output: str  # the end of what the libraries printed

    def step(self, name: str) -> ProbeStep | None:
        return next((step for step in self.steps if step.name == name), None)

    @property
    def cuda(self) -> CudaState | None:
        """The driver's answer, as if it had been asked in this process."""
        step = self.step("driver")
        if step is None or "code" not in step.data:
            return None
        devices = step.data.get("devices")
        return CudaState(
            step.data["code"],
            None if devices is None else tuple(_device(entry) for entry in devices),
            os.getpid(),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _device(entry: dict[str, Any]) -> CudaDevice:
    capability = entry["compute_capability"]
    return CudaDevice(**{**entry, "compute_capability": tuple(capability) if capability else None})


def run_probe(model: str | os.PathLike[str] | bytes | None = None, *, timeout: float = 30.0) -> ProbeResult:
    """Run the child and wait for it, at most ``timeout`` seconds. Raises nothing for what happens to it."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile(suffix=".onnx", delete=False) as copy:
        try:
            if isinstance(model, bytes):
                copy.write(model)
                copy.flush()
            path = copy.name if isinstance(model, bytes) else (os.path.abspath(model) if model is not None else "")
            child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                returncode: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                _kill(child)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        finally:
            copy.close()
            os.unlink(copy.name)
    return parse_report(text, returncode, time.monotonic() - started)


# sys.path travels as it is: the child has to see the environment that this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ortgpu.diagnosis.probe_child import main; main(sys.argv[2])"
)


def parse_report(text: str, returncode: int | None, seconds: float) -> ProbeResult:
    """The child's output as a result. ``returncode`` None: it had to be killed at the deadline."""
    steps: list[ProbeStep] = []
    current: str | None = None
    rest: list[str] = []
    completed = False
    for line in text.splitlines():
        if not line.startswith(MARK):
            rest.append(line)
            continue
        try:
            entry = json.loads(line[len(MARK) :])
        except ValueError:  # cut off by the child's death
            continue
        if "begin" in entry:
            current = entry["begin"]
        elif "end" in entry:
            steps.append(ProbeStep(entry["end"], entry["ok"], entry.get("detail", ""), entry.get("data", {})))
            current = None
        completed = completed or "done" in entry
    name = None
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
    return ProbeResult(
        tuple(steps),
        completed,
        returncode,
        name,
        returncode is None,
        None if completed else current or "start",
        seconds,
        "\n".join(rest[-20:]),
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group, the child itself included."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    except (ProcessLookupError, PermissionError):
        pass  # it ended by itself
    child.wait()
