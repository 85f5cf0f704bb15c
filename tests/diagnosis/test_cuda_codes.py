"""Codes of CUDA, entry by entry, beside a list that driver_types.h of CUDA 13 was read for."""

from __future__ import annotations

import pytest

from ortgpu.diagnosis.checks.classifier import explain_run
from ortgpu.diagnosis.messages import cuda_codes
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


# Which codes mean what, from driver_types.h and cuda.h of CUDA 13, not from our tables
NO_CODE = {98, 200, 209, 218}
OF_A_CAPTURE = {900, 901, 902, 903, 904, 905, 906, 907, 908}
OF_A_LOST_DEVICE = {46, 100, 101, 214, 220, 709, 999}
NAMED = {
    2: "cudaErrorMemoryAllocation",
    35: "cudaErrorInsufficientDriver",
    98: "cudaErrorInvalidDeviceFunction",
    100: "cudaErrorNoDevice",
    101: "cudaErrorInvalidDevice",
    209: "cudaErrorNoKernelImageForDevice",
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    222: "cudaErrorUnsupportedPtxVersion",
    304: "cudaErrorOperatingSystem",
    600: "cudaErrorNotReady",
    701: "cudaErrorLaunchOutOfResources",
    709: "cudaErrorContextIsDestroyed",
    720: "cudaErrorCooperativeLaunchTooLarge",
    802: "cudaErrorSystemNotReady",
    803: "cudaErrorSystemDriverMismatch",
    900: "cudaErrorStreamCaptureUnsupported",
    901: "cudaErrorStreamCaptureInvalidated",
    908: "cudaErrorStreamCaptureWrongThread",
    999: "cudaErrorUnknown",
    **STICKY,
}


@pytest.mark.parametrize(("code", "name"), NAMED.items(), ids=NAMED.values())
def test_a_code_has_the_name_of_the_header(code: int, name: str) -> None:
    assert cuda_codes.CODES[name] == code
    for words in (f"CUDA failure {code}: x", f"CUDA error {name}:x", f"{name}: x"):
        match = cuda_codes.REPORTED.search(words)
        assert match is not None
        assert cuda_codes.code_in(match) == code


def test_each_table_holds_the_codes_of_its_kind() -> None:
    assert {*cuda_codes.STICKY} == {*STICKY}
    assert {*cuda_codes.NO_CODE} == NO_CODE
    assert {*cuda_codes.CAPTURING} == OF_A_CAPTURE
    assert {*cuda_codes.LOST} == OF_A_LOST_DEVICE
    assert cuda_codes.STICKY.isdisjoint(cuda_codes.LOST)
    assert cuda_codes.STICKY.isdisjoint(cuda_codes.CAPTURING)


ERRORS: dict[int, str] = {
    2: "GPUOutOfMemoryError",
    36: "DriverTooOldError",
    222: "DriverTooOldError",
    214: "ProviderFailureError",
    709: "ProviderFailureError",
    999: "ProviderFailureError",
    **dict.fromkeys(NO_CODE, "UnsupportedDeviceError"),
    **dict.fromkeys(OF_A_CAPTURE, "ProviderFailureError"),
    **dict.fromkeys(STICKY, "PoisonedContextError"),
}


@pytest.mark.parametrize(("code", "error"), ERRORS.items())
def test_a_code_of_a_run_is_this_error(code: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.environment.gpu.driver.read_gpu_memory", lambda uuid: None)
    monkeypatch.setattr("ortgpu.environment.gpu.driver.processes_on", lambda uuid: {})
    found = explain_run(f"CUDA failure {code}: x ; GPU=1 ; expr=y", "Fail", GPU)
    assert type(found).__name__ == error
