"""Every way in which ranks of a preflight fail each other: all of them raise, and name who is to blame."""

from __future__ import annotations

import pytest

from tests.lab import Machine, launchers
from tests.lab.fixtures import Lab
from tests.lab.launchers import Job
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

    def by_hand(timeout: float, **more: str) -> Job:
        program = launchers.rank_program("preflight", {"timeout": timeout, "calls": {"all": CALLS}})
        shell = ["/bin/sh", "-c", '"$@"; exit $?', "sh", str(machine.overlay.python), *program]
        numbers = [
            {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for number in "01"
        ]
        return launchers.launch_commands(machine, [(shell, {**own, **more}) for own in numbers])

    job = by_hand(ARRIVAL)
    assert {job.error(number).type for number in range(2)} == {"RendezvousError"}
    assert any("MASTER_ADDR and MASTER_PORT" in fix for fix in job.error(1).fixes), job.error(1).text
    job = by_hand(30.0, MASTER_ADDR="localhost", MASTER_PORT="29511")
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


# What NCCL and CUDA say
