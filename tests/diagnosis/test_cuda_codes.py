"""Codes of CUDA, entry by entry, beside a list that driver_types.h of CUDA 13 was read for."""

from __future__ import annotations

import pytest

from ortgpu.diagnosis.checks.classifier import explain_run
from ortgpu.provider.devices import Device

GPU = Device("cuda", 1, "GPU-1", "NVIDIA H200", (9, 0), 150 << 30, None)

# "The process must be terminated and relaunched" is said of these.
STICKY = {
    226: "cudaErrorContained",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    721: "cudaErrorTensorMemoryLeak",
    810: "cudaErrorMpsClientTerminated",
}
# It is not said of these, though each is a failure of a run.
PASSING = (1, 9, 98, 201, 400, 500, 600, 701, 720, 800, 801, 900, 901, 906)


@pytest.mark.parametrize(("code", "name"), STICKY.items(), ids=STICKY.values())
@pytest.mark.parametrize("words", ["CUDA failure {code}: x ; GPU=1 ; expr=y", "CUDA error {name}:x"])
def test_a_sticky_error_ends_the_use_of_the_gpu(code: int, name: str, words: str) -> None:
    error = explain_run(words.format(code=code, name=name), "Fail", GPU)
    assert type(error).__name__ == "PoisonedContextError"
    assert error is not None
    assert error.details()["cuda_code"] == code


@pytest.mark.parametrize("code", PASSING)
def test_another_error_does_not(code: int) -> None:
    error = explain_run(f"CUDA failure {code}: x ; GPU=1 ; expr=y", "Fail", GPU)
    assert error is not None
    assert type(error).__name__ != "PoisonedContextError"
