"""`ortgpu doctor --python`: an environment that has neither ortgpu nor what it needs, judged from another one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import click
import pytest

from ortgpu.cli import other_python
from ortgpu.cli.other_python import _lend
from ortgpu.environment.child import Ended
from tests.lab.fixtures import Lab
from tests.support.command_line import DEADLINE, NO_GPU, ortgpu


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a virtual environment without any package."""
    folder = tmp_path_factory.mktemp("bare") / "with a space"
    venv.create(folder, with_pip=False)
    return folder


def test_environment_without_any_package(bare: Path) -> None:
    for given in (bare, bare / "bin" / "python"):
        result = ortgpu("doctor", "--json", "--python", str(given), env=NO_GPU)
        assert result.returncode == 1, result
        found = json.loads(result.stdout)
        assert found["problems"][0]["code"] == "onnxruntime-not-installed"
        assert found["environment"]["host"]["executable"] == str(bare / "bin" / "python")
        assert found["environment"]["packages"]["others"] == [], "what this environment has is not that one's"
        fix = found["problems"][0]["fixes"][0]["text"]
        assert str(bare / "bin" / "python") in shlex.split(fix), "where it is missing, it is to be installed"
    assert list(bare.rglob("*ortgpu*")) == []


def test_it_is_that_environment_that_is_broken(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.remove("nvidia/*/lib/libcublas.so.*", "ortgpu", "click", "rich", "onnx", "pynvml.py")
    done = ortgpu("doctor", "--json", "--python", str(machine.overlay.root), env=NO_GPU)
    problems = {problem["code"]: problem for problem in json.loads(done.stdout)["problems"]}
    assert {"driver-not-found", "library-not-found"} & set(problems)
    missing = next(each for each in problems.values() if "cublas" in each["summary"])
    assert missing["code"] in {"library-not-found", "broken-package", "library-version"}
    assert str(machine.overlay.python) in missing["fixes"][0]["text"]
    ours = ortgpu("doctor", "--json", env=NO_GPU)
    assert "cublas" not in json.dumps(json.loads(ours.stdout)["problems"])


def test_problem_that_the_diagnosis_raises_is_raised_here(bare: Path) -> None:
    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    result = ortgpu("doctor", "--profile", "training", "--shared-folder", str(bare), "--python", str(bare), env=two)
    assert result.returncode == 1
    assert (result.stdout + result.stderr).startswith("LauncherConflictError: "), result


def test_nothing_is_imported_from_the_working_directory(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of another user, say: /tmp/json.py."""
    for name in ("json", "pickle", "pynvml", "ctypes"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    other_python.diagnose_in(str(bare / "bin" / "python"), None, timeout=DEADLINE, ssh=(), probe=False)
    assert not (tmp_path / "run").exists()


def test_interpreter_that_does_not_run_this_library(tmp_path: Path) -> None:
    """Python 3.9, or what says so: the version is all that is asked before anything is imported."""
    old = tmp_path / "old"
    venv.create(old, with_pip=False)
    [site] = old.glob("lib/python3*/site-packages")
    (site / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 9, 18, 'final', 0)\n", encoding="utf-8")
    result = ortgpu("doctor", "--python", str(old))
    assert result.returncode == 1
    assert "it is Python 3.9, and ortgpu needs 3.10 or newer" in result.stderr
    refused = json.loads(ortgpu("doctor", "--json", "--python", str(old)).stdout)
    assert (refused["ok"], refused["error"]["code"]) == (False, None)
    assert "it is Python 3.9" in refused["error"]["summary"]
    none = ortgpu("doctor", "--python", "/bin/true")
    assert (none.returncode, none.stdout) == (1, "")
    assert "/bin/true: " in none.stderr


@pytest.mark.parametrize("given", ["no-such-python", ".", "/no/such/folder"])
def test_no_interpreter_is_wrong_usage(given: str) -> None:
    result = ortgpu("doctor", "--python", given)
    assert result.returncode == 2
    assert "neither an interpreter nor the folder of a virtual environment" in " ".join(result.stderr.split())


def test_the_guard_of_that_environment_does_not_answer(bare: Path) -> None:
    result = ortgpu("doctor", "--no-probe", "--python", str(bare), env={"ORTGPU_ENFORCE": "1"})
    assert "OnnxRuntimeNotInstalledError" in result.stdout, result


def test_files_that_come_and_go_are_not_lent(tmp_path: Path) -> None:
    """A process that compiled the library meanwhile made the copy end in a traceback."""
    package, lent = tmp_path / "package", tmp_path / "lent"
    (package / "__pycache__").mkdir(parents=True)
    lent.mkdir()
    (package / "__init__.py").touch()
    (package / "__pycache__" / "module.cpython-311.pyc.157211920").symlink_to("gone")
    _lend(package / "__init__.py", lent)
    assert [path.name for path in lent.rglob("*")] == ["package", "__init__.py"]


def test_the_deadline_has_time_for_each_host(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that do not answer took the time of all else, and then the interpreter was said not to answer."""
    given: list[float] = []

    def ended(_: object, *, timeout: float, **__: object) -> Ended:
        given.append(timeout)
        return Ended(None, "", "", timed_out=True)

    monkeypatch.setattr(other_python, "run", ended)
    for hosts in ((), ("a", "b")):
        with pytest.raises(click.ClickException, match="did not answer in time"):
            other_python.diagnose_in(str(bare), None, timeout=1000, ssh=hosts, profile="training", shared_folder=None)
    assert given[0] >= 3000
    assert given[1] == given[0] + 2000


def test_relative_model_is_that_of_the_working_directory(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    command = [sys.executable, "-m", "ortgpu", "doctor", "--python", str(bare), "--model", "model.onnx", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **NO_GPU}, capture_output=True, timeout=DEADLINE, check=False
    )
    summaries = [problem["summary"] for problem in json.loads(done.stdout)["problems"]]
    assert any("model.onnx" in summary for summary in summaries), summaries
