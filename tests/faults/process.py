"""Group G: the process, and what surrounds it. What is odd here and no fault must not become the finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tests.faults.case import MENDED, Break, Case, in_group, library, nothing, removing
from tests.lab import WITHOUT_ITS_FOLDER, Overlay
from tests.lab.fixtures import Lab

NO_DRIVER = ("driver", "host")


def leftovers_of_pip(_lab: Lab, overlay: Overlay) -> None:
    overlay.replace("~nnxruntime_gpu-1.30.0.dist-info/METADATA", b"Name: onnxruntime-gpu\nVersion: 1.30.0\n")
    overlay.replace("~nxruntime/__init__.py", b"")


def surrounded(
    name: str,
    *,
    breaks: Break = nothing,
    prelude: str = "",
    env: Mapping[str, str] | None = None,
    ask: Literal["session", "probe"] = "session",
) -> Case:
    """A healthy installation in odd surroundings, on a machine without a driver: that is the finding."""
    return Case(
        name,
        MENDED,
        ("libcuda.so.1", "NVIDIA driver"),
        breaks,
        prelude=prelude,
        ask=ask,
        cpu=ask == "session",
        env=env or {},
        silent_about=("library-not-found", "broken-package", "conflicting"),
        needs=NO_DRIVER,
    )


CASES = in_group(
    "G",
    [
        surrounded("working-directory-deleted", prelude="import os; os.rmdir(os.getcwd())", env=WITHOUT_ITS_FOLDER),
        surrounded("garbage-to-preload", env={"LD_PRELOAD": "/nonexistent/libgarbage.so"}),
        surrounded(
            "locale-without-utf-8", env={"LANG": "C", "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        ),
        surrounded("optimised-interpreter", env={"PYTHONOPTIMIZE": "2"}),
        surrounded("frozen-program", prelude="import sys; sys.frozen = True"),
        surrounded("no-path-and-no-home", env={"PATH": "", "HOME": "/dev/null/home"}),
        surrounded("leftovers-of-an-interrupted-pip", breaks=leftovers_of_pip),
        surrounded("standard-streams-closed", prelude="import os; os.close(0); os.close(1)"),
        surrounded(
            "few-file-descriptors", prelude="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
        ),
        surrounded(
            "search-path-with-nonsense",
            prelude="import sys; sys.path[:0] = ['/nonexistent', 'x' * 5000, '', '/dev/null']",
        ),
        surrounded(
            "search-path-with-no-strings",
            prelude="import pathlib, sys; sys.path[:0] = [None, b'/x', pathlib.Path('/y'), 3]",
        ),
        surrounded("interpreter-unknown", prelude="import sys; sys.executable = None", ask="probe"),
        Case(
            "server-that-says-another-interpreter",
            "LibraryNotFoundError",
            ("libcurand.so.10",),
            removing(library("libcurand")),
            # As under uWSGI with a virtual environment: that which the environment was made from
            prelude="import os, sys; sys.executable = os.path.realpath(sys.executable)",
            others=("DriverNotFoundError",),
            plain="printed logged",
            after=MENDED,
        ),
        surrounded("frozen-program-that-probes", prelude="import sys; sys.frozen = True", ask="probe"),
    ],
)
