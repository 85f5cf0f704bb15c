"""What is said of GPUs, on machines that have two different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ortgpu.diagnosis.checks import devices
from ortgpu.errors import DeviceBusyError
from tests.support.made_facts import H200, HEALTHY, all_of, nvml, request

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
