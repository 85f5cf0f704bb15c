"""The published table for distributed training, on a host that meets it: the rows that other tests have made up."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.launchers import AS_ROOT
from tests.support.children import child_environment, run_child
from tests.support.this_machine import GPUs

pytestmark = pytest.mark.ortgpu(count=2)


@pytest.fixture
def two(gpus: GPUs) -> GPUs:
    if len(gpus.visible) < 2:  # without ortgpu's plugin nobody reads the marker
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")
    return gpus


def document(*options: str, env: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "ortgpu", "doctor", "--profile", "training", "--json", *options]
    child = run_child(command, env=child_environment(env or {}), deadline=120)
    assert child.returncode in (0, 1), child.output  # 1: the package for training is not here
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["requirements"]}


def rows(env: Mapping[str, str | None] | None = None) -> dict[str, dict[str, Any]]:
    return rows_of(document("--no-probe", env=env))


def problems_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {problem["code"]: problem for problem in found["problems"]}


@pytest.fixture
def open_mpi() -> str:
    """Its version; skips where there is no Open MPI, or Python has no binding to it."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py, which is not installed")
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun, which is not on PATH")
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    version = re.search(r"\(Open MPI\) ([\d.]+)", told)
    if version is None:
        pytest.skip(f"needs Open MPI, and mpirun --version says {told.strip()!r}")
    return version[1]


def test_the_machine(two: GPUs) -> None:
    found = rows()
    assert found["GPUs"]["found"].startswith(f"{len(two.visible)}: ")
    assert all(gpu.uuid in found["GPUs"]["found"] for gpu in two.visible)
    assert found["GPUs"]["status_recommended"] == ("pass" if len(two.visible) >= 8 else "fail")
    for name in ("GPUs", "driver", "CUDA", "cuDNN", "GPU memory", "memory", "Python", "operating system"):
        assert found[name]["status_minimum"] == "pass", found[name]


def test_one_gpu_is_not_enough(two: GPUs) -> None:
    found = rows({"CUDA_VISIBLE_DEVICES": "0"})["GPUs"]
    assert found["status_minimum"] == "fail"
    assert two.visible[0].uuid in found["found"]
    assert two.visible[1].uuid not in found["found"]


@pytest.mark.usefixtures("two")
def test_nccl() -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nccl") is None:
        pytest.skip("needs the library of NCCL: pip install nvidia-nccl-cu13")
    found = rows()["NCCL"]
    assert (found["status_minimum"], found["status_recommended"]) == ("pass", "pass"), found
    assert "libnccl.so.2" in found["found"]


@pytest.mark.usefixtures("two")
def test_mpi_is_started(open_mpi: str) -> None:
    found = document(env=AS_ROOT)
    steps = {step["name"]: step for step in found["probe"]["steps"]}
    assert steps["mpi"]["ok"], steps["mpi"]
    assert "mpi-init" not in problems_of(found)
    row = rows_of(found)["MPI"]
    assert row["found"].startswith(f"Open MPI {open_mpi} "), row
    assert row["status_minimum"] == "pass", row


@pytest.mark.usefixtures("two", "open_mpi")
def test_mpi_that_cannot_start() -> None:
    """By a messaging layer that does not exist."""
    error = problems_of(document(env={**AS_ROOT, "OMPI_MCA_pml": "nonexistent"}))["mpi-init"]
    assert error["type"] == "MPIInitError"
    assert "OMPI_MCA_pml" in error["fixes"][0]["text"]


@pytest.mark.usefixtures("two")
def test_what_is_not_there_is_said_to_be_absent() -> None:
    found = rows()
    ports = list(Path("/sys/class/infiniband").glob("*"))
    assert ("no InfiniBand port" in found["network between nodes"]["note"]) == (not ports), (found, ports)
    absent = importlib.util.find_spec("horovod") is None
    assert (found["Horovod"]["found"] == "not installed") == absent, found["Horovod"]


@pytest.mark.usefixtures("two")
def test_the_training_api_of_a_package_for_inference() -> None:
    error = problems_of(document())["training-unavailable"]
    assert error["type"] == "TrainingUnavailableError"
    assert "is for inference, and has no training API" in error["summary"]


@pytest.mark.usefixtures("two")
def test_a_host_that_ssh_does_not_reach() -> None:
    error = problems_of(document("--no-probe", "--ssh", "nowhere.invalid"))["distributed-error"]
    assert "nowhere.invalid" in error["summary"]
