"""The command line as the tests call it, and what it is given to show."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ortgpu.cli.report import SessionReport, latency_of
from ortgpu.errors import DriverNotFoundError, LibraryNotFoundError, manual, shell
from ortgpu.provider.devices import Device
from ortgpu.provider.placement import PlacedNode, Placement
from tests.support.children import Child
from tests.support.fork_server import Forked, fork_python, start_forked

DEADLINE = 110
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the state of most machines, and one that any machine can be put into
ESCAPE = "\x1b"


def ortgpu(*arguments: str, env: dict[str, str] | None = None) -> Child:
    """Run ``python -m ortgpu`` with its output in files, in a forked child: see tests/support/fork_server.py."""
    variables = {**os.environ, "FORCE_COLOR": "", **(env or {})}
    return fork_python(["-m", "ortgpu", *arguments], env=variables, deadline=DEADLINE)


def shown_in_a_terminal(
    *arguments: str, columns: int, env: dict[str, str] | None = None, cwd: str | os.PathLike[str] | None = None
) -> str:
    """Run ``python -m ortgpu`` in a terminal, and return what is there at its end, with colours, unfolded."""
    import fcntl  # here, since Windows has neither of them
    import termios

    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR")
    without = {name: value for name, value in os.environ.items() if name not in unset}
    command, variables = ["-m", "ortgpu", *arguments], {**without, "TERM": "xterm-256color", **(env or {})}
    child: Forked | subprocess.Popen[bytes] | None = (
        start_forked(command, variables, [its] * 3) if cwd is None else None
    )
    if child is None:
        child = subprocess.Popen([sys.executable, *command], stdin=its, stdout=its, stderr=its, env=variables, cwd=cwd)
    os.close(its)
    written = b""
    while True:
        try:
            written += os.read(ours, 1 << 16)
        except OSError:  # Linux says EIO once the last process has closed it
            break
    os.close(ours)
    child.wait(DEADLINE)
    # A spinner writes over its line with \r, and at its end goes up and clears it.
    text = re.sub(r"[^\n]*\n(?:\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K", "", written.decode().replace("\r\n", "\n"))
    return "\n".join(each.rpartition("\r")[2] for each in text.split("\n"))


def is_clean(result: Child) -> bool:
    return "Traceback" not in result.stdout + result.stderr and ESCAPE not in result.stdout


def example_error() -> LibraryNotFoundError:
    return LibraryNotFoundError(
        "2 libraries that the provider needs were not found",
        missing=("libcublas.so.13", "libcurand.so.10"),
        evidence=["libcublas.so.13: in no folder", "libcurand.so.10: [in] no folder"],
        fixes=[shell("pip install 'ortgpu[cuda]'"), manual("Or load [bold]them[/bold] yourself.")],
        others=[DriverNotFoundError("there is no driver")],
    )


def example_report() -> SessionReport:
    return SessionReport(
        device=Device("cuda", 1, "GPU-0", "NVIDIA H200", (9, 0), 140 << 30, "580.65.06"),
        placement=Placement(
            (
                PlacedNode("gemm", "Gemm", "", "CUDAExecutionProvider", "compute"),
                PlacedNode("unique", "Unique", "", "CPUExecutionProvider", "compute"),
                PlacedNode("shape", "Shape", "", "CPUExecutionProvider", "shape"),
            )
        ),
        providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
        options={"use_tf32": "1", "device_id": "1"},
        gpu_memory=500 << 20,
        latency=latency_of((0.075, 0.0003, 0.0002, 0.0004)),
        latency_error=None,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Described:
    name: str
    type: str
    shape: Sequence[int | str | None]
