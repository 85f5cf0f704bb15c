"""Facts about MPI: the launcher on the path, and the library that mpi4py loads. MPI is not started."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ...environment.child import parse_answer, run, run_python

_LAUNCHERS: Final = ("mpirun", "mpiexec")
_SETTINGS: Final = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_")
_VERSIONS: Final = (
    ("Open MPI", re.compile(r"\(Open MPI\) ([0-9]+(?:\.[0-9]+)*)")),  # "mpirun (Open MPI) 4.1.8"
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*Version ([0-9]+(?:\.[0-9]+)*)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+([0-9]+(?:\.[0-9]+)*)")),  # and what is made from MPICH
)
# MPI allows this question before MPI_Init, because the vendor is compiled into the library.
_ASK_LIBRARY: Final = """
import json, mpi4py
print(json.dumps([mpi4py.__version__]), flush=True)
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps([mpi4py.__version__, *MPI.get_vendor()]))
"""


@dataclass(frozen=True, slots=True)
class MpiVersion:
    vendor: str  # "Open MPI", "MPICH", "Intel MPI"
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI of this machine. None means unknown; for ``mpirun`` and ``mpi4py`` it means absent."""

    mpirun: str | None  # path of the launcher
    launcher: MpiVersion | None  # by its own word
    mpi4py: str | None  # its version
    library: MpiVersion | None  # the one that mpi4py loads
    settings: Mapping[str, str]  # OMPI_MCA_*, OMPI_ALLOW_* and their like, which configure Open MPI
    error: str | None = None  # why mpi4py cannot load a library


def read_mpi(*, timeout: float = 20.0) -> Mpi:
    """Ask the launcher, and mpi4py in a child process, which MPI this is. Nothing raises."""
    mpirun = find_mpirun()
    said = run([mpirun, "--version"], timeout=timeout) if mpirun is not None else None
    launcher = parse_launcher_version(said.output + said.errors) if said is not None else None
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    asked = run_python(_ASK_LIBRARY, timeout=timeout)
    mpi4py, *vendor = parse_answer(asked.output) or [None]
    library = error = None
    if asked.ok and vendor:
        library = MpiVersion(vendor[0], tuple(vendor[1]))
    elif "No module named 'mpi4py'" not in asked.errors:
        error = f"no answer within {timeout:g} s" if asked.timed_out else parse_last_error(asked.errors) or "no answer"
    return Mpi(mpirun, launcher, mpi4py, library, settings, error)


def find_mpirun() -> str | None:
    """Return the launcher on PATH, else the one beside the interpreter, where pip installs it."""
    beside = os.path.dirname(sys.executable or "")
    for folder in (None, beside):
        for name in _LAUNCHERS:
            if (path := shutil.which(name, path=folder)) is not None:
                return path
    return None


def parse_launcher_version(text: str) -> MpiVersion | None:
    """Return the MPI from the output of ``mpirun --version``."""
    for vendor, pattern in _VERSIONS:
        if match := pattern.search(text):
            return MpiVersion(vendor, tuple(map(int, match[1].split("."))))
    return None


def parse_last_error(traceback: str) -> str | None:
    """Return the exception at the end of a traceback, with all its lines."""
    starts = list(re.finditer(r"^\w[\w.]*(Error|Exception)\b.*", traceback, re.MULTILINE))
    text = traceback[starts[-1].start() :] if starts else traceback[-500:]
    return text.strip() or None
