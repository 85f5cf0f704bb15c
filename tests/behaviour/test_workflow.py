"""The example of a GitHub workflow: its steps, run as a runner runs them on a machine without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.behaviour.test_examples import EXAMPLES, NO_GPU, write_commands
from tests.behaviour.test_packaging import copied_to
from tests.lab.environments import call, kept_environment, network_variables
from tests.support.children import Child, run_child

FILE = EXAMPLES / "github-actions.yml"


def job(name: str) -> str:
    (text,) = re.findall(rf"^  {name}:.*\n((?:    .*\n)+)", FILE.read_text(encoding="utf-8"), re.MULTILINE)
    return str(text)


def steps_of(name: str) -> list[str]:
    return re.findall(r"^      - run: (.+?)(?: # .*)?$", job(name), re.MULTILINE)


def run_step(step: str, project: Path, variables: Mapping[str, str]) -> Child:
    return run_child(["bash", "-e", "-o", "pipefail", "-c", step], env=variables, deadline=500, cwd=project)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(EXAMPLES / "test_with_gpu.py", folder)
    (folder / "test_plain.py").write_text("def test_without_a_gpu(): pass\n", encoding="utf-8")
    return folder


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_it_is_a_workflow() -> None:
    """By the schema that GitHub's editors use."""
    python = kept_environment("workflow", "check-jsonschema==0.39.0", install_schemas)
    call([str(python), "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(FILE)])


def install_schemas(python: Path) -> None:
    call([str(python), "-m", "pip", "install", "--quiet", "check-jsonschema==0.39.0"])


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_a_runner_without_a_gpu_passes_and_says_what_it_left_out(project: Path, tmp_path: Path) -> None:
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    call([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(wheels), str(copied_to(tmp_path / "source"))])
    call([sys.executable, "-m", "venv", str(environment)])
    variables = {
        **network_variables(tmp_path / "pip"),
        "ORTGPU": next(wheels.glob("ortgpu-*.whl")).as_uri(),
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CI": "true",
        **dict(re.findall(r'^      (\w+): "(\w+)"', job("cpu"), re.MULTILINE)),
    }
    assert variables["ORTGPU_ALLOW_CPU"] == "1"
    *installs, tests = steps_of("cpu")
    for step in installs:
        assert run_step(step, project, variables).returncode == 0, step
    done = run_step(tests, project, variables)
    assert done.returncode == 0, done
    assert "1 passed, 3 skipped" in done.stdout
    assert "no GPU can be used: " in done.stdout


@pytest.mark.lab
def test_a_gpu_runner_that_lost_its_gpu_fails_with_the_cause(project: Path, tmp_path: Path) -> None:
    """The environment of these tests is what its install step makes."""
    write_commands(tmp_path / "bin")
    variables = {**os.environ, **NO_GPU, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "CI": "true"}
    install, doctor, tests = steps_of("gpu")
    assert '"ortgpu[cuda] @ $ORTGPU"' in install
    for step in (doctor, f"{tests} -p ortgpu.pytest_plugin -p no:cacheprovider"):
        done = run_step(step, project, variables)
        assert done.returncode == 1, done
        assert "To fix it:" in done.stdout
