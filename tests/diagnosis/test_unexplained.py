"""A session that does not open, and no check knows why: the error says who finds out more, and starts no process."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    return machine.run_program(f"{STARTED}\n{code}", str(lab.models.relu), behind=WATCHED).ok().json


def test_what_no_check_explains_is_for_doctor(lab: Lab) -> None:
    (_, error), started = run(lab, "report([ask(), started])")
    assert error["type"] == "ProviderFallbackError"
    assert "run `ortgpu doctor`" in error["text"]
    assert "please report it" in error["text"]
    assert started == []


def test_doctor_finds_the_cause_there(lab: Lab) -> None:
    """The session of its child asks the driver, which is a stub without a single function of CUDA."""
    found = run(lab, "report([(each.code, each.evidence) for each in ortgpu.diagnose(probe=True).problems])")
    code, evidence = found[0]
    assert code == "driver-unusable"
    assert any("named symbol not found" in fact for fact in evidence)


def test_what_is_wrong_with_a_library_explains_that_it_fails(lab: Lab) -> None:
    """cuDNN of another CUDA, and what it then says: onnxruntime issue 26322, pykeio/ort issue 467."""
    case = next(each for each in CASES if each.name == "cudnn-for-cuda-12-and-a-convolution")
    words = "CUDNN failure 1001: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0 ; line=182 ; expr=cudnnCreate(&cudnn_handle_);"
    machine = dataclasses.replace(case, cuda=Cuda(devices=(GPU(),)), nvml=NVML()).machine(lab)
    code = f"refusals.extend([{words!r}] * 2)\nreport(ask())"
    _, error = machine.run_program(code, str(lab.models.conv), behind=WATCHED).ok().json
    assert error["type"] == "LibraryConflictError"
    assert "built for CUDA 12" in error["summary"]
    assert "ProviderFailureError" in [other["type"] for other in error["others"]]


def test_words_that_nobody_knows_are_kept(lab: Lab) -> None:
    words = "CUDAExecutionProvider does not feel well today"
    (_, error), started = run(lab, f"refusals.extend([{words!r}] * 2)\nreport([ask(), started])")
    assert error["type"] == "ProviderFallbackError"
    assert any(words in fact for fact in error["evidence"])
    assert "run `ortgpu doctor`" in error["text"]
    assert started == []


def test_a_known_cause_is_not_for_doctor(lab: Lab) -> None:
    words = "CUDA failure 46: all CUDA-capable devices are busy or unavailable ; GPU=0"
    _, error = run(lab, f"refusals.extend([{words!r}] * 2)\nreport(ask())")
    assert error["type"] == "DeviceBusyError"
    assert "ortgpu doctor" not in error["text"]
