"""Which rank a process is, by the launchers' variables: as tables, and under the real launchers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

import ortgpu
from ortgpu.distributed import Rank, current_rank
from ortgpu.environment.ranks import first_host, identity_of, parse_tasks_per_node
from ortgpu.errors import LauncherConflictError
from tests.lab import launchers
from tests.lab.fixtures import Lab
from tests.support.children import run_python

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "622395393",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[03-04]",
}  # fmt: skip
# As Slurm 22.05.8 sets them in the third of three tasks on two nodes
SRUN_SEEN = {
    "SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[01-02]", "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "2,1",
}  # fmt: skip
# And in a batch script of two tasks, which is one process
BATCH_SEEN = {
    "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "vm", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2", "SLURM_GTIDS": "0", "SLURM_NPROCS": "2",
}  # fmt: skip
# srun started one torchrun, or one daemon of mpirun, on each of the two hosts
SRUN_OF_AGENTS = {
    **SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"
}  # fmt: skip


# As its launcher sets them: deepspeed/launcher/launch.py
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
# What srun --mpi=pmi2 adds, which many sites have as MpiDefault: for agents, and in a shell (mpi_pmi2.c of Slurm)
PMI2_OF_AGENTS = {"PMI_FD": "17", "PMI_JOBID": "77.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
PMI2_OF_SHELL = {"PMI_FD": "17", "PMI_JOBID": "77.0", "PMI_RANK": "0", "PMI_SIZE": "1"}
SHELL_OF_SRUN = {
    **SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, Rank(0, 1, 0, 1), id="none"),
        pytest.param(TORCHRUN, Rank(3, 4, 1, 2, "torchrun", "node1"), id="torchrun"),
        pytest.param(
            {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"},
            Rank(3, 4, 1, 2, "environment", "node1"),
            id="by hand",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, Rank(0, 1, 0, 1, "environment"), id="a world of one by hand"),
        pytest.param(OPENMPI, Rank(3, 4, 1, 2, "openmpi"), id="Open MPI"),
        pytest.param(MPICH, Rank(3, 4, 1, 2, "mpich"), id="MPICH"),
        pytest.param(SRUN, Rank(3, 4, 1, 2, "srun", "node03"), id="srun"),
        pytest.param(
            {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, Rank(3, 4, 1, 2, "srun", "node03"), id="srun --mpi=pmi2"
        ),
        pytest.param(SRUN_SEEN, Rank(2, 3, 0, 1, "srun", "node01"), id="srun as it was seen"),
        pytest.param(BATCH_SEEN, Rank(0, 1, 0, 1), id="a batch script"),
        pytest.param(
            {"SLURM_PROCID": "1", **TORCHRUN}, Rank(3, 4, 1, 2, "torchrun", "node1"), id="torchrun in a container"
        ),
        pytest.param({**SRUN_OF_AGENTS, **TORCHRUN}, Rank(3, 4, 1, 2, "torchrun", "node1"), id="torchrun by srun"),
        pytest.param({**SRUN_OF_AGENTS, **OPENMPI}, Rank(3, 4, 1, 2, "openmpi"), id="mpirun by srun"),
        pytest.param({**OPENMPI, "RANK": "3", "WORLD_SIZE": "4"}, Rank(3, 4, 1, 2, "openmpi"), id="two that agree"),
        pytest.param(DEEPSPEED, Rank(3, 4, 1, 2, "environment", "node1"), id="DeepSpeed"),
        pytest.param({**SHELL_OF_SRUN, **DEEPSPEED}, Rank(3, 4, 1, 2, "environment", "node1"), id="in a shell of srun"),
        pytest.param({**SRUN, "SLURM_STEP_ID": "4294967291"}, Rank(0, 1, 0, 1), id="a batch script that has an id"),
        pytest.param({**OPENMPI, "PMIX_RANK": "3"}, Rank(3, 4, 1, 2, "openmpi"), id="Open MPI, which speaks PMIx"),
        pytest.param(
            {**SRUN_OF_AGENTS, **TORCHRUN, "PMIX_RANK": "1"},
            Rank(3, 4, 1, 2, "torchrun", "node1"),
            id="torchrun by srun, which speaks PMIx",
        ),
        pytest.param(
            {**SRUN_OF_AGENTS, **PMI2_OF_AGENTS, **TORCHRUN},
            Rank(3, 4, 1, 2, "torchrun", "node1"),
            id="torchrun by srun --mpi=pmi2",
        ),
        pytest.param(
            {**SHELL_OF_SRUN, **PMI2_OF_SHELL, **TORCHRUN, "GROUP_WORLD_SIZE": "1"},
            Rank(3, 4, 1, 2, "torchrun", "node1"),
            id="torchrun in a shell of srun --mpi=pmi2",
        ),
        pytest.param(
            {**SHELL_OF_SRUN, **PMI2_OF_SHELL, **OPENMPI},
            Rank(3, 4, 1, 2, "openmpi"),
            id="mpirun in a shell of srun --mpi=pmi2",
        ),
        pytest.param(
            {**SHELL_OF_SRUN, **PMI2_OF_SHELL, **MPICH},
            Rank(3, 4, 1, 2, "mpich"),
            id="Hydra in a shell of srun --mpi=pmi2",
        ),
        pytest.param({**SHELL_OF_SRUN, **PMI2_OF_SHELL}, Rank(0, 1, 0, 1, "srun", "node03"), id="that shell itself"),
        pytest.param(
            {**TORCHRUN, "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
            Rank(3, 4, 1, 2, "torchrun", "node1"),
            id="torchrun by jsrun",
        ),
        pytest.param({"LOCAL_SIZE": "4"}, Rank(0, 1, 0, 1), id="a name that means anything"),
    ],
)
def test_rank_by_variables(variables: Mapping[str, str], expected: Rank) -> None:
    assert current_rank(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"}, id="left over from torchrun, under mpirun"),
        pytest.param({**MPICH, "RANK": "0", "WORLD_SIZE": "1"}, id="under MPICH"),
        pytest.param({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, id="under srun"),
        pytest.param({**SRUN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "0"}, id="left over from mpirun, under srun"),
        pytest.param({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, id="a PMI that is not srun's"),
        pytest.param({**OPENMPI, **MPICH, "MPI_LOCALRANKID": "0"}, id="only the local rank differs"),
        pytest.param({**TORCHRUN, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "8"}, id="only the size differs"),
    ],
)
def test_contradictions_are_refused_with_all_variables(variables: dict[str, str]) -> None:
    with pytest.raises(LauncherConflictError) as caught:
        current_rank(variables)
    text = "\n".join(caught.value.evidence)
    names = {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE"}
    for name in names & set(variables):
        assert f"{name}={variables[name]}" in text
    assert caught.value.fixes
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("variables", "ways"),
    [
        pytest.param({**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"}, [Rank(3, 4, 1, 2, "openmpi")], id="exported"),
        pytest.param(
            {**OPENMPI, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            [Rank(0, 1, 0, 1, "mpich"), Rank(3, 4, 1, 2, "openmpi")],
            id="mpirun inside of another",
        ),
        pytest.param(
            {**OPENMPI, **TORCHRUN, "RANK": "2", "LOCAL_RANK": "0"},
            [Rank(2, 4, 0, 2, "torchrun", "node1"), Rank(3, 4, 1, 2, "openmpi")],
            id="torchrun inside of mpirun",
        ),
        pytest.param(
            {**SRUN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "0"},
            [Rank(0, 4, 1, 2, "openmpi"), Rank(3, 4, 1, 2, "srun", "node03")],
            id="left over from mpirun, under srun",
        ),
    ],
)
def test_each_way_out_of_a_contradiction_names_whose_variables_it_is_right_for(
    variables: dict[str, str], ways: list[Rank]
) -> None:
    """Which launcher started the process only its user knows: a way for each, and where it is clear, that alone."""
    with pytest.raises(LauncherConflictError) as caught:
        current_rank(variables)
    found = []
    for fix in caught.value.fixes:
        unset = set(fix.partition("unset ")[2].split(", "))
        assert unset < set(variables)
        found.append(current_rank({name: value for name, value in variables.items() if name not in unset}))
        others = {"openmpi", "mpich", "srun", "torchrun"} - {found[-1].launcher}
        assert fix.startswith(("if they are left over", *(f"if it was not {other} that" for other in others)))
    assert found == ways


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0"}, "RANK=0"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),  # and no local rank
        ({**TORCHRUN, "RANK": "one"}, "RANK=one"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1"),
        ({**TORCHRUN, "RANK": ""}, "RANK="),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4"),  # of 4
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2"),  # of 2
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5"),  # of 4 in all
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2"),  # and no local rank
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "0"}, "LOCAL_RANK=0"),  # Azure ML
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, "HOROVOD_RANK=1"),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_RANK=1"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}, "FLUX_TASK_RANK=1"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK=0"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"}, "PMIX_RANK=0"),
        ({"RANK": "0", "WORLD_SIZE": "999999999", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "WORLD_SIZE=999999999"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE=2(x"),
        ({**SRUN, "SLURM_NODEID": "7"}, "SLURM_NODEID=7"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, "SLURM_PROCID=3"),
        # What recipes for containers hand on; a batch script is number 0
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}, "SLURM_PROCID=3"),
    ],
)
def test_half_a_launcher_is_refused(variables: dict[str, str], named: str) -> None:
    with pytest.raises(LauncherConflictError) as caught:
        current_rank(variables)
    assert named in caught.value.evidence


def test_slurm_notations() -> None:
    assert parse_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert parse_tasks_per_node("4") == [4]
    assert parse_tasks_per_node("") is None
    assert first_host("node[03-05,9],login") == "node03"
    assert first_host("a,b") == "a"
    assert first_host("rack[1-2]n[04-05]x") == "rack1n04x"
    assert first_host("") is None


def test_a_rank_has_to_be_possible() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Rank(2, 2, 0, 1)
    with pytest.raises(ValueError, match="1000001 ranks are more than"):
        Rank(0, 1_000_001, 0, 1)


def test_names_arrive_with_ortgpu() -> None:
    code = "import ortgpu; print(ortgpu.distributed.current_rank().rank, 'distributed' in dir(ortgpu))"
    done = run_python(code, env={}).ok()
    assert done.stdout == "0 True\n"
    assert set(dir(ortgpu.distributed)) >= {"current_rank", "preflight", "Rank", "has_collective_ops"}
    with pytest.raises(AttributeError):
        _ = ortgpu.distributed.nothing_of_this_name


def test_jobs_are_told_apart() -> None:
    def identity(variables: dict[str, str]) -> str:
        return identity_of(current_rank(variables), variables)

    assert identity(SRUN) != identity({**SRUN, "SLURM_STEP_ID": "1"})
    assert identity(SRUN) == identity({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    assert identity(OPENMPI) != identity({**OPENMPI, "PMIX_NAMESPACE": "1"})
    assert identity(TORCHRUN) != identity({**TORCHRUN, "MASTER_PORT": "29501"})


# Under the real launchers


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_real_launcher(lab: Lab, launcher: str) -> None:
    launchers.need(launcher)
    job = launchers.launch(lab.machine(), launcher, 3, "who_am_i")
    master = {"torchrun": "localhost"}.get(launcher)
    expected = {number: asdict(Rank(number, 3, number, 3, launcher, master)) for number in range(3)}  # type: ignore[arg-type]  # the names are those of the ranks' launchers
    assert {number: job.returned(number) for number in range(3)} == expected


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_a_stale_world_of_one_under_mpirun(lab: Lab, launcher: str) -> None:
    """Exported by an earlier torchrun: every rank would take itself for rank 0 of 1."""
    launchers.need(launcher)
    job = launchers.launch(lab.machine(), launcher, 2, "who_am_i", env={"RANK": "0", "WORLD_SIZE": "1"})
    for number in range(2):
        error = job.error(number)
        assert error.type == "LauncherConflictError"
        assert "RANK=0, WORLD_SIZE=1" in error.text
        assert f"rank {number} of 2" in error.text


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_identity_of_a_job(lab: Lab, launcher: str) -> None:
    """The same for all ranks, and another one for the next job."""
    launchers.need(launcher)
    machine = lab.machine()
    jobs: list[set[Any]] = []
    for _ in range(2):
        job = launchers.launch(machine, launcher, 2, "identity")
        jobs.append({job.returned(number) for number in range(2)})
    first, second = jobs
    assert len(first) == len(second) == 1
    assert first != second
