"""The rows of the table for distributed training, on made facts and on this machine."""

from __future__ import annotations

import dataclasses

import pytest

from ortgpu.diagnosis.training_requirements import check_training
from ortgpu.environment.driver import GPU, Nvml
from ortgpu.environment.inspection import Environment, inspect_environment
from ortgpu.environment.packages import Distribution


def gpu(index: int, capability: tuple[int, int], gigabytes: int) -> GPU:
    return GPU(index, f"GPU-{index}", "Made up", capability, gigabytes * 10**9, 0, "default", None, (), None)


def with_gpus(*gpus: GPU, available: bool = True) -> Environment:
    environment = inspect_environment()
    nvml = Nvml(available, None, "580.0", (13, 0), gpus)
    variables = dataclasses.replace(environment.variables, now={})
    driver = dataclasses.replace(environment.driver, nvml=nvml)
    return dataclasses.replace(environment, driver=driver, variables=variables)


def statuses(environment: Environment) -> dict[str, tuple[str, str]]:
    return {row.name: (row.status_minimum, row.status_recommended) for row in check_training(environment)}


@pytest.mark.parametrize(
    ("gpus", "count", "memory"),
    [
        ([], ("fail", "fail"), ("unknown", "unknown")),
        ([gpu(0, (9, 0), 150)], ("fail", "fail"), ("pass", "pass")),
        ([gpu(0, (9, 0), 150), gpu(1, (6, 1), 150)], ("fail", "fail"), ("pass", "pass")),
        ([gpu(0, (7, 0), 16), gpu(1, (7, 5), 12)], ("pass", "fail"), ("fail", "fail")),
        ([gpu(n, (8, 0), 40) for n in range(8)], ("pass", "pass"), ("pass", "pass")),
        ([gpu(n, (7, 5), 40) for n in range(8)], ("pass", "fail"), ("pass", "pass")),
    ],
)
def test_gpus(gpus: list[GPU], count: tuple[str, str], memory: tuple[str, str]) -> None:
    found = statuses(with_gpus(*gpus))
    assert found["GPUs"] == count
    assert found["GPU memory"] == memory


def test_without_nvml_nothing_is_guessed_of_gpus() -> None:
    found = statuses(with_gpus(available=False))
    assert found["GPUs"] == found["GPU memory"] == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("version", "expected"),
    [(None, "unknown unknown"), ("2.9.8", "fail fail"), ("2.10.3", "pass fail"), ("2.28.9", "pass pass")],
)
def test_nccl(version: str | None, expected: str) -> None:
    environment = inspect_environment()
    wheels = () if version is None else (Distribution("nvidia-nccl-cu13", version, "site"),)
    packages = dataclasses.replace(environment.packages, nvidia=wheels)
    found = statuses(dataclasses.replace(environment, packages=packages))
    assert " ".join(found["NCCL"]) == expected


def test_the_package_that_was_never_released_is_not_recommended() -> None:
    rows = {row.name: row for row in check_training(inspect_environment())}
    training = rows["onnxruntime-training"]
    assert (training.minimum, training.status_minimum, training.found) == ("1.19.2", "fail", "not installed")
    assert "never released" in training.note


def test_this_machine_has_every_row_of_the_table() -> None:
    names = [row.name for row in check_training(inspect_environment())]
    assert names == [
        "GPUs", "CUDA", "cuDNN", "NCCL", "MPI", "Python", "operating system", "memory", "GPU memory",
        "network between nodes", "onnxruntime-training",
    ]  # fmt: skip
