"""MPI, as a launcher says of itself and as mpi4py finds it: stub programs, stub modules, real text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortgpu.distributed.environment.mpi import (
    MpiVersion,
    find_mpirun,
    parse_last_error,
    parse_launcher_version,
    read_mpi,
)
from tests.support.made_files import package, program, write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "Open MPI 4.1.8"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "Open MPI 5.0.11"),
        (
            "HYDRA build details:\n    Version:                                 4.0.3\n"
            "    Release Date:                            Tue Nov  8 09:51:06 CST 2022\n",
            "MPICH 4.0.3",
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121\n", "Intel MPI 2021.14"),
        ("mpirun 1.0\n", "None"),
        ("", "None"),
    ],
)
def test_what_a_launcher_says_of_itself(text: str, expected: str) -> None:
    assert str(parse_launcher_version(text)) == expected


def test_launcher_of_path_comes_before_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment/python"))
    assert find_mpirun() is None
    beside = program(tmp_path / "environment/mpiexec", "exit 0")
    assert find_mpirun() == str(beside)
    first = program(tmp_path / "path/mpirun", "exit 0")
    assert find_mpirun() == str(first)


MPI4PY = "__version__ = '9.9'\nclass rc:\n    initialize = True\n"


def stub_mpi4py(folder: Path, mpi: str) -> None:
    write(folder, {"mpi4py/__init__.py": MPI4PY, "mpi4py/MPI.py": mpi})
    package(folder, "mpi4py")


def test_library_of_mpi4py_is_asked_without_starting_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mpi4py(
        tmp_path, "import mpi4py\nassert not mpi4py.rc.initialize\ndef get_vendor(): return 'MPICH', (5, 0, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin/mpirun", "echo 'mpirun (Open MPI) 4.1.8'").parent))
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    found = read_mpi()
    assert (found.launcher, found.library) == (MpiVersion("Open MPI", (4, 1, 8)), MpiVersion("MPICH", (5, 0, 2)))
    assert (found.mpi4py, found.error) == ("9.9", None)
    assert found.settings["OMPI_MCA_pml"] == "ob1"


def test_mpi4py_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cannot load MPI library\\nlibmpi.so.40: cannot open shared object file"
    stub_mpi4py(tmp_path, f"raise RuntimeError('{text}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_mpi()
    assert (found.mpi4py, found.library) == ("9.9", None)
    assert (found.error or "").splitlines() == [
        "RuntimeError: " + line if n == 0 else line for n, line in enumerate(text.split("\\n"))
    ]


def test_library_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mpi4py(tmp_path, "import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_mpi(timeout=2.0).error == "no answer within 2 s"


def test_mpi4py_that_ends_its_process_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mpi4py(tmp_path, "import os\nos._exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_mpi()
    assert (found.mpi4py, found.library, found.error) == ("9.9", None, "no answer")


def test_launcher_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin/mpirun", "exit 1").parent))
    found = read_mpi()
    assert found.mpirun == str(tmp_path / "bin/mpirun")
    assert found.launcher is None


def test_last_error_of_a_traceback() -> None:
    traceback = 'Traceback (most recent call last):\n  File "x", line 1\nValueError: one\n\nRuntimeError: two\nmore\n'
    assert parse_last_error(traceback) == "RuntimeError: two\nmore"
    assert parse_last_error("killed\n") == "killed"
    assert parse_last_error("") is None
