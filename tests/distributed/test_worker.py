"""What the child of a rank meets on its GPU - driver, CUDA, NCCL - and how the whole preflight tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_preflight_failures import FIRST
from tests.lab import Machine
from tests.lab.fixtures import Lab, with_gpus
from tests.lab.installed import CUDA
from tests.lab.launchers import launch
from tests.support.preflight_runs import CALLS, assert_all_raise, run


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """With three GPUs and NCCL."""
    return module_lab.machine_with_nccl()


def test_other_calls_than_the_others(machine: Machine) -> None:
    used = Path(str(machine.env["STUB_NCCL_FOLDER"]))
    before = set(used.iterdir())
    job = run(machine, ranks=3, calls={"0": CALLS, "1": CALLS, "2": CALLS[:2]})
    assert_all_raise(job, range(3), "CollectiveMismatchError", named=[2], phase="exchange")
    assert "call 3 on rank 2: nothing more" in job.error(0).evidence
    assert set(used.iterdir()) == before, "NCCL was used before the plans were compared"


def test_two_ranks_on_one_gpu(machine: Machine) -> None:
    job = run(with_gpus(machine, 1))
    assert_all_raise(job, range(2), "RankDeviceError", named=[0, 1], phase="exchange")


def test_more_ranks_than_gpus(machine: Machine) -> None:
    job = run(with_gpus(machine, 2), ranks=3, env={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert_all_raise(job, range(3), "RankDeviceError", named=[2], phase="device")
    assert "CUDA_VISIBLE_DEVICES=1,0" in job.error(0).evidence


def test_gpus_that_the_launcher_hands_out(machine: Machine) -> None:
    job = run(machine, variables={"0": {"CUDA_VISIBLE_DEVICES": "1"}, "1": {"CUDA_VISIBLE_DEVICES": "0"}})
    assert [facts["uuid"][-1] for facts in job.returned(0)["ranks"]] == ["1", "0"]


def test_no_driver(machine: Machine) -> None:
    job = launch(machine.but(cuda=None, nvml=None), "environment", 2, "preflight", {"timeout": 20.0})
    assert_all_raise(job, range(2), "DriverNotFoundError", named=[])
    for number in range(2):
        assert any(fact.startswith("on ranks 0, 1, on ") for fact in job.error(number).evidence)


def test_no_gpu_for_one_rank(machine: Machine) -> None:
    job = run(machine, variables={"1": {"CUDA_VISIBLE_DEVICES": ""}})
    assert_all_raise(job, range(2), "NoDeviceError", named=[])
    assert any(fact.startswith("on rank 1, host ") for fact in job.error(0).evidence)


def test_another_release_of_nccl(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_NCCL_VERSION": "22703"}})
    assert_all_raise(job, range(2), "NCCLError", named=[0, 1], phase="exchange")
    assert job.error(0).details["status"] == 5
    assert job.error(0).evidence == ("NCCL 2.28.9 on rank 0", "NCCL 2.27.3 on rank 1")


def test_no_bindings_and_no_library(lab: Lab) -> None:
    machine = lab.machine_with_nccl(2)
    machine.overlay.remove("nvidia/nccl")
    job = launch(machine, "environment", 2, "preflight", {"timeout": 20.0})
    assert_all_raise(job, range(2), "LibraryNotFoundError", named=[])
    assert job.error(1).details["missing"] == ["libnccl.so.2"]
    assert f"install nvidia-nccl-cu{CUDA}" in job.error(1).fixes[0]
    machine.overlay.remove("nccl")
    job = launch(machine, "environment", 2, "preflight", {"timeout": 20.0})
    assert_all_raise(job, range(2), "NCCLError", named=[0, 1])
    assert "install 'nccl4py>=0.6,<0.7'" in job.error(1).fixes[0]


@pytest.mark.parametrize(
    ("function", "status"), [("ncclGetUniqueId", 5), ("ncclAllReduce", 2), ("ncclCommInitRankConfig", 3)]
)
def test_nccl_fails(machine: Machine, function: str, status: int) -> None:
    job = run(machine, variables={"0": {"STUB_NCCL_FAIL": f"{function}={status}"}})
    assert_all_raise(job, range(2), "NCCLError", named=[0])
    for number in range(2):
        assert job.error(number).details["status"] == status
        assert any(f"NCCL WARN {function} was told to fail" in fact for fact in job.error(number).evidence)
        words = "unhandled system error" if status == 2 else "an error of the stub"
        assert job.error(number).text.startswith(f"NCCL failed: {words}\n"), "what NCCL's users search for"
        assert f"ncclResult_t {status}: {words}" in job.error(number).evidence
        assert "ncclGetLastError: said by the stub" in job.error(number).evidence


def test_remote_errors_are_not_the_cause(machine: Machine) -> None:
    """ncclRemoteError is what the others of a rank that failed are told: that rank's own error is shown."""
    failing = {"0": {"STUB_NCCL_FAIL": "ncclAllReduce=6"}, "1": {"STUB_NCCL_FAIL": "ncclAllReduce=2"}}
    assert_all_raise(run(machine, variables=failing), range(2), "NCCLError", named=[1])


def test_wrong_values(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_NCCL_SPOIL": "1"}})
    assert_all_raise(job, range(2), "NCCLError", named=[1], phase=FIRST)
    assert "element 0: 100.0 instead of 1.0" in job.error(0).evidence


def test_cuda_fails(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_CUDART_FAIL": "cudaMalloc=2"}})
    assert_all_raise(job, range(2), "InsufficientDeviceMemoryError", named=[])
    assert any(fact.startswith("on rank 1, host ") for fact in job.error(0).evidence)
