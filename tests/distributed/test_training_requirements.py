"""The rows of the table for distributed training, on made facts and on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ortgpu.diagnosis.requirements import Requirement
from ortgpu.distributed.diagnosis.requirements import check_training
from ortgpu.distributed.environment import (
    BuildVariable,
    InfinibandPort,
    Interface,
    Mpi,
    MpiVersion,
    Nccl,
    NcclLibrary,
    Network,
    TrainingEnvironment,
    TrainingPackages,
    inspect_training,
)
from ortgpu.environment.gpu.driver import GPU, Nvml
from ortgpu.environment.inspection import Environment, inspect_environment
from ortgpu.environment.packages.installed import Distribution, Torch
from ortgpu.environment.variables import Variables
from tests.support.made_facts import HEALTHY, part, resolution


def gpu(index: int, capability: tuple[int, int], gigabytes: int) -> GPU:
    return GPU(index, f"GPU-{index}", "Made up", capability, gigabytes * 10**9, 0, "default", None, (), None)


def with_gpus(*gpus: GPU, available: bool = True) -> Environment:
    environment = inspect_environment()
    nvml = Nvml(available, None, "580.0", (13, 0), gpus)
    variables = dataclasses.replace(environment.variables, now={})
    driver = dataclasses.replace(environment.driver, nvml=nvml, kernel_version=None)
    return dataclasses.replace(environment, driver=driver, variables=variables)


def training(**changes: Any) -> TrainingEnvironment:
    """A machine with nothing of what is needed, but for the changes."""
    nothing = TrainingEnvironment(
        TrainingPackages((), None), Nccl(()), Mpi(None, None, None, None, {}), Network((), ()), None, ()
    )
    return dataclasses.replace(nothing, **changes)


def rows(environment: Environment | None = None, **changes: Any) -> dict[str, Requirement]:
    return {row.name: row for row in check_training(environment or inspect_environment(), training(**changes))}


def statuses(environment: Environment | None = None, **changes: Any) -> dict[str, tuple[str, str]]:
    return {name: (row.status_minimum, row.status_recommended) for name, row in rows(environment, **changes).items()}


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


def test_gpus_that_this_process_is_not_shown_do_not_count() -> None:
    two = with_gpus(gpu(0, (9, 0), 150), gpu(1, (9, 0), 12))
    assert statuses(two)["GPUs"] == ("pass", "fail")
    hidden = dataclasses.replace(two, variables=Variables({"CUDA_VISIBLE_DEVICES": "0"}, {}))
    found = rows(hidden)
    assert found["GPUs"].status_minimum == "fail"
    assert (found["GPUs"].found or "").startswith("1: ")
    assert "GPU-1" not in (found["GPUs"].found or "")
    assert found["GPU memory"].status_minimum == "pass", "of the one that is left"


def test_without_nvml_nothing_is_guessed_of_gpus() -> None:
    found = statuses(with_gpus(available=False))
    assert found["GPUs"] == found["GPU memory"] == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("470.256.02", ("pass", "pass")), ("465.19.01", ("fail", "fail")), (None, ("unknown", "unknown"))],
)
def test_driver(version: str | None, expected: tuple[str, str]) -> None:
    environment = with_gpus()
    nvml = dataclasses.replace(environment.driver.nvml, driver_version=version)
    driver = dataclasses.replace(environment.driver, nvml=nvml, kernel_version=None)
    assert statuses(dataclasses.replace(environment, driver=driver))["driver"] == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, ("unknown", "unknown")),
        ((2, 9, 8), ("fail", "fail")),
        ((2, 10, 3), ("pass", "fail")),
        ((2, 28, 9), ("pass", "pass")),
    ],
)
def test_nccl(version: tuple[int, int, int] | None, expected: tuple[str, str]) -> None:
    library = NcclLibrary("/lib/libnccl.so.2", "system loader", version, (12, 4))
    row = rows(nccl=Nccl((library, library)))["NCCL"]
    assert (row.status_minimum, row.status_recommended) == expected
    assert "1 more copies" in row.note
    assert row.found is None or "for CUDA 12.4: /lib/libnccl.so.2" in row.found
    assert statuses()["NCCL"] == ("fail", "fail"), "it was looked for"


@pytest.mark.parametrize(
    ("vendor", "version", "expected"),
    [
        ("Open MPI", (3, 1, 6), ("fail", "fail")),
        ("Open MPI", (4, 0, 7), ("pass", "fail")),
        ("Open MPI", (4, 1, 8), ("pass", "pass")),
        ("Open MPI", (5, 0, 11), ("pass", "pass")),
        ("MPICH", (3, 4, 3), ("pass", "fail")),
        ("Intel MPI", (2021, 14), ("fail", "fail")),
    ],
)
def test_mpi(vendor: str, version: tuple[int, ...], expected: tuple[str, str]) -> None:
    found = MpiVersion(vendor, version)
    assert statuses(mpi=Mpi("/usr/bin/mpirun", found, None, None, {}))["MPI"] == expected
    assert statuses(mpi=Mpi(None, None, "4.1.2", found, {}))["MPI"] == expected


def test_mpi_that_is_not_there_and_one_that_does_not_say() -> None:
    assert statuses()["MPI"] == ("fail", "fail")
    assert statuses(mpi=Mpi("/usr/bin/mpirun", None, None, None, {}))["MPI"] == ("unknown", "unknown")
    broken = rows(mpi=Mpi(None, None, "4.1.2", None, {}, "cannot load MPI library"))["MPI"]
    assert (broken.status_minimum, broken.note) == ("unknown", "cannot load MPI library")


HDR = InfinibandPort("mlx5_0", 1, True, 200.0, "InfiniBand")
CARD = Interface("eth0", True, 10_000, virtual=False)


@pytest.mark.parametrize(
    ("interfaces", "ports", "expected"),
    [
        ((CARD,), (), ("pass", "fail")),
        ((dataclasses.replace(CARD, speed=1000),), (), ("fail", "fail")),
        ((dataclasses.replace(CARD, speed=None),), (), ("unknown", "fail")),
        ((dataclasses.replace(CARD, up=False),), (), ("unknown", "fail")),
        ((dataclasses.replace(CARD, virtual=True),), (), ("unknown", "fail")),
        ((), (HDR,), ("pass", "pass")),
        ((), (dataclasses.replace(HDR, rate=100.0),), ("pass", "fail")),
        ((), (dataclasses.replace(HDR, link_layer="Ethernet"),), ("pass", "unknown")),
        ((), (dataclasses.replace(HDR, active=False),), ("unknown", "fail")),
        ((), (dataclasses.replace(HDR, rate=None),), ("unknown", "unknown")),
        (None, None, ("unknown", "unknown")),
    ],
)
def test_network(
    interfaces: tuple[Interface, ...] | None, ports: tuple[InfinibandPort, ...] | None, expected: tuple[str, str]
) -> None:
    row = rows(network=Network(interfaces, ports))["network between nodes"]
    assert (row.status_minimum, row.status_recommended) == expected
    assert "the way to the other nodes is not seen" in row.note


def test_the_package_that_was_never_released_is_not_recommended() -> None:
    row = rows()["onnxruntime-training"]
    assert (row.minimum, row.status_minimum, row.found) == ("1.19.2", "fail", "not installed")
    assert "never released" in row.note


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("h5py", "3.16.0", "pass"),
        ("numpy", "1.16.5", "fail"),
        ("numpy", "2.4.6", "pass"),
        ("onnx", "1.17.0", "pass"),
        ("onnx", "1.18.0", "fail"),
        ("setuptools", "60.10", "fail"),
        ("setuptools", None, "unknown"),
        ("sympy", None, "pass"),
    ],
)
def test_packages(name: str, version: str | None, expected: str) -> None:
    packages = TrainingPackages((Distribution(name, version, "site"),), None)
    assert statuses(packages=packages)[name] == (expected, expected)
    assert statuses()[name] == ("fail", "fail")


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (None, ("fail", "unknown")),
        (Torch("2.8.0", None, "torch"), ("pass", "pass")),
        (Torch("2.13.0+cpu", None, "torch"), ("pass", "fail")),
        (Torch(None, None, "torch"), ("pass", "unknown")),
    ],
)
def test_torch(torch: Torch | None, expected: tuple[str, str]) -> None:
    environment = inspect_environment()
    packages = dataclasses.replace(environment.packages, torch=torch)
    assert statuses(dataclasses.replace(environment, packages=packages))["torch"] == expected


def test_horovod_is_shown_and_never_asked_for() -> None:
    assert statuses()["Horovod"] == ("pass", "pass")
    row = rows(horovod=Distribution("horovod", "0.28.1", "site"))["Horovod"]
    assert row.found == "0.28.1"
    assert "dropped it in 2020" in row.note


@pytest.mark.parametrize(("leads_there", "expected"), [(True, "pass"), (False, "fail"), (None, "pass")])
def test_variables_of_a_build(leads_there: bool | None, expected: str) -> None:
    row = rows(build_variables=(BuildVariable("CUDA_HOME", "/cuda", "a toolkit", leads_there),))["CUDA_HOME"]
    assert (row.status_minimum, row.found) == (expected, "/cuda")
    assert "not promised" in row.note


# The machine and its system


@pytest.mark.parametrize(
    ("needed", "soname", "cuda", "cudnn"),
    [
        (("libcudart.so.10.2",), "libcudnn.so.8", ("fail", "fail"), ("pass", "fail")),
        (("libcudart.so.11.0",), "libcudnn.so.8", ("pass", "fail"), ("pass", "fail")),
        (("libcudart.so.12",), "libcudnn.so.9", ("pass", "pass"), ("pass", "pass")),
        (("libcudart.so.13",), "libcudnn.so.9", ("pass", "pass"), ("pass", "pass")),
        ((), None, ("unknown", "unknown"), ("unknown", "unknown")),
    ],
)
def test_cuda_and_cudnn_by_the_provider_file(
    needed: tuple[str, ...], soname: str | None, cuda: tuple[str, str], cudnn: tuple[str, str]
) -> None:
    made = part("provider", needed=needed)(HEALTHY).environment
    found = rows(dataclasses.replace(made, libraries=(resolution(soname),) if soname else ()))
    assert (found["CUDA"].status_minimum, found["CUDA"].status_recommended) == cuda
    assert (found["cuDNN"].status_minimum, found["cuDNN"].status_recommended) == cudnn
    assert "is built for CUDA 11.8 and no other" in found["CUDA"].note
    assert "links cuDNN 8" in found["cuDNN"].note


@pytest.mark.parametrize(
    ("row", "changes", "expected"),
    [
        ("Python", {"python": (3, 9, 21)}, ("fail", "fail")),
        ("Python", {"python": (3, 10, 0)}, ("pass", "fail")),
        ("Python", {"python": (3, 12, 1)}, ("pass", "pass")),
        ("operating system", {"os_name": "Ubuntu 22.04.5 LTS"}, ("pass", "pass")),
        ("operating system", {"os_name": "Debian GNU/Linux 12"}, ("pass", "fail")),
        ("operating system", {"machine": "aarch64", "os_name": None}, ("fail", "unknown")),
        ("operating system", {"system": "Darwin", "os_name": None}, ("fail", "unknown")),
        ("memory", {"memory_total": 31 * 10**9}, ("fail", "fail")),
        ("memory", {"memory_total": 32 * 10**9}, ("pass", "fail")),
        ("memory", {"memory_total": 256 * 10**9}, ("pass", "pass")),
        ("memory", {"memory_total": None}, ("unknown", "unknown")),
    ],
    ids=str,
)
def test_system(row: str, changes: dict[str, Any], expected: tuple[str, str]) -> None:
    made = part("host", **changes)(HEALTHY).environment
    assert statuses(made)[row] == expected
    assert "the CUDA wheels of onnxruntime-training end at Python 3.11" in rows(made)["Python"].note


def test_this_machine_has_every_row_of_the_table() -> None:
    environment = inspect_environment()
    found = check_training(environment, inspect_training(environment.packages.onnxruntime.folder))
    assert [row.name for row in found] == [
        "GPUs", "driver", "CUDA", "cuDNN", "NCCL", "MPI", "Python", "operating system", "memory", "GPU memory",
        "network between nodes", "onnxruntime-training", "cerberus", "flatbuffers", "h5py", "numpy", "onnx",
        "packaging", "protobuf", "sympy", "setuptools", "torch", "Horovod", "CUDA_HOME", "CUDNN_HOME", "CUDACXX",
        "nccl_home", "ORT_DISABLE_PYTHON_PACKAGE_LOCAL_VERSION", "ORT_CUDA_UNAVAILABLE",
    ]  # fmt: skip
