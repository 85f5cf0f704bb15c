"""The words that advice starts with: what installs into this very interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.support.children import run_python

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
READ = """
import sys
sys.path.insert(0, sys.argv[1])
from ortgpu.environment.packages.installer import read_installer
sys.stdout.write("\\n".join([(found := read_installer()).name, found.install, found.uninstall]))
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installer") / "no pip"  # a blank in the path: the words are for a shell
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    return folder / "bin" / "python"


IN_THREADS = """
import sys, sysconfig, threading
sys.path.insert(0, sys.argv[1])
from ortgpu.environment.packages.installer import read_installer
sys.setswitchinterval(1e-6)
for _ in range(200):
    sysconfig._CONFIG_VARS = None  # as at the start of the process
    together, failed = threading.Barrier(8), []
    def read():
        together.wait()
        try:
            read_installer()
        except BaseException as error:
            failed.append(error)
            raise
    threads = [threading.Thread(target=read) for _ in range(8)]
    for one in threads: one.start()
    for one in threads: one.join()
    if failed: sys.exit(1)
"""


def read(python: Path, path: str, cwd: Path = ROOT) -> list[str]:
    env = {**os.environ, "PATH": path}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, "-c", READ, str(ROOT)], env=env, cwd=cwd, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_a_folder_of_that_name_is_not_pip(bare_python: Path, tmp_path: Path) -> None:
    """As a project has one for its requirements; ``python -m pip`` finds nothing to run in it."""
    (tmp_path / "pip").mkdir()
    _, install, _ = read(bare_python, "/nowhere", tmp_path)
    assert "-m ensurepip &&" in install


def test_without_pip_and_uv_pip_comes_first(bare_python: Path) -> None:
    name, install, uninstall = read(bare_python, "/nowhere")
    assert name == "pip"
    assert "-m ensurepip &&" in install
    assert "-m ensurepip &&" in uninstall
    before = subprocess.run([bare_python, "-m", "pip", "--version"], capture_output=True, check=False, timeout=60)
    assert before.returncode != 0
    done = subprocess.run(f"{install} --help", shell=True, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout
    assert "ensurepip" not in read(bare_python, "/nowhere")[1], "pip is there now"


@pytest.mark.skipif(PathFinder.find_spec("setuptools") is None, reason="setuptools is not installed here")
def test_reading_leaves_the_process_as_it_was() -> None:
    """setuptools takes importlib.util.find_spec("pip") for pip at work: distutils is the standard library's then."""
    code = (
        "import importlib.util, setuptools, sys\n"
        "from ortgpu.environment.packages.installer import read_installer\n"
        "sys.modules.pop('distutils', None)\n"
        "read_installer()\n"
        "print(importlib.util.find_spec('distutils').origin)\n"
    )
    done = run_python(code).ok()
    assert "setuptools" in done.stdout, done.stdout


def test_threads_that_read_it_first_together() -> None:
    """Before Python 3.13 sysconfig fills a dictionary without a lock, and another thread fails that reads it then."""
    run_python(IN_THREADS, str(ROOT)).ok()


def test_an_interpreter_of_the_system_needs_a_word_more(bare_python: Path, tmp_path: Path) -> None:
    """PEP 668: pip refuses where this marker lies, unless it is told to install all the same."""
    (tmp_path / "EXTERNALLY-MANAGED").write_text("[externally-managed]\n", encoding="utf-8")
    system = (
        f"import sys, sysconfig\nsys.prefix = sys.base_prefix\nsysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
    )
    code = f"{system}sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from ortgpu.environment.packages.installer import read_installer\n"
    done = subprocess.run(
        [bare_python, "-c", f"{code}print(read_installer().install)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip().endswith("install --break-system-packages")
    assert "--break-system-packages" not in read(bare_python, "/nowhere")[1]
