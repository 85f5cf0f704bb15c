"""Which GPUs are found: on machines of the lab, where the driver and NVML alone are stubs, and on this one."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ortgpu import testing
from ortgpu.errors import GPUError
from tests.lab import GPU, NVML, Cuda, Machine
from tests.lab.fixtures import Lab
from tests.pytest_plugin.inner import ONE_OF_EACH, PLUGIN, GiB
from tests.support.children import program_text

# Machines of the lab


def run_on(machine: Machine, folder: Path, tests: str, *arguments: str, conftest: str = "") -> Any:
    """An inner run on a machine of the lab: outcomes by test, and what was loaded by whom."""
    (folder / "conftest.py").write_text(dedent(CONFTEST) + dedent(conftest), encoding="utf-8")
    (folder / "test_inner.py").write_text(dedent(tests), encoding="utf-8")
    command = ["-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments]
    result = machine.run(argv=command, cwd=folder)
    assert result.json is not None, result.output
    return {**result.json, "output": result.output}


CONFTEST = program_text("pytest_plugin.found_gpus_conftest")

# The stub driver opens no session: what is tested here comes after that.
SESSIONS_OPEN = program_text("pytest_plugin.sessions_open")

SMALL = GPU("GPU-00000000-0000-0000-0000-0000000000aa", "NVIDIA T4", (7, 5), 16 * GiB, 15 * GiB)
LARGE = GPU("GPU-00000000-0000-0000-0000-0000000000bb", "NVIDIA H200", (9, 0), 141 * GiB, 140 * GiB)
TAKEN = GPU("GPU-00000000-0000-0000-0000-0000000000cc", "NVIDIA H200", (9, 0), 141 * GiB, 2 * GiB)


def test_nvml_is_well_and_cuda_is_broken(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(init=999, devices=(LARGE,)), nvml=NVML((LARGE,)))
    seen = run_on(machine, tmp_path, ONE_OF_EACH)
    assert seen["outcomes"] == {"test_plain": "passed", "test_marked": "skipped", "test_fixture": "skipped"}
    assert "no GPU can be used: driver-unusable: " in seen["reasons"]["test_marked"]
    assert "ortgpu: none: driver-unusable: " in seen["output"]
    assert "libonnxruntime" not in seen["loaded"], "what is tried is tried in a child"
    assert "libcudart.so" not in seen["loaded"]


def test_a_driver_that_opens_no_session(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)))
    seen = run_on(machine, tmp_path, ONE_OF_EACH, "--ortgpu=require")
    assert seen["outcomes"] == {"test_plain": "passed", "test_marked": "failed", "test_fixture": "failed"}
    assert "no GPU can be used: " in seen["reasons"]["test_marked"]
    assert "500" in seen["output"]  # what the CUDA runtime says of the stub


def test_skip_touches_nothing(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)))
    seen = run_on(machine, tmp_path, ONE_OF_EACH, "--ortgpu=skip")
    assert seen["outcomes"] == {"test_plain": "passed", "test_marked": "skipped", "test_fixture": "skipped"}
    assert seen["loaded"] == []
    assert seen["nvml"] is False


def test_several_gpus(lab: Lab, tmp_path: Path) -> None:
    gpus = (SMALL, LARGE, TAKEN)
    machine = lab.machine(
        cuda=Cuda(devices=gpus), nvml=NVML(gpus), env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONHASHSEED": "0"}
    )
    tests = program_text("pytest_plugin.several_gpus")
    seen = run_on(machine, tmp_path, tests, conftest=SESSIONS_OPEN)
    passed = dict.fromkeys(["test_all", "test_new", "test_large", "test_two"], "passed")
    assert seen["outcomes"] == {**passed, "test_none": "skipped", "test_four": "skipped"}, seen["reasons"]
    assert (
        "cuda:2 (NVIDIA H200, GPU-00000000-0000-0000-0000-0000000000cc): 2.0 GiB of 141.0 GiB free"
        in (seen["reasons"]["test_none"])
    )
    assert "needs 4 GPUs; found cuda:0 (NVIDIA T4, " in seen["reasons"]["test_four"]
    assert "ortgpu: cuda:0 (NVIDIA T4, GPU-00000000-0000-0000-0000-0000000000aa), cuda:1 " in seen["output"]

    visible = machine.but(env={"CUDA_VISIBLE_DEVICES": LARGE.uuid})
    tests = program_text("pytest_plugin.several_gpus_2")
    seen = run_on(visible, tmp_path, tests, conftest=SESSIONS_OPEN)
    assert seen["outcomes"] == {"test_one": "passed", "test_two": "skipped"}, seen["reasons"]


def test_the_leak_check_asks_nvml(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)))
    tests = program_text("pytest_plugin.the_leak_check_asks_nvml")
    seen = run_on(machine, tmp_path, tests, conftest=SESSIONS_OPEN)
    assert seen["outcomes"] == {
        "test_leak[shown]": "failed",
        "test_leak[not shown]": "failed",
        "test_growth[shown]": "passed",
        "test_growth[not shown]": "passed",
        "test_others[shown]": "passed",
        "test_others[not shown]": "failed",
    }, seen["output"]
    assert "95 MiB more on cuda:0" in seen["reasons"]["test_leak[shown]"]
    assert "(by this process)" in seen["reasons"]["test_leak[shown]"]
    assert "by all processes" in seen["reasons"]["test_leak[not shown]"]


def test_no_visible_gpu(lab: Lab) -> None:
    hidden = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)), env={"CUDA_VISIBLE_DEVICES": ""})
    code = """
from ortgpu import testing
found = testing.find_gpus()
report([found.gpus, found.problem.as_dict()["code"]])
"""
    assert hidden.run(code).ok().json == [[], "no-device"]


# This machine


def test_find_gpus_needs_a_session_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis that found nothing wrong proves nothing by itself."""
    from ortgpu.diagnosis import diagnosing
    from ortgpu.diagnosis.probe.probing import result_of

    ran: list[dict[str, Any]] = [
        {"end": "session", "ok": True, "detail": "", "data": {}, "printed": 0},
        {"done": True, "printed": 0},
    ]
    for entries, problem in (([], "the child told nothing"), (ran, None)):
        probe = result_of(entries, b"", 0, 1.0)
        found = diagnosing.Diagnosis((), None, probe)  # type: ignore[arg-type]  # no fact of it is looked at
        monkeypatch.setattr(diagnosing, "diagnose_inference", lambda found=found, **_: found)
        result = testing.find_gpus()
        assert (result.problem is None) == (problem is None)
        assert [device.ordinal for device in result.gpus] == ([0] if problem is None else [])


def test_find_gpus_on_this_machine() -> None:
    """Whatever this machine is: GPUs or a problem."""
    found = testing.find_gpus()
    assert found.gpus or found.problem is not None
    assert found.problem is None or isinstance(found.problem, GPUError)
    assert all(device.is_gpu for device in found.gpus)
