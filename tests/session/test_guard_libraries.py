"""Real libraries that make sessions of their own: without a GPU they work on, on the CPU; under the guard they raise.

They are installed into an environment of their own, kept in pytest's cache, beside the packages of the tests: without
their requirement of ``onnxruntime``, which would be written over ``onnxruntime-gpu``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.overlay import installed_site, site_of
from tests.support.guarded_libraries import LIBRARIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parents[1] / "support" / "guarded_libraries.py"
ON_CPU = "CPUExecutionProvider"

PACKAGES = {
    "rembg": ["rembg==2.0.86"],
    "rapidocr": ["rapidocr==3.10.0"],
    "rapidocr_onnxruntime": ["rapidocr-onnxruntime==1.4.4"],
    "insightface": ["insightface==2.1"],
    "fastembed": ["fastembed==0.9.1"],
    "optimum": ["optimum==2.1.0", "optimum-onnx==0.1.0"],
    "sentence_transformers": ["sentence-transformers==5.7.0"],
}
NEED_TORCH = {"optimum", "sentence_transformers"}
NOT_INSTALLED = {"onnxruntime", "onnxruntime-gpu", "torch"}
INSTEAD = {"opencv-python": "opencv-python-headless"}  # the same files, without those that need a screen


@pytest.fixture(scope="session")
def libraries(pytestconfig: pytest.Config) -> Path:
    """The site-packages that has them."""
    wanted = [package for packages in PACKAGES.values() for package in packages]
    key = hashlib.sha256("\n".join([sys.version, str(installed_site()), *wanted]).encode()).hexdigest()[:12]
    root = pytestconfig.cache.mkdir("guarded-libraries") / key
    site = site_of(root)
    if not (root / "complete").exists():
        _call(sys.executable, "-m", "venv", "--clear", str(root))
        (site / "environment_of_the_tests.pth").write_text(f"{installed_site()}\n", encoding="utf-8")
        python = str(root / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
        _call(*install, "--no-deps", *wanted)
        names = [Requirement(package).name for package in wanted]
        code = (
            f"import json; from importlib.metadata import requires; print(json.dumps([requires(n) for n in {names}]))"
        )
        needed = {_wanted_of(line) for lines in json.loads(_call(python, "-c", code)) for line in lines or ()}
        _call(*install, *sorted(filter(None, needed)))
        (root / "complete").touch()
    return site


def _wanted_of(line: str) -> str | None:
    requirement = Requirement(line)
    if requirement.name in NOT_INSTALLED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        return None
    requirement.marker = None
    requirement.name = INSTEAD.get(requirement.name, requirement.name)
    return str(requirement)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def machine(module_lab: Lab, libraries: Path) -> Machine:
    """Everything installed, the libraries too, and no driver."""
    return module_lab.machine(env={"PYTHONPATH": f"{ROOT}:{libraries}", "HF_HUB_OFFLINE": "1"})


@pytest.fixture(params=sorted(LIBRARIES))
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in NEED_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip(f"{name} needs torch, which is not installed here")
    return name


def run(machine: Machine, library: str, mode: str, folder: Path, *, before: tuple[str, ...] = ()) -> Any:
    argv = [*before, str(PROGRAM), library, mode, str(folder)]
    result = machine.run(argv=argv, env={"REMBG_HOME": str(folder)}, timeout=200).ok()
    assert result.json is not None, result.output
    return result.json


def test_every_library_is_installed() -> None:
    assert set(PACKAGES) == set(LIBRARIES)


def test_alone_it_works_on_on_the_cpu(machine: Machine, library: str, tmp_path: Path) -> None:
    """What the guard is for, and the proof that the library asks for CUDA here: the next test gets the error."""
    found = run(machine, library, "plain", tmp_path)
    assert found["result"]
    assert found["sessions"]
    assert {(session["kind"], *session["providers"]) for session in found["sessions"]} == {("unguarded", ON_CPU)}


@pytest.mark.parametrize("mode", ["before", "after"])
def test_guarded_it_raises_the_cause(machine: Machine, library: str, mode: str, tmp_path: Path) -> None:
    error = run(machine, library, mode, tmp_path)["error"]
    assert error["type"] == "DriverNotFoundError"
    assert "libcuda.so.1" in error["summary"]
    assert error["fixes"]


def test_under_exec_it_raises_the_cause(machine: Machine, library: str, tmp_path: Path) -> None:
    error = run(machine, library, "plain", tmp_path, before=("-m", "ortgpu", "exec", "--", "python"))["error"]
    assert error["type"] == "DriverNotFoundError"


def test_it_works_with_sessions_that_were_verified(machine: Machine, library: str, tmp_path: Path) -> None:
    found = run(machine, library, "verified", tmp_path)
    assert found.get("result"), found
    if library == "insightface":  # ctx_id=-1 would have moved a verified session to the CPU
        assert found["result"] == ["ProviderRequestError", True]
    assert {session["kind"] for session in found["sessions"]} == {"guarded"}
    makers = {session["created_by"].rpartition(":")[0] for session in found["sessions"]}
    module = "optimum" if library in NEED_TORCH else library
    assert any(f"/{module}/" in maker for maker in makers), makers
