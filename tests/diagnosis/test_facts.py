"""The facts that checks judge: what is unknown where nothing was tried."""

from __future__ import annotations

import pytest

from ortgpu.diagnosis.facts import Observed, Request
from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.provider.preloading import PreloadReport

DEVICE = CudaDevice(0, None, None, None, None, None)


def probe(*steps: ProbeStep, died_in: str | None = None) -> ProbeResult:
    return ProbeResult(steps, died_in is None, 0, None, False, died_in, 1.0, "")


def test_nothing_was_asked_for_and_nothing_tried() -> None:
    request, observed = Request(), Observed()
    assert (request.device, request.cudnn_operators, request.cudnn_disabled) == (None, (), False)
    assert (observed.crashed, observed.cuda_code, observed.devices, observed.loading) == (False, None, (), None)
    assert (observed.printed, observed.step("driver"), observed.failed("driver")) == ((), None, None)


@pytest.mark.parametrize(
    ("cuda", "code", "devices"),
    [
        (CudaState(100, None, 1), 100, ()),
        (CudaState(0, (), 1), 0, ()),
        (CudaState(0, (DEVICE,), 1), 0, (DEVICE,)),
    ],
)
def test_what_the_driver_answered(cuda: CudaState, code: int, devices: tuple[CudaDevice, ...]) -> None:
    observed = Observed(cuda=cuda)
    assert (observed.cuda_code, observed.devices) == (code, devices)


def test_libraries_of_this_process_count_before_those_of_the_probe() -> None:
    tried, preloaded = probe(), PreloadReport(None, (), (), (), False, None)
    assert Observed(probe=tried).loading is tried
    assert Observed(probe=tried, preload=preloaded).loading is preloaded


def test_steps_of_the_probe() -> None:
    good, bad = ProbeStep("driver", True), ProbeStep("session", False, "refused")
    observed = Observed(probe=probe(good, bad))
    assert observed.step("driver") is good
    assert observed.failed("driver") is None
    assert observed.failed("session") is bad
    assert Observed(probe=probe(died_in="libraries")).crashed


def test_the_words_of_a_failed_import_are_those_of_the_probe_and_numpys_own() -> None:
    step = ProbeStep("import", False, "", {"printed": ["one", "two"]})
    assert Observed(probe=probe(step), numpy_error="three").printed == ("one", "two", "three")
    assert Observed(numpy_error="three").printed == ("three",)
