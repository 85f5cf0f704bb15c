"""The attempts of the profile "training": the training API, MPI, and on request other hosts and a shared folder.

MPI is started once, in a process of its own, because MPI_Init ends the process that calls it if it fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...diagnosis.probe.probing import run_probe_child
from ...diagnosis.probe.result import ProbeResult, ProbeStep
from ...environment.child import parse_answer, python_command, run, run_python
from ...environment.inspection import Environment
from ...environment.ranks import Rank, current_rank
from ..environment import Mpi, SshAttempt, TrainingEnvironment, inspect_training, try_ssh
from ..shared_folder import FolderMeeting

# If a launcher started this rank, MPI works, and a launcher inside a launcher proves nothing.
_STARTED_BY_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_GRACE = 3.0  # seconds for mpirun to end its process, and for a child to start and to end
_MEET = """
import json
from ortgpu.distributed.shared_folder import meet_in_folder
folder, rank, world_size, timeout = sys.argv[1:]
met = meet_in_folder(folder, int(rank), int(world_size), timeout=float(timeout))
print(json.dumps([met.missing, met.error, met.seconds]))
"""
_INITIALISE = """
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
print(MPI.COMM_WORLD.size, "rank,", MPI.Get_library_version().splitlines()[0])
"""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The facts about training together. ``ssh`` and ``shared_folder`` are there on request."""

    environment: TrainingEnvironment
    ssh: tuple[SshAttempt, ...] = ()
    shared_folder: FolderMeeting | None = None


def read_training_facts(
    environment: Environment, hosts: Sequence[str], shared_folder: str | os.PathLike[str] | None, *, timeout: float
) -> TrainingFacts:
    """Read all facts. Try ssh to ``hosts``, and meet in ``shared_folder``."""
    meeting = None
    if shared_folder is not None:
        # First, while the ranks are at the same place: each takes its own time for what follows.
        meeting = meet(shared_folder, current_rank(), timeout=timeout)
    return TrainingFacts(
        inspect_training(environment.packages.onnxruntime.folder),
        tuple(try_ssh(host, timeout=timeout) for host in hosts),
        meeting,
    )


def meet(folder: str | os.PathLike[str], rank: Rank, *, timeout: float) -> FolderMeeting:
    """Call ``meet_in_folder`` in a child process, because a file system without its server may block for ever."""
    started = time.monotonic()
    arguments = (os.fsdecode(folder), str(rank.rank), str(rank.world_size), str(timeout))
    ended = run_python(_MEET, *arguments, timeout=timeout + _GRACE)
    answer = parse_answer(ended.output)
    if answer is not None:
        missing, error, seconds = answer
        return FolderMeeting(os.fsdecode(folder), rank.rank, rank.world_size, tuple(missing), error, seconds)
    others = tuple(other for other in range(rank.world_size) if other != rank.rank)
    why = "the file system does not answer" if ended.timed_out else ended.errors.strip()[-500:]
    return FolderMeeting(os.fsdecode(folder), rank.rank, rank.world_size, others, why, time.monotonic() - started)


def run_training_probe(mpi: Mpi, *, timeout: float) -> ProbeResult:
    """Try the driver and the training API in one child, and MPI in another."""
    result = run_probe_child("probing.train()", timeout=timeout)
    step = try_mpi(mpi, timeout=timeout)
    return result if step is None else replace(result, steps=(*result.steps, step))


def try_mpi(mpi: Mpi, *, timeout: float) -> ProbeStep | None:
    """Start one process that initialises MPI and calls Allreduce. Return None if there is nothing to try.

    Without a launcher the process starts by itself, as a world of one, which MPI allows.
    """
    if mpi.library is None or any(name in os.environ for name in _STARTED_BY_MPI):
        return None
    launcher = [mpi.mpirun, "-np", "1"] if mpi.mpirun is not None else []
    ended = run([*launcher, *python_command(_INITIALISE)], timeout=timeout, grace=_GRACE)
    data = {"command": " ".join([*launcher, "python", "..."]), "returncode": ended.returncode}
    if ended.ok:
        return ProbeStep("mpi", True, ended.output.strip(), data)
    said = (ended.errors.strip() or ended.output.strip())[-4000:]
    how = f"did not end within {timeout:g} s" if ended.timed_out else f"ended with {ended.returncode}"
    return ProbeStep("mpi", False, how, {**data, "errors": said})
