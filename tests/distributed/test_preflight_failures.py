"""Every way in which ranks of a preflight fail each other: all of them raise, and name who is to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Machine, launchers
from tests.lab.fixtures import Lab, with_gpus
from tests.lab.installed import CUDA
from tests.lab.launchers import Job, launch
from tests.support.preflight_runs import ARRIVAL, CALLS, TIMEOUT, assert_all_raise, run


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """With three GPUs and NCCL."""
    return module_lab.machine_with_nccl()


# Ranks that fail the others

COMMUNICATOR = "setting up the communicator"
FIRST = "all_reduce of 1000 float32"
LAST = "waiting for the other ranks"


@pytest.mark.parametrize(
    ("kind", "error_type", "phase"),
    [
        ("absent", "RendezvousError", "rendezvous"),
        ("killed_in_driver", "RendezvousError", "looking at the GPU"),
        pytest.param(
            "asleep_in_driver", "RendezvousError", "waiting for the facts of the others", marks=pytest.mark.slow
        ),
        pytest.param("never_joins", "CollectiveTimeoutError", COMMUNICATOR, marks=pytest.mark.slow),
        pytest.param("asleep", "CollectiveTimeoutError", COMMUNICATOR, marks=pytest.mark.slow),
        ("deaf", "CollectiveTimeoutError", COMMUNICATOR),
        pytest.param("noisy", "CollectiveTimeoutError", COMMUNICATOR, marks=pytest.mark.slow),
        ("killed", "CollectiveTimeoutError", COMMUNICATOR),
        ("killed_in_operation", "CollectiveTimeoutError", FIRST),
        pytest.param("idle", "CollectiveTimeoutError", FIRST, marks=pytest.mark.slow),
        pytest.param("asleep_with_results", "CollectiveTimeoutError", LAST, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_the_others(machine: Machine, kind: str, error_type: str, phase: str) -> None:
    launcher = "openmpi" if launchers.why_not_here("openmpi") is None else "environment"
    job = run(machine, launcher, timeout=ARRIVAL if kind == "absent" else TIMEOUT, misbehaving={"1": kind})
    assert_all_raise(job, {0} if kind == "absent" else {0, 1}, error_type, named=[1], phase=phase)
    assert all(outcome.seconds < TIMEOUT + 1 for outcome in job.ranks.values()), "after its deadline"


def test_rank_0_never_comes(machine: Machine) -> None:
    job = run(machine, ranks=3, timeout=ARRIVAL, misbehaving={"0": "absent"})
    assert_all_raise(job, {1, 2}, "RendezvousError", named=[0], phase="rendezvous")


def test_ranks_of_different_shells_that_nothing_ties_together(machine: Machine) -> None:
    """By hand, without MASTER_ADDR: one process has to have started all of them, and the advice is true."""

    def by_hand(**more: str) -> Job:
        program = launchers.rank_program("preflight", {"timeout": ARRIVAL, "calls": {"all": CALLS}})
        shell = ["/bin/sh", "-c", '"$@"; exit $?', "sh", str(machine.overlay.python), *program]
        numbers = [
            {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for number in "01"
        ]
        return launchers.launch_commands(machine, [(shell, {**own, **more}) for own in numbers])

    job = by_hand()
    assert {job.error(number).type for number in range(2)} == {"RendezvousError"}
    assert any("MASTER_ADDR and MASTER_PORT" in fix for fix in job.error(1).fixes), job.error(1).text
    job = by_hand(MASTER_ADDR="localhost", MASTER_PORT="29511")
    assert [job.returned(number)["rank"]["rank"] for number in range(2)] == [0, 1]


def test_as_many_ranks_as_can_be_are_missing(machine: Machine) -> None:
    """A number that somebody mistyped: it costs no rank its deadline, and nobody a page of numbers."""
    variables = {str(number): {"WORLD_SIZE": "1000000", "LOCAL_WORLD_SIZE": "1000000"} for number in range(2)}
    job = run(machine, timeout=ARRIVAL, variables=variables)
    for number in range(2):
        error = job.error(number)
        assert error.type == "RendezvousError"
        assert error.text.startswith("ranks 2, 3, 4, 5, 6, 7, 8, 9 and 999990 more of 1000000 never came"), error.text[
            :99
        ]
        assert len(error.details["ranks"]) == 999_998
        assert job.ranks[number].seconds < TIMEOUT + 1
    assert job.left == ()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "torchrun"])
def test_under_the_other_launchers(machine: Machine, launcher: str) -> None:
    job = run(machine, launcher, timeout=TIMEOUT, misbehaving={"1": "asleep"})
    assert_all_raise(job, range(2), "CollectiveTimeoutError", named=[1], phase=COMMUNICATOR)


@pytest.mark.parametrize(("dead", "others"), [("1", {0, 2}), ("0", {1, 2})])
def test_a_rank_dies_itself(machine: Machine, dead: str, others: set[int]) -> None:
    """Its child goes with it, although that hangs where nothing but the kernel reaches it."""
    job = run(machine, ranks=3, timeout=TIMEOUT, misbehaving={dead: "parent_killed"})
    assert_all_raise(job, others, "CollectiveTimeoutError", named=[int(dead)])


def test_who_comes_late_learns_of_an_early_failure(machine: Machine) -> None:
    job = run(machine, ranks=3, misbehaving={"1": "killed_in_driver"}, late={"2": 1.5})
    assert_all_raise(job, {0, 1, 2}, "RendezvousError", named=[1], phase="looking at the GPU")


@pytest.mark.slow
def test_rank_0_stands_still(machine: Machine) -> None:
    """Nobody decides for all then: each comes to it by itself."""
    job = run(machine, timeout=TIMEOUT, misbehaving={"0": "parent_stopped"})
    error = job.error(1)
    assert (error.type, error.details["ranks"]) == ("CollectiveTimeoutError", [0]), error.text
    assert "rank 0 went silent" in error.text
    assert job.ranks[1].seconds < TIMEOUT + 1
    assert job.left == ()


@pytest.mark.slow
def test_a_rank_stands_still_and_goes_on(machine: Machine) -> None:
    """It learns what was decided meanwhile, and does not put it on rank 0."""
    job = run(machine, ranks=3, timeout=TIMEOUT, misbehaving={"1": "parent_stopped"})
    assert_all_raise(job, range(3), "CollectiveTimeoutError", named=[1], phase=COMMUNICATOR)
    assert job.ranks[1].seconds > TIMEOUT, "it did not stand still"


def test_a_launcher_ends_the_job_of_a_rank_that_dies(machine: Machine) -> None:
    """mpirun kills the other ranks, in whatever they are: their children have to go as well."""
    launchers.need("openmpi")
    job = run(machine, "openmpi", misbehaving={"1": "parent_killed"})
    assert job.status != 0
    assert job.left == ()


# What the ranks' descriptions show before NCCL is touched


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


# What NCCL and CUDA say


@pytest.mark.parametrize(
    ("function", "status"), [("ncclGetUniqueId", 5), ("ncclAllReduce", 2), ("ncclCommInitRankConfig", 3)]
)
def test_nccl_fails(machine: Machine, function: str, status: int) -> None:
    job = run(machine, variables={"0": {"STUB_NCCL_FAIL": f"{function}={status}"}})
    assert_all_raise(job, range(2), "NCCLError", named=[0])
    for number in range(2):
        assert job.error(number).details["status"] == status
        assert any(f"NCCL WARN {function} was told to fail" in fact for fact in job.error(number).evidence)


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
