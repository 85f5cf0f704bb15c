"""The real NCCL of NVIDIA's wheel, below the real nccl4py, without a GPU: what it says when it cannot work.

On demand, since the wheel has some hundred megabytes: ``pytest -m matrix``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.launchers import Job, launch

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

VERSION = "2.28.9"


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """Driver and CUDA runtime are the lab's: they name two GPUs, and NCCL finds that it cannot use them."""
    machine = module_lab.machine_with_nccl(2)
    machine.overlay.remove("nvidia/nccl")
    machine.overlay.add_wheel(module_lab.wheels.get("nvidia-nccl-cu13", VERSION))
    return machine


def run(machine: Machine, misbehaving: Mapping[str, str] | None = None, **env: str) -> Job:
    arguments = {"timeout": 60.0, "misbehaving": misbehaving}
    return launch(machine, "environment", 2, "preflight", arguments, env=env, timeout=120)


def test_no_interface(machine: Machine) -> None:
    job = run(machine, NCCL_SOCKET_IFNAME="nope")
    for number in range(2):
        error = job.error(number)
        assert error.type == "NCCLError"
        assert (error.details["status"], error.details["ranks"]) == (5, [0]), error.text
        assert any("NCCL WARN Bootstrap : no socket interface found" in fact for fact in error.evidence), error.text
    assert job.left == ()


def test_more_of_what_it_does_where_the_fix_says(machine: Machine, tmp_path: Path) -> None:
    job = run(machine, NCCL_SOCKET_IFNAME="nope", NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{tmp_path}/nccl.%h.%p")
    assert any("NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p" in fix for fix in job.error(1).fixes)
    written = [path.read_text(encoding="utf-8") for path in tmp_path.glob("nccl.*")]
    assert any("NCCL INFO" in text and "no socket interface found" in text for text in written)


def test_the_system_fails_it(machine: Machine) -> None:
    """It says no more than this; from 2.32 on it warns of the files too."""
    job = run(machine, {"0": "without_files"})
    for number in range(2):
        error = job.error(number)
        assert error.type == "NCCLError"
        assert (error.details["status"], error.details["ranks"]) == (2, [0]), error.text
        assert any("unhandled system error" in fact for fact in error.evidence)
    assert job.left == ()


def test_cuda_does_not_work(machine: Machine) -> None:
    job = run(machine)
    for number in range(2):
        error = job.error(number)
        assert error.type == "NCCLError"
        assert error.details["status"] == 1, error.text
        assert any("NCCL WARN" in fact for fact in error.evidence), error.text
    assert job.left == ()


def test_version_and_path_are_the_librarys_own(machine: Machine) -> None:
    result = machine.run("from ortgpu.distributed import worker\nreport(worker.load_nccl())").ok()
    version, path = result.json
    assert version == VERSION
    assert Path(path) == machine.overlay.path("nvidia/nccl/lib/libnccl.so.2")
