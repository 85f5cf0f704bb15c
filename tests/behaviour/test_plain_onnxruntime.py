"""What plain ONNX Runtime does on machines of the lab: the faults are real. The lab's README quotes these."""

from __future__ import annotations

import signal

import pytest

from tests.lab import GPU, Cuda
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA, LINKS_DRIVER, older_than
from tests.support.releases import TOO_OLD


@pytest.mark.parametrize(
    ("cuda", "text"),
    [
        (
            Cuda(version=TOO_OLD[CUDA][0]),
            "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version",
        ),
        (Cuda(init=100), "CUDA failure 100: no CUDA-capable device is detected"),
        (Cuda(init=101), "CUDA failure 101: invalid device ordinal"),
        (Cuda(init=3), "CUDA failure 3: initialization error"),
        (Cuda(init=803), "CUDA failure 803: system has unsupported display driver / cuda driver combination"),
        (Cuda(init=999), "CUDA failure 999: unknown error"),
        (Cuda(devices=(GPU(),)), "CUDA failure 500: named symbol not found"),
    ],
    ids=["35", "100", "101", "3", "803", "999", "500"],
)
def test_a_bad_driver_is_printed_and_the_session_is_on_the_cpu(lab: Lab, cuda: Cuda, text: str) -> None:
    outcome = lab.machine(cuda=cuda).open_plain_session(lab.models.relu)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs == {"printed"}
    assert text in outcome.result.stdout
    assert "EP Error" in outcome.result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_id": "0"}, 'Failed to parse provider option "device_id": CUDA failure 100'),
        ({"devise_id": "0"}, 'Unknown provider option: "devise_id"'),
        ({"arena_extend_strategy": "kNever"}, 'Failed to parse provider option "arena_extend_strategy"'),
    ],
    ids=["device", "name", "value"],
)
def test_a_bad_option_is_printed_and_the_session_is_on_the_cpu(lab: Lab, options: dict[str, str], text: str) -> None:
    machine = lab.machine(cuda=Cuda(init=100))
    outcome = machine.open_plain_session(lab.models.relu, providers=[("CUDAExecutionProvider", options)])
    assert outcome.providers == ("CPUExecutionProvider",)
    assert "printed" in outcome.signs
    assert text in outcome.result.stdout


def test_no_driver_is_said_and_the_session_is_on_the_cpu(lab: Lab) -> None:
    outcome = lab.machine().open_plain_session(lab.models.relu)
    assert outcome.providers == ("CPUExecutionProvider",)
    if older_than(LINKS_DRIVER):  # the provider is loaded, and its first call fails
        assert outcome.signs == {"printed"}
        assert "CUDA failure 35" in outcome.result.stdout
        return
    assert outcome.signs == {"logged"}
    assert "libcuda.so.1: cannot open shared object file" in outcome.result.stderr
    assert "Failed to create CUDAExecutionProvider" in outcome.result.stderr


def test_a_missing_library_is_logged_and_the_session_is_on_the_cpu(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(init=100))
    machine.overlay.remove("nvidia/*/lib/libcurand.so.*")
    outcome = machine.open_plain_session(lab.models.relu)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert "libcurand.so.10: cannot open shared object file" in outcome.result.stderr


def test_no_provider_asked_for_is_silent(lab: Lab) -> None:
    outcome = lab.machine().open_plain_session(lab.models.relu, providers=None, preload=False)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs <= {"logged"}


def test_an_unknown_provider_is_warned_about(lab: Lab) -> None:
    outcome = lab.machine().open_plain_session(lab.models.relu, providers=["cuda"], preload=False)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs == {"warned", "printed"}


def test_models_run_on_the_cpu(lab: Lab) -> None:
    for model in (lab.models.relu, lab.models.matmul, lab.models.conv):
        outcome = lab.machine().open_plain_session(model, providers=["CPUExecutionProvider"], preload=False)
        assert outcome.providers == ("CPUExecutionProvider",), outcome.result.output


def test_an_open_call_that_dies_is_an_abort(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.replace("onnxruntime/__init__.py", b"import os; os.abort()")
    outcome = machine.open_plain_session(lab.models.relu)
    assert outcome.signs == {"aborted"}
    assert outcome.result.returncode == -signal.SIGABRT
