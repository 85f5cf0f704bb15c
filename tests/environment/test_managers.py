"""The manager of an environment: known by the lock file beside its .venv."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ = """
import sys
sys.path.insert(0, sys.argv[1])
from ortgpu.environment.packages.installer import read_installer
if read_installer().for_one_run: sys.exit("for one run")
found = read_installer().manager
print(*(found.name, found.lock, found.add) if found is not None else ("none",), sep="\\n")
"""
LOCKS = {"uv": "uv.lock", "poetry": "poetry.lock", "pdm": "pdm.lock", "pipenv": "Pipfile.lock"}
ADD = {"uv": "uv add", "poetry": "poetry add", "pdm": "pdm add", "pipenv": "pipenv install"}


@dataclass(frozen=True)
class Place:
    """A project, and an environment somewhere."""

    project: Path
    environment: Path
    tools: Path

    def read(self, folder: Path | None = None) -> list[str]:
        done = subprocess.run(
            [self.environment / "bin" / "python", "-c", READ, ROOT],
            cwd=folder or self.project,
            env={"PATH": f"{self.tools}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.splitlines()


def place(root: Path, environment: str, *managers: str) -> Place:
    """With these managers on PATH, and their lock files in the project."""
    project, tools = root / "a project", root / "tools"
    for folder in (project, tools):
        folder.mkdir()
    for name in managers:
        (tools / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tools / name).chmod(0o755)
        (project / LOCKS[name]).touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / environment], check=True, timeout=60)
    return Place(project, root / environment, tools)


@pytest.mark.parametrize("name", LOCKS)
def test_the_environment_beside_the_lock_file(tmp_path: Path, name: str) -> None:
    here = place(tmp_path, "a project/.venv", name)
    lock = str(here.project / LOCKS[name])
    inside = here.project / "inside"
    inside.mkdir()
    assert here.read(inside) == [name, lock, ADD[name]]
    assert here.read(tmp_path) == ["none"], "its command would change the project of another folder"


@pytest.mark.parametrize("name", LOCKS)
def test_an_environment_that_is_not_the_projects(tmp_path: Path, name: str) -> None:
    """What the manager adds goes to its own, not to the one in which this program runs."""
    assert place(tmp_path, "a project/venv", name).read() == ["none"]


def test_several_lock_files_say_nothing(tmp_path: Path) -> None:
    assert place(tmp_path, "a project/.venv", "uv", "poetry").read() == ["none"]


def test_a_manager_that_is_not_here_helps_nobody(tmp_path: Path) -> None:
    """The last stage of an image has the environment alone."""
    here = place(tmp_path, "a project/.venv", "poetry")
    (here.tools / "poetry").unlink()
    assert here.read() == ["none"]


def test_an_environment_that_uv_makes_over_another(tmp_path: Path) -> None:
    here = place(tmp_path, "elsewhere")
    with (here.environment / "pyvenv.cfg").open("a", encoding="utf-8") as file:
        file.write("extends-environment = /usr\n")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        here.read()
    assert raised.value.stderr.strip() == "for one run"
