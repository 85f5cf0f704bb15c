"""What a probe found, as its parent reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ortgpu.diagnosis.probe.result import NVML, ProbeResult, ProbeStep
from ortgpu.environment.gpu.driver import LIBCUDA


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
    candidate = {"soname": "libcudnn.so.9", "path": "/a", "source": "wheel", "root": "/", "problem": "too short"}
    missing = {"soname": "libcudnn.so.9", "required": True, "wheel": None, "rejected": [candidate]}
    loaded = {"soname": "libcudnn.so.9", "path": "/b", "source": "system", "root": "/", "required": False}
    data = {"not_loaded": [missing], "cudnn": [loaded, 91002], "cudnn_mixed": ["a", "b"]}
    found = result(ProbeStep("libraries", False, "", data))
    assert found.missing is not None
    assert found.missing[0].rejected[0].problem == "too short"
    assert found.cudnn is not None
    assert (found.cudnn[0].path, found.cudnn[1]) == ("/b", 91002)
    assert found.cudnn_mixed == ("a", "b")


DEVICE = {"ordinal": 1, "uuid": None, "name": "H200", "total_memory": 1, "compute_mode": 0}


@pytest.mark.parametrize(
    ("devices", "listed"),
    [
        (None, None),
        ([], ()),
        ([{**DEVICE, "compute_capability": [9, 0]}], ((1, (9, 0)),)),
        ([{**DEVICE, "compute_capability": None}], ((1, None),)),
    ],
)
def test_the_drivers_answer(devices: list[Any] | None, listed: Any) -> None:
    found = result(ProbeStep("driver", False, "", {"code": 100, "devices": devices})).cuda
    assert found is not None
    assert found.code == 100
    seen = found.devices
    assert (None if seen is None else tuple((each.ordinal, each.compute_capability) for each in seen)) == listed
