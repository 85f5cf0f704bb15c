"""What a caller asks for is given, or refused by name; what is not about the GPU stays ONNX Runtime's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import Report, run_program
from .plugin import built_in_only

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def report(mlp: Path) -> Report:
    return run_program("make_requests", {"model": mlp, "missing": mlp.with_name("no-such-model.onnx")})


def test_unknown_option(report: Report) -> None:
    error = report.error("unknown option")
    assert error.type == "ProviderOptionError"
    assert (error.fields["provider"], error.fields["option"]) == (CUDA, "no_such_option")
    assert "no_such_option" in error.text


def test_bad_value(report: Report) -> None:
    error = report.error("bad value")
    assert error.type == "ProviderOptionError"
    assert error.fields["option"] == "gpu_mem_limit"
    assert "plenty" in error.text


def test_misspelt_provider(report: Report) -> None:
    error = report.error("misspelt provider")
    assert error.type == "ProviderRequestError"
    assert "CudaExecutionProvider" in error.text
    assert CUDA in error.text.splitlines()[0], "the first line does not say which one was meant"


def test_options_that_do_not_match_the_providers(report: Report) -> None:
    error = report.error("lengths differ")
    assert error.is_a("ValueError")  # ONNX Runtime's own refusal is one, too


@built_in_only
def test_tensorrt_that_is_not_installed(report: Report) -> None:
    if report["TensorRT loads"]:
        pytest.skip("TensorRT is installed here")
    error = report.error("TensorRT")
    assert error.is_a("LibraryNotFoundError")
    assert "TensorrtExecutionProvider" in error.text


@pytest.mark.parametrize("way", ["options with the provider", "options beside the provider"])
def test_provider_options_survive(report: Report, way: str) -> None:
    options = report.returned(way)["options"]
    assert options["gpu_mem_limit"] == str(2 * 2**30)
    assert options["arena_extend_strategy"] == "kSameAsRequested"


def test_cuda_goes_first(report: Report) -> None:
    assert report.returned("CPU first")["providers"] == [CUDA, CPU]


def test_session_options_survive(report: Report) -> None:
    settings = report.returned("session options")
    assert settings["inside"] == settings["before"]


def test_session_options_stay_the_callers(report: Report) -> None:
    settings = report.returned("session options")
    assert settings["after"] == settings["before"]
    assert settings["plain"] == [CPU]


def test_session_options_keep_the_entry_that_records_nodes(report: Report) -> None:
    """ONNX Runtime logs a warning for an entry that is written again, to take it back as well."""
    assert report.returned("session options")["recording"] == "1"


@pytest.fixture(scope="module")
def opened_again(mlp: Path) -> Report:
    return run_program("set_providers", {"model": mlp})


@pytest.mark.parametrize("session", ["usual", "captured", "pinned"])
def test_set_providers_with_other_options_of_cuda(opened_again: Report, session: str) -> None:
    facts = opened_again[session]
    assert facts["limit"] == str(2 * 2**30)
    assert facts["providers"] == [CUDA, CPU]
    assert facts["refused"] == ["ProviderRequestError", "DeviceNotFoundError"]
    assert facts["error"] <= 1e-2
    assert facts["graph"] == (session == "captured")


def test_set_providers_of_a_closed_session(opened_again: Report) -> None:
    assert opened_again["closed"] == "ExecutionError"


def test_set_providers_gives_back_the_memory_of_the_session_before(conv: Path) -> None:
    free = run_program("set_providers_again_and_again", {"model": conv})["free"]
    assert min(free[-5:]) >= min(free[4:10]) - (16 << 20)


@pytest.mark.parametrize("fault", ["missing model", "invalid model", "empty model"])
def test_faults_of_the_model_are_onnxruntimes(report: Report, fault: str) -> None:
    ours, plain = report.error(fault), report.error(f"{fault}, plain")
    assert not ours.is_a("GPUError")
    assert (ours.module, ours.type) == (plain.module, plain.type)


@pytest.mark.parametrize("fault", ["wrong name", "wrong type", "wrong shape", "wrong rank"])
def test_faults_of_the_input_are_onnxruntimes(report: Report, fault: str) -> None:
    ours, plain = report.error(fault), report.error(f"{fault}, plain")
    assert not ours.is_a("GPUError")
    assert (ours.module, ours.type) == (plain.module, plain.type)


def test_runs_right_after_wrong_inputs(report: Report) -> None:
    assert report["still right"] <= 1e-2
