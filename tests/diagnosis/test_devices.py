"""What is said of GPUs, on machines that have two different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.diagnosis.checks import devices
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.gpu.driver import GPU
from ortgpu.environment.libraries.wheel import Architecture
from ortgpu.errors import DeviceBusyError, DeviceNotFoundError
from ortgpu.provider.devices import Device
from tests.support.made_facts import H200, HEALTHY, Change, all_of, environment, nvml, observed, part, request

L4 = replace(H200, index=1, uuid="GPU-2", name="NVIDIA L4", compute_capability=(8, 9), memory_total=24 << 30)


def busy(modes: Sequence[str], device: str | None = None) -> DeviceBusyError | None:
    gpus = tuple(replace(gpu, compute_mode=mode) for gpu, mode in zip((H200, L4), modes, strict=True))
    error = devices.busy(all_of(nvml(gpus=gpus), request(device=device))(HEALTHY))
    assert error is None or isinstance(error, DeviceBusyError)
    return error


@pytest.mark.parametrize("modes", [("prohibited", "default"), ("default", "prohibited")])
def test_one_prohibited_gpu_of_two_keeps_nobody_out(modes: tuple[str, str]) -> None:
    assert busy(modes) is None


def test_where_all_are_prohibited_the_first_is_named() -> None:
    error = busy(("prohibited", "prohibited"))
    assert error is not None
    assert error.uuid == H200.uuid


@pytest.mark.parametrize("number", [0, 1])
def test_the_prohibited_gpu_that_was_asked_for_is_named(number: int) -> None:
    """By its UUID: an ordinal is CUDA's, and NVML alone does not tell which of two different GPUs has it."""
    modes = ["default", "default"]
    modes[number] = "prohibited"
    asked, other = (H200.uuid, L4.uuid) if number == 0 else (L4.uuid, H200.uuid)
    error = busy(modes, asked)
    assert error is not None
    assert error.uuid == asked
    assert busy(modes, other) is None


# CUDA lists the L4 first, NVML the H200: both orders are usual
CUDA_L4 = CudaDevice(0, L4.uuid, L4.name, (8, 9), 24 << 30, 0)
CUDA_H200 = CudaDevice(1, H200.uuid, H200.name, (9, 0), 141 << 30, 0)
TWO = all_of(nvml(gpus=(H200, L4)), observed(cuda=CudaState(0, (CUDA_L4, CUDA_H200), 1)))
BY_NVML = all_of(nvml(gpus=(H200, L4)))
FOR_HOPPER = part("provider", architectures=(Architecture(9, 0, False, False),))


@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, L4), (0, L4), (1, H200), (H200.uuid, H200), (L4.uuid, L4), ("auto", None), (2, None)],
)
def test_the_requested_gpu_is_found_by_cudas_order(device: Any, expected: GPU | None) -> None:
    assert devices.requested_gpu(all_of(TWO, request(device=device))(HEALTHY)) == expected


@pytest.mark.parametrize(("device", "expected"), [(H200.uuid, H200), (L4.uuid, L4), (0, None), (None, None)])
def test_nvml_alone_knows_a_gpu_by_its_uuid_only(device: Any, expected: GPU | None) -> None:
    """CUDA may number two different GPUs the other way round."""
    assert devices.requested_gpu(all_of(BY_NVML, request(device=device))(HEALTHY)) == expected


def test_nvml_knows_one_of_two_equal_gpus_by_its_number() -> None:
    second = replace(H200, index=1, uuid="GPU-2")
    for number, expected in ((0, H200), (1, second)):
        facts = all_of(nvml(gpus=(H200, second)), request(device=number))(HEALTHY)
        assert devices.requested_gpu(facts) == expected


@pytest.mark.parametrize(
    ("device", "is_unsupported"), [(0, True), (1, False), ("auto", False), (L4.uuid, True), (H200.uuid, False)]
)
def test_only_the_gpu_that_is_asked_for_needs_code(device: Any, is_unsupported: bool) -> None:
    error = devices.unsupported(all_of(TWO, FOR_HOPPER, request(device=device))(HEALTHY))
    assert (error is not None) is is_unsupported
    if error is not None:
        assert error.details()["device"] == L4.name
        assert error.details()["compute_capability"] == (8, 9)


@pytest.mark.parametrize(("device", "is_unfit"), [(0, True), (1, False), ("auto", False)])
def test_only_the_gpu_that_is_asked_for_needs_code_in_cudnn(device: Any, is_unfit: bool) -> None:
    of_cudnn = environment(cudnn_architectures=(Architecture(9, 0, False, False),))
    error = devices.cudnn_without_code(
        all_of(TWO, of_cudnn, request(device=device, cudnn_operators=("Conv",)))(HEALTHY)
    )
    assert (error is not None) is is_unfit


@pytest.mark.parametrize("device", [2, "cuda:7", "GPU-9"])
@pytest.mark.parametrize("machine", [TWO, BY_NVML])
def test_a_gpu_that_is_not_there_is_told_beside_those_that_are(machine: Change, device: Any) -> None:
    error = devices.named_device(all_of(machine, request(device=device))(HEALTHY))
    assert isinstance(error, DeviceNotFoundError)
    assert {each for each in (H200.uuid, L4.uuid) if str(each) in str(error)} == {H200.uuid, L4.uuid}
    for there in (None, "auto", 0, 1, H200.uuid):
        assert devices.named_device(all_of(machine, request(device=there))(HEALTHY)) is None


@pytest.mark.parametrize(("device", "free"), [(0, 20 << 30), (1, 140 << 30)])
def test_memory_is_that_of_the_gpu_that_is_asked_for(device: int, free: int) -> None:
    gpus = nvml(gpus=(replace(H200, memory_free=140 << 30), replace(L4, memory_free=20 << 30)))
    error = devices.lacks_memory(all_of(TWO, gpus, request(device=device))(HEALTHY), [])
    assert error.free == free
    assert f"{free >> 20} of" in " ".join(error.evidence)


def session(uuid: str | None, provider: str = "CUDAExecutionProvider", *, alive: bool = True) -> Any:
    device = Device("cuda", 0, uuid, None, None, None, None) if uuid is not None else None
    return SimpleNamespace(model=uuid, device=device, providers=(provider, "CPUExecutionProvider"), alive=alive)


def test_sessions_that_hold_memory_of_a_gpu_are_those_on_it() -> None:
    there, elsewhere, unknown = session(H200.uuid), session(L4.uuid), session(None)
    on_cpu, dead = session(None, "AzureExecutionProvider"), session(H200.uuid, alive=False)
    tensorrt = session(H200.uuid, "TensorrtExecutionProvider")
    every = [there, elsewhere, unknown, on_cpu, dead, tensorrt]
    assert devices.sessions_on_gpu(every, H200.uuid) == [there, unknown, tensorrt]
    assert devices.sessions_on_gpu(every, None) == [there, elsewhere, unknown, tensorrt]
