"""What is built of this repository: whole, installable, and the same when it is installed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tests.lab.environments import call, install, kept_environment

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("ortgpu", "tests", "examples", "benchmarks")
TOOLS = ("build", "twine", "setuptools>=77")


@pytest.fixture(scope="session")
def tools() -> Path:
    """The interpreter of an environment that can build."""
    return kept_environment("packaging", "\n".join(TOOLS), install_tools)


@pytest.fixture(scope="session")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    source = copied_to(tmp_path_factory.mktemp("source"))
    call([str(tools), "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)])
    call([str(tools), "-m", "twine", "check", "--strict", *map(str, (source / "dist").iterdir())])
    return source / "dist"


def copied_to(source: Path) -> Path:
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def install_tools(python: Path) -> None:
    call([str(python), "-m", "pip", "install", "--quiet", *TOOLS])


@pytest.fixture(scope="session")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel was installed, and nothing else of this repository can be found from there."""
    folder = tmp_path_factory.mktemp("installed")
    call([sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *map(str, built.glob("*.whl"))])
    return folder


def run(folder: str | Path, working: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=working,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_source_distribution_has_the_tests_and_what_they_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        str(path.relative_to(ROOT))
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert not files - packed


def test_the_wheel_has_what_is_not_code(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {
        "ortgpu/py.typed",
        "ortgpu/ERRORS.md",
        "ortgpu_enforce.pth",
        "_ortgpu_waiting.py",
        "_ortgpu_hook.py",
    } <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not {name.partition("/")[0] for name in names} & {"tests", "examples", "benchmarks"}


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_a_wheel_is_the_same_bytes_whenever_it_is_built(tools: Path, tmp_path: Path, hook: str) -> None:
    at_start = "import sys; sys.path.insert(0, 'ortgpu/session/guard/startup'); import build_backend"
    code = f"{at_start}; build_backend.{hook}(sys.argv[1])"
    source = tmp_path / "source"
    wheels: list[Path] = []
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    for number in range(2):
        copied_to(source)  # the same place, which an editable wheel names
        (source / "ortgpu" / "__init__.py").touch()
        folder = tmp_path / f"wheel{number}"
        folder.mkdir()
        command = [str(tools), "-c", code, str(folder)]
        subprocess.run(command, cwd=source, env=environment, capture_output=True, timeout=200, check=True)
        wheels += folder.iterdir()
        shutil.rmtree(source)
        time.sleep(2)  # a ZIP file tells the time no finer
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        modes = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in wheel.infolist()}
    assert {modes["ortgpu_enforce.pth"], modes["_ortgpu_waiting.py"]} == {0o644}, (
        "whoever unpacks it, all can read them"
    )


def test_the_installed_package_is_whole(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import ortgpu; print(ortgpu.__file__, ortgpu.__version__)")
    assert where.stdout.startswith(str(installed)), where.stdout + where.stderr
    demo = run(installed, tmp_path, "-m", "ortgpu", "demo")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    plugin = run(installed, tmp_path, "-m", "pytest", "--help")
    assert "--ortgpu={auto,require,skip}" in plugin.stdout, plugin.stdout + plugin.stderr


def test_the_oldest_click_and_rich(tmp_path: Path) -> None:
    """Much else depends on them, and pins them."""
    site = install("command-line", ["click==8.1.0", "rich==13.0.0"])
    over = os.pathsep.join([str(site), str(ROOT)])
    for arguments, status, said in (
        ([], 2, "Usage:"),
        (["explain", "nccl"], 0, "NCCLError"),
        (["check"], 1, "To fix it"),
    ):
        done = run(over, tmp_path, "-m", "ortgpu", *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        assert said in done.stdout + done.stderr


def test_the_first_lines_of_the_readme_install_and_show_it(tmp_path: Path) -> None:
    """As they stand, in a checkout: an environment, the library with CUDA's, and the demo, which ends with 0."""
    source = copied_to(tmp_path)
    lines = [
        line.strip()
        for line in (source / "README.md").read_text(encoding="utf-8").splitlines()[:12]
        if line[:4] == "    "
    ]
    assert [line.split()[0] for line in lines] == ["python3", "pip"]
    shown = call(["/bin/sh", "-ec", "\n".join(['cd "$0"', *lines]), str(source)])
    assert "1. Plain ONNX Runtime" in shown
    assert "2. GPUSession" in shown
