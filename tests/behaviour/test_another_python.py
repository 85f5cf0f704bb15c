"""Packages of another Python on the search path, as a PYTHONPATH that a module system or ROS sets brings them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.remedies import fixes as remedies
from tests.faults.case import MENDED
from tests.lab import Machine, Overlay
from tests.lab.child import outcome_of
from tests.lab.fixtures import Lab
from tests.support.made_facts import HEALTHY, all_of, engine, observed, part, variables

HERE, OTHER = f"cpython-3{sys.version_info[1]}", "cpython-39"
FOLDER = "lib/python3.9/site-packages"


def belongs_to_other_python(overlay: Overlay, other: Path, *patterns: str) -> None:
    """The same packages once more, with compiled modules for a Python that no release of ONNX Runtime is for."""
    for pattern in patterns:
        for original in overlay.site.glob(pattern):
            for file in (path for path in original.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
                copy = other / file.relative_to(overlay.site).as_posix().replace(HERE, OTHER)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(file)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (("onnxruntime", "onnxruntime_gpu-*", "numpy", "numpy-*"), f"onnxruntime_pybind11_state.{OTHER}-"),
        (("numpy", "numpy-*"), "numpy is imported from {folder}"),
        (("numpy",), "{folder}/numpy/__init__.py is imported instead of the installed numpy"),
    ],
)
def test_it_is_left_to_its_python(lab: Lab, patterns: tuple[str, ...], named: str) -> None:
    """To install there what this Python needs would break the other, and what this one has of its own is whole."""
    machine: Machine = lab.machine()
    folder = lab.folder / FOLDER
    belongs_to_other_python(machine.overlay, folder, *patterns)
    machine = machine.but(env={"PYTHONPATH": str(folder)})
    before = files_of(folder)
    code = f"open_session({str(lab.models.relu)!r}, {{}})"
    error = outcome_of(machine.run(code)).error
    assert error is not None
    assert error.type == "BrokenPackageError", error.text
    assert named.format(folder=folder) in error.text
    assert error.fixes == ("unset PYTHONPATH",)
    mended = outcome_of(machine.run(code, first=error.fixes[0])).error
    assert mended is not None
    assert mended.type == MENDED, mended.text
    assert files_of(folder) == before


def test_where_this_python_has_none_one_is_installed() -> None:
    home = "/apps/lib/python3.9/site-packages"
    extension = f"{home}/onnxruntime/capi/onnxruntime_pybind11_state.{OTHER}-x86_64-linux-gnu.so"
    facts = all_of(
        engine(folder=f"{home}/onnxruntime", extension=extension),
        variables(PYTHONPATH=f"/mine:{home}"),
        observed(import_error="ModuleNotFoundError: No module named 'onnxruntime.capi.onnxruntime_pybind11_state'"),
        part("installer", own=("/venv",), install="pip install"),
    )(HEALTHY)
    error = find_problems(facts)[0]
    assert error.fixes[0].startswith("export PYTHONPATH=/mine && pip install 'onnxruntime-gpu")
    assert [problem.code for problem in find_problems(facts) if problem.consequence_of is None] == ["broken-package"]


@pytest.mark.parametrize(
    ("folder", "other"),
    [
        ("/opt/ros/lib/python3.10/site-packages", True),
        ("/opt/ros/local/lib/python3.10/dist-packages", True),
        ("/usr/lib/python3/dist-packages", True),
        ("/other/lib/python3.12/site-packages", False),  # of this version: what is compiled there can be used
        ("/shared/lib/python3.12/site-packages", False),
        ("/shared/lib/python3/dist-packages", False),  # behind this environment's own: that of its base
        ("/srv/packages", False),
    ],
)
def test_a_folder_of_another_python_is_known_by_its_name(folder: str, other: bool) -> None:
    hidden = tuple(f"/shared/lib/{name}" for name in ("python3.12/site-packages", "python3/dist-packages"))
    facts = part("installer", own=("/venv",), hidden=hidden)(HEALTHY)
    assert remedies.belongs_to_other_python(facts.environment, folder) is other
