"""A session that does not open, and no check knows why: a process of its own tries, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.faults import CASES
from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, NVML, Cuda
from tests.session.test_chosen_options import WATCHED

# ONNX Runtime leaves the GPU in this process alone: what is watched goes on on the CPU.
STARTED = """
started = []
sys.addaudithook(lambda event, _: started.append(event) if event == "subprocess.Popen" else None)
"""


def run(lab: Lab, code: str) -> Any:
    machine = lab.machine(cuda=Cuda(devices=(GPU(),)))
    return machine.run(f"import sys\nMODEL = {str(lab.models.relu)!r}\n{WATCHED}\n{STARTED}\n{code}").ok().json


def test_what_another_process_meets_is_the_cause(lab: Lab) -> None:
    """Its session asks the driver, which is a stub without a single function of CUDA."""
    _, error = run(lab, "report(ask())")
    assert error["type"] == "DriverUnusableError"
    assert any("named symbol not found" in fact for fact in error["evidence"])
    assert [other["type"] for other in error["others"]] == ["ProviderFallbackError"]


def test_what_is_wrong_with_a_library_explains_that_it_fails(lab: Lab) -> None:
    """cuDNN of another CUDA, and what it then says: onnxruntime issue 26322, pykeio/ort issue 467."""
    case = next(each for each in CASES if each.name == "cudnn-for-cuda-12-and-a-convolution")
    words = "CUDNN failure 1001: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0 ; line=182 ; expr=cudnnCreate(&cudnn_handle_);"
    machine = dataclasses.replace(case, cuda=Cuda(devices=(GPU(),)), nvml=NVML()).machine(lab)
    code = f"MODEL = {str(lab.models.conv)!r}\n{WATCHED}\nrefusals.extend([{words!r}] * 2)\nreport(ask())"
    _, error = machine.run(code).ok().json
    assert error["type"] == "LibraryConflictError"
    assert "built for CUDA 12" in error["summary"]
    assert "ProviderFailureError" in [other["type"] for other in error["others"]]


def test_words_that_nobody_knows_are_kept(lab: Lab) -> None:
    words = "CUDAExecutionProvider does not feel well today"
    _, error = run(lab, f"refusals.extend([{words!r}] * 2)\nreport(ask())")
    assert error["type"] == "DriverUnusableError"
    (other,) = error["others"]
    assert any(words in fact for fact in other["evidence"])


def test_a_known_cause_needs_no_other_process(lab: Lab) -> None:
    words = "CUDA failure 46: all CUDA-capable devices are busy or unavailable ; GPU=0"
    (_, error), started = run(lab, f"refusals.extend([{words!r}] * 2)\nreport([ask(), started])")
    assert error["type"] == "DeviceBusyError"
    assert started == []


def test_it_is_asked_once_for_many_attempts(lab: Lab) -> None:
    found, started = run(lab, "report([[ask()[1]['type'] for _ in range(3)], started])")
    assert found == ["DriverUnusableError"] * 3
    assert len(started) == 1


@pytest.mark.parametrize(("mode", "asked"), [(0, 1), (None, 1), (3, 0), (2, 0)])
def test_a_gpu_for_one_process_at_a_time_is_not_asked_by_two(lab: Lab, mode: int | None, asked: int) -> None:
    """The child would be refused on account of the process that asks."""
    code = f"""
from ortgpu.diagnosis.probe.elsewhere import explained_elsewhere
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
state = CudaState(0, (CudaDevice(0, "GPU-1", "NVIDIA H200", (9, 0), 1 << 37, {mode}),), 1)
error = ortgpu.ProviderFallbackError("no check knows why")
explained_elsewhere(error, state)
report(len(started))
"""
    assert run(lab, code) == asked
