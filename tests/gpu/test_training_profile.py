"""The published table for distributed training, on a host that meets it: the rows that other tests have made up."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.common import GPUs, child_environment, run_child

pytestmark = pytest.mark.gpu(count=2)


@pytest.fixture
def two(gpus: GPUs) -> GPUs:
    if len(gpus.visible) < 2:  # without ortgpu's plugin nobody reads the marker
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")
    return gpus


def rows(env: Mapping[str, str | None] | None = None) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "ortgpu", "doctor", "--profile", "training", "--no-probe", "--json"]
    child = run_child(command, env=child_environment(env or {}), deadline=120)
    assert child.returncode in (0, 1), child.explain()  # 1: the package for training is not here
    return {row["name"]: row for row in json.loads(child.stdout)["requirements"]}


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
