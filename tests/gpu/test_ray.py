"""Ray on a host with two GPUs: every actor and replica is on the GPU that Ray assigned to it, and on no other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import child_environment, run_child
from tests.support.this_machine import GPUs

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "tests" / "support" / "ray_programs.py"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "NCCL_NVLS_ENABLE": "0"}  # the second: as in test_distributed.py
DEADLINE = 240  # seconds


def _needs() -> str:
    """What of the extra `ray` this environment lacks."""
    missing = [name for name in ("ray", "pyarrow", "pandas", "starlette") if importlib.util.find_spec(name) is None]
    return f"needs pip install 'ortgpu[ray]': there is no {', '.join(missing)}" if missing else ""


pytestmark = [pytest.mark.ortgpu(count=2), pytest.mark.skipif(bool(_needs()), reason=_needs())]


@pytest.fixture(scope="module")
def uuids(gpus: GPUs) -> list[str]:
    if len(gpus.visible) < 2:  # without ortgpu's plugin nobody reads the marker
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")
    return sorted(gpu.uuid for gpu in gpus.visible)


def program(name: str, arguments: str = "{}") -> dict[str, Any]:
    command = [sys.executable, str(PROGRAMS), name, arguments]
    child = run_child(command, env=child_environment(QUIET), deadline=DEADLINE).ok()
    return dict(child.reports)


@pytest.fixture(scope="module")
def data(uuids: list[str]) -> dict[str, Any]:
    del uuids  # asked for because it skips
    return program("data", '{"allow_cpu": false}')


@pytest.fixture(scope="module")
def serving(uuids: list[str]) -> dict[str, Any]:
    del uuids
    return program("serving", '{"allow_cpu": false}')


@pytest.fixture(scope="module")
def placed(uuids: list[str]) -> dict[str, Any]:
    del uuids
    return program("placed")


def test_each_actor_fills_the_gpu_that_it_names(placed: dict[str, Any], uuids: list[str]) -> None:
    named = [placed[f"actor {number}"]["returned"][1] for number in range(2)]
    assert len(set(named)) == 2
    assert set(named) <= set(uuids)
    assert [placed[f"filled by actor {number}"] for number in range(2)] == [[uuid] for uuid in named], "by NVML"


def test_a_process_that_has_used_another_gpu_is_refused(placed: dict[str, Any]) -> None:
    first, second = (placed[f"actor {number}"]["returned"][1] for number in range(2))
    error = placed["another gpu before"]
    assert error["type"] == "RankDeviceError"
    assert error["evidence"][:2] == [f"assigned: {second}", f"CUDA gave it: {first}"]


def test_a_dataset_is_computed_on_both_gpus(data: dict[str, Any], uuids: list[str]) -> None:
    found = data["two actors"]["returned"]
    assert (found["rows"], found["right"], found["processes"]) == (True, True, 2)
    on = [gpu.split()[1] for gpu in found["gpus"]]
    assert len(set(on)) == len(on) == 2
    assert set(on) <= set(uuids)


def test_actors_may_share_a_gpu(data: dict[str, Any], uuids: list[str]) -> None:
    found = data["half a gpu each"]["returned"]
    assert (found["rows"], found["right"], found["processes"]) == (True, True, 3)
    assert {gpu.split()[1] for gpu in found["gpus"]} <= set(uuids)


def test_an_actor_without_a_gpu_does_not_take_the_first(data: dict[str, Any]) -> None:
    assert data["no gpu"]["type"] == "NoDeviceError"


def test_replicas_answer_from_both_gpus(serving: dict[str, Any], uuids: list[str]) -> None:
    assert serving["right"] is True
    on = [gpu.split()[1] for gpu in serving["gpus"]]
    assert len(set(on)) == len(on) == 2
    assert set(on) <= set(uuids)


def test_a_poisoned_replica_says_so_and_is_replaced(serving: dict[str, Any]) -> None:
    assert serving["session lost"]["type"] == "PoisonedContextError"
    assert serving["replaced by a new process"] is True


@pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="needs nccl4py: pip install 'ortgpu[distributed]'")
def test_a_preflight_between_the_actors(uuids: list[str]) -> None:
    found = program("ranks")["uuids"]["returned"]
    assert sorted(found) == uuids


@pytest.mark.parametrize("name", ["ray_data.py", "ray_serve.py"])
def test_example(uuids: list[str], name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = run_child(command, env=child_environment(QUIET), deadline=DEADLINE).ok()
    assert any(uuid in done.stdout for uuid in uuids)
    assert "[0.0, 0.0, 1.0, 2.0]" in done.stdout
