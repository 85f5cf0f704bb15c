"""What a probe found, as its parent reads it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ortgpu.diagnosis.probe.result import NVML, ProbeResult, ProbeStep
from ortgpu.environment.gpu.cuda import CudaDevice
from ortgpu.environment.gpu.driver import LIBCUDA
from ortgpu.environment.libraries.search import Candidate
from ortgpu.provider.preloading import LoadedLibrary, MissingLibrary


def result(*steps: ProbeStep, **changes: Any) -> ProbeResult:
    whole = ProbeResult(steps, True, 0, None, False, None, 1.0, "")
    return dataclasses.replace(whole, **changes)


def test_a_step_is_found_by_its_name() -> None:
    first, second = ProbeStep("import", True), ProbeStep("driver", False, "refused", {"code": 100})
    found = result(first, second)
    assert found.step("driver") is second
    assert found.step("session") is None
    assert found.measured("driver", "code") == 100
    assert found.measured("driver", "devices") is None
    assert found.measured("session", "code") is None


@pytest.mark.parametrize(
    ("changes", "crashed"),
    [
        ({}, False),
        ({"died_in": "libraries", "signal": "SIGSEGV"}, True),
        ({"died_in": "session", "returncode": 1}, True),
        ({"died_in": "libraries", "timed_out": True}, False),
        ({"died_in": "libraries", "signal": "SIGKILL"}, False),
        ({"died_in": "libraries", "signal": "SIGSYS"}, False),
        ({"died_in": "start"}, False),
        ({"died_in": "driver", "signal": "SIGSEGV"}, False),
        ({"died_in": "training"}, False),
    ],
)
def test_what_counts_as_a_crash_in_a_package(changes: dict[str, Any], crashed: bool) -> None:
    assert result(**changes).crashed is crashed


@pytest.mark.parametrize(
    ("died_in", "opening", "deadly"),
    [
        ("driver", NVML, ("nvml", "libcuda")),
        ("driver", LIBCUDA, ("libcuda",)),
        ("driver", None, ()),
        ("driver", "/other.so", ()),
        ("libraries", LIBCUDA, ()),
    ],
)
def test_which_questions_to_the_driver_are_not_asked_again(
    died_in: str, opening: str | None, deadly: tuple[str, ...]
) -> None:
    assert result(died_in=died_in, opening=opening).deadly == deadly


def test_what_was_not_tried_is_not_known() -> None:
    found = result()
    assert (found.missing, found.cudnn, found.cudnn_mixed, found.cuda) == (None, None, (), None)


def test_libraries_come_back_as_those_of_this_process() -> None:
    candidate = Candidate("libcudnn.so.9", "/a", "nvidia wheels", "/", "too short")
    missing = (MissingLibrary("libcudnn.so.9", True, None, (candidate,)),)
    cudnn = LoadedLibrary("libcudnn.so.9", "/b", "system loader", "/", False), 91002
    data = {"not_loaded": missing, "cudnn": cudnn, "cudnn_mixed": ["a", "b"]}
    found = result(ProbeStep("libraries", False, "", data))
    assert (found.missing, found.cudnn, found.cudnn_mixed) == (missing, cudnn, ("a", "b"))
    (step,) = json.loads(json.dumps(found.as_dict()))["steps"]
    assert step["data"]["not_loaded"][0]["rejected"][0]["problem"] == "too short"
    assert (step["data"]["cudnn"][0]["path"], step["data"]["cudnn"][1]) == ("/b", 91002)


@pytest.mark.parametrize("devices", [None, (), (CudaDevice(1, None, "H200", (9, 0), 1, 0),)])
def test_the_drivers_answer(devices: tuple[CudaDevice, ...] | None) -> None:
    found = result(ProbeStep("driver", False, "", {"code": 100, "devices": devices})).cuda
    assert found is not None
    assert (found.code, found.devices) == (100, devices)
