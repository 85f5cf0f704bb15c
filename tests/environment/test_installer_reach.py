"""Which folders an installer changes, which what it installs hides, and whether this user may write there at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.case import AS_A_USER

ROOT = Path(__file__).resolve().parents[2]
READ = """
import dataclasses, json, sys
sys.path.append(sys.argv[1])
from ortgpu.environment.packages.installer import read_installer
found = read_installer()
places = {path: [found.owns(path), found.hides(path)] for path in sys.argv[2:]}
print(json.dumps({**dataclasses.asdict(found), **places}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without packages of its own, with a folder behind and one beside."""
    root = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
    for name in ("ahead", "behind", "environment/inside"):
        (tmp_path / name).mkdir()
    (site,) = root.glob("lib/python*/site-packages")
    (site / "layer.pth").write_text(f"{tmp_path / 'behind'}\n", encoding="utf-8")
    return root


def read(environment: Path, *paths: Path, prelude: str = "", **variables: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [environment / "bin" / "python", "-c", prelude + READ, ROOT, *paths],
        env={**env, "PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_its_own_packages_and_what_they_hide(environment: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    found = read(environment, site, environment.parent / "behind", environment.parent / "ahead")
    assert found["folder"] == str(site.resolve())
    assert found[str(site)] == [True, False]
    assert found[str(environment.parent / "behind")] == [False, True]
    assert found[str(environment.parent / "ahead")] == [False, False]
    assert found["obstacle"] is None


@pytest.mark.parametrize(("folder", "owned"), [("ahead", False), ("environment/inside", True)])
def test_a_folder_of_pythonpath_is_pips_below_its_prefix(environment: Path, folder: str, owned: bool) -> None:
    path = environment.parent / folder
    assert read(environment, path, PYTHONPATH=str(path))[str(path)] == [owned, False]


def test_a_relative_folder_and_a_working_directory_that_is_gone(environment: Path, tmp_path: Path) -> None:
    gone = f"import os, sys; os.mkdir({str(tmp_path / 'gone')!r}); os.chdir({str(tmp_path / 'gone')!r})"
    (site,) = environment.glob("lib/python*/site-packages")
    found = read(environment, prelude=f"{gone}; os.rmdir(os.getcwd()); sys.path.insert(0, 'lib')\n")
    assert found["folder"] == str(site.resolve())


def test_uv_owns_the_packages_alone(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "bin" / "uv").chmod(0o755)
    inside = environment / "inside"
    found = read(environment, inside, PYTHONPATH=str(inside), PATH=str(tmp_path / "bin"))
    assert found["name"] == "uv"
    assert found[str(inside)] == [False, False]


def test_a_user_who_may_not_write(environment: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    site.chmod(0o555)
    obstacle = read(environment, prelude=AS_A_USER)["obstacle"]
    assert f"{site.resolve()} is not this user's to write" in obstacle


@pytest.mark.parametrize(
    "prelude",
    [
        "import sys\nsys.modules['ensurepip'] = None\nfrom importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *more: None if name == 'ensurepip' else find(name, *more)\n",
        "import os, sys, sysconfig\nsys.base_prefix = sys.prefix\n"
        "os.path.exists = lambda path, exists=os.path.exists: path.endswith('EXTERNALLY-MANAGED') or exists(path)\n",
    ],
    ids=["no ensurepip", "of the system, whose ensurepip refuses"],
)
def test_a_python_that_cannot_have_pip_by_itself(environment: Path, prelude: str) -> None:
    """As Debian and Ubuntu deliver it, without python3-pip."""
    found = read(environment, prelude=prelude)
    assert "has no pip" in found["obstacle"]
    assert "ensurepip" not in found["install"]


def test_a_user_who_may_write_only_at_home(environment: Path, tmp_path: Path) -> None:
    """Outside of a virtual environment pip installs for the user then, and Python puts that folder first."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    outside = (
        f"import sys, sysconfig\nsys.base_prefix = sys.prefix\nsysconfig.get_path = lambda name: {str(closed)!r}\n"
    )
    outside += "import site\nsite.ENABLE_USER_SITE = True\n"
    found = read(environment, closed, prelude=AS_A_USER + outside, HOME=str(tmp_path / "home"))
    assert found["folder"].startswith(str((tmp_path / "home").resolve()))
    assert found["own"] == [found["folder"]]
    assert not found[str(closed)][0]
    assert found["obstacle"] is None


def test_what_a_user_has_is_pips_where_it_installs_for_all(environment: Path, tmp_path: Path) -> None:
    """Root in an image, say, with packages of ``pip install --user``: pip takes them away too."""
    outside = "import sys, site\nsys.base_prefix = sys.prefix\nsite.ENABLE_USER_SITE = True\n"
    users = "import site; site.USER_SITE = sys.argv[2]\n"
    found = read(environment, tmp_path / "home", prelude=outside + users)
    assert found["folder"] != str(tmp_path / "home")
    assert found[str(tmp_path / "home")] == [True, False]
    inside = read(environment, tmp_path / "home", prelude="import sys, site\nsite.ENABLE_USER_SITE = True\n" + users)
    assert not inside[str(tmp_path / "home")][0]
