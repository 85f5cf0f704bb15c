"""Advice in projects of uv, Poetry, PDM and pipenv: executed as printed, then their own next step.

The project has onnxruntime-gpu without CUDA, and a package that asks for onnxruntime too. On demand, since each project
fetches 2 GB: ``pytest -m matrix``.
"""

from __future__ import annotations

import ctypes.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pip._internal.models.index import PyPI

from tests.lab.environments import install, network_variables
from tests.lab.models import Models

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        ctypes.util.find_library("cublas") is not None or any(Path("/usr/local").glob("cuda*/lib64/libcublas.so.*")),
        reason="this machine has CUDA libraries of its own, and a program finds them in any environment",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
OF_ORTGPU = ("numpy", "onnx", "nvidia-ml-py", "rich", "click")
REQUIREMENTS = ("magika", "onnxruntime-gpu>=1.28", *OF_ORTGPU)

PROGRAM = """
import json, sys
from ortgpu import GPUError, GPUSession
found = []
try:
    GPUSession(sys.argv[1])
except GPUError as error:
    for each in (error, *error.others):
        fixes = [[str(fix), fix.executable] for fix in each.fixes]
        found.append([type(each).__name__, each.summary, fixes])
print("found", json.dumps(found))
"""


@dataclass(frozen=True)
class Tool:
    """``sync`` makes the environment what the lock file says, without anything else."""

    name: str
    add: str
    install: str
    sync: str
    requirements: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


TOOLS = (
    Tool("uv", "uv add", "uv sync", "uv sync", ("uv",)),
    Tool("poetry", "poetry add", "poetry install", "poetry sync", ("poetry",)),
    # Later ones import what releases of hishel and httpx do not have together.
    Tool("pdm", "pdm add", "pdm install", "pdm sync --clean", ("pdm==2.27.0", "unearth==0.17.5", "hishel==1.1.10")),
    Tool("pipenv", "pipenv install", "pipenv install", "pipenv clean && pipenv sync", ("pipenv",)),
)


@dataclass(frozen=True)
class Project:
    tool: Tool
    folder: Path
    variables: Mapping[str, str]
    model: str

    def call(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def found(self) -> dict[str, list[tuple[str, list[list[Any]]]]]:
        """Summaries and fixes of each error, by type, in a program that the tool runs."""
        printed = self.call(f"{self.tool.name} run python program.py {self.model}")
        (line,) = (line for line in printed.splitlines() if line.startswith("found "))
        errors: dict[str, list[tuple[str, list[list[Any]]]]] = {}
        for name, summary, fixes in json.loads(line.removeprefix("found ")):
            errors.setdefault(name, []).append((summary, fixes))
        return errors

    def configure(self, text: str) -> None:
        with (self.folder / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(text)


def _variables(programs: Path, home: Path) -> Mapping[str, str]:
    return {
        **network_variables(home / "pip"),
        **{f"XDG_{kind}_HOME": str(home / kind) for kind in ("CACHE", "DATA", "STATE")},
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "POETRY_VIRTUALENVS_IN_PROJECT": "1",
        "PIPENV_VENV_IN_PROJECT": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture(params=TOOLS, ids=str)
def project(request: pytest.FixtureRequest, tmp_path: Path, models: Models) -> Iterator[Project]:
    tool: Tool = request.param
    programs = install(tool.name, tool.requirements).parents[2] / "bin"
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    made = Project(tool, folder, _variables(programs, tmp_path), str(models.relu))
    if tool.name == "pipenv":
        made.call(f"pipenv install {' '.join(map(repr, REQUIREMENTS))}")
    else:
        python = "{}.{}".format(*sys.version_info)
        made.configure(
            f'[project]\nname = "project"\nversion = "1"\nrequires-python = "=={python}.*"\n'
            f"dependencies = {json.dumps(REQUIREMENTS)}\n[tool.pdm]\ndistribution = false\n"
            "[tool.poetry]\npackage-mode = false\n[[tool.poetry.source]]\n"
            # A mirror need not have the interface that Poetry prefers.
            f'name = "index"\npriority = "primary"\nurl = "{PyPI.simple_url}"\n'
        )
        made.call(tool.install)
    yield made
    shutil.rmtree(tmp_path)


def test_what_is_printed_mends_and_lasts(project: Project) -> None:
    _add_the_libraries(project)
    _keep_the_cpu_package_out(project)


def test_an_environment_for_one_run(tmp_path: Path, models: Models) -> None:
    """pip would install into a folder that is gone by then."""
    uv = install("uv", ["uv"]).parents[2] / "bin"
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    project = Project(TOOLS[0], tmp_path, _variables(uv, tmp_path), str(models.relu))

    def found(options: str) -> list[Any]:
        program = f"--no-project --python {sys.executable} {options} program.py {project.model}"
        printed = project.call(f"uv run {' '.join(f'--with {name}' for name in OF_ORTGPU)} {program}")
        errors: list[Any] = json.loads(printed.partition("found ")[2])
        return errors

    (name, _, [(fix, _)]), *_ = found("--with onnxruntime")
    assert name == "CPUOnlyPackageError"
    options, _, out = fix.partition(": add ")[2].partition(" to uv run, leave out ")
    assert out == "onnxruntime"
    assert "CPUOnlyPackageError" not in [name for name, *_ in found(options)]
    shutil.rmtree(tmp_path)


def _add_the_libraries(project: Project) -> None:
    ((_, fixes), *_) = project.found()["LibraryNotFoundError"]
    (fix,) = [text for text, executable in fixes if executable]
    assert fix.startswith(f"{project.tool.add} ")
    project.call(fix)
    assert "LibraryNotFoundError" not in project.found()
    project.call(project.tool.sync)
    assert "LibraryNotFoundError" not in project.found()


def _keep_the_cpu_package_out(project: Project) -> None:
    ((_, fixes),) = project.found()["ConflictingPackagesError"]
    (now, is_command), (later, _) = fixes
    assert is_command
    project.call(now)
    if project.tool.name != "uv":  # whose run command makes the environment what the lock file says
        assert "ConflictingPackagesError" not in project.found()
        assert "remove onnxruntime from the project" in later
        return
    (setting,) = re.findall(r"[a-z-]+ = \[.*?\](?= under \[tool\.uv\])", later)
    project.configure(f"[tool.uv]\n{setting}\n")
    project.call(now)
    found = project.found()
    assert not {"ConflictingPackagesError", "BrokenPackageError", "CPUOnlyPackageError"} & set(found), found
