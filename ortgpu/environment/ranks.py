"""The rank, world size and job of this process, from the variables of the launcher that started it.

The processes of a job on one host find each other in a folder.

Verified with torchrun 2.13, Open MPI 4.1.8 and 5.0.11, MPICH 4.0.3 and 5.0.2, srun of Slurm 22.05.8, and the launcher
of DeepSpeed 0.19.8. The variables that srun --mpi=pmi2 adds are from its source, and not verified.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import LauncherConflictError, manual
from ..process.late import late
from ..process.temporary import make_own_folder

if TYPE_CHECKING:
    import tempfile
else:
    tempfile = late("tempfile")

MOST_RANKS = 1_000_000  # No job has as many. A wrong number would cost memory for each rank.
Launcher = Literal["torchrun", "openmpi", "mpich", "srun", "environment"]


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a job.

    ``rank`` counts over all hosts, ``local_rank`` over the processes of this host. ``launcher`` is None in a world of
    one without a launcher. It is "environment" if RANK, WORLD_SIZE and so on are set, but not by torchrun.
    ``master_address`` is the host of rank 0, or None if the launcher does not name it (mpirun).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: Launcher | None = None
    master_address: str | None = None

    def __post_init__(self) -> None:
        if self.world_size > MOST_RANKS:
            raise ValueError(f"{self.world_size} ranks are more than {MOST_RANKS}, the most that ortgpu counts")
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size):
            raise ValueError(
                f"rank {self.rank} of {self.world_size} and local rank {self.local_rank} of {self.local_world_size} "
                "are not possible: a rank is less than its world's size, and the host's part not more than the world"
            )

    @property
    def share_one_host(self) -> bool:
        return self.local_world_size == self.world_size


# The variables of each launcher: rank, size of the world, rank among the processes of the host, their number
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

#: Launchers number the processes of a host in these variables.
LOCAL_RANKS = (_TORCH[2], _OPENMPI[2], _MPICH[2], "SLURM_LOCALID")

# Processes of Horovod, jsrun, Flux, MVAPICH, PALS and PMIx must not count as worlds of one.
_OF_OTHER_LAUNCHERS = (
    *("HOROVOD_RANK", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "PMIX_RANK"),
)
_UNNUMBERED_STEPS = 0xFFFF_FFF0  # first id of batch scripts, interactive shells and the like: slurm.h


@dataclass(frozen=True, slots=True)
class _Claim:
    """The numbers in one launcher's variables. Local numbers are None if it leaves them to another launcher."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    variables: tuple[str, ...]  # "RANK=0", as evidence
    master_address: str | None = None


def current_rank(environ: Mapping[str, str] | None = None) -> Rank:
    """Return the rank of this process, by the launcher's variables in ``environ`` (``os.environ``) alone.

    Without any it is a world of one. If srun started torchrun or mpirun once per host, the variables of torchrun or
    mpirun count. Any other contradiction raises.

    Raises:
        LauncherConflictError: launchers contradict each other, or variables are missing or no numbers. ``evidence``
            names these variables with their values.
    """
    variables = os.environ if environ is None else environ
    srun = _srun(variables)
    others = (_read("openmpi", _OPENMPI, variables), _read("mpich", _MPICH, variables), _torch(variables))
    inner_claims = [
        claim for claim in others if claim is not None and not (srun is not None and _is_pmi_of(srun, claim))
    ]
    if srun is not None and inner_claims and all(_was_started_by(srun, claim, variables) for claim in inner_claims):
        srun = None
    claims = [*([srun] if srun is not None else []), *inner_claims]
    if not claims:
        if unread := [f"{name}={variables[name]}" for name in _OF_OTHER_LAUNCHERS if name in variables]:
            raise _incomplete("they are of a launcher whose variables ortgpu does not read", unread)
        _reject_part_of_srun(variables)
        return Rank(0, 1, 0, 1)
    for number in ("rank", "world_size", "local_rank", "local_world_size"):
        if len({getattr(claim, number) for claim in claims} - {None}) > 1:
            raise _contradiction(claims)
    first = claims[0]
    local_rank = next((claim.local_rank for claim in claims if claim.local_rank is not None), None)
    local_size = next((claim.local_world_size for claim in claims if claim.local_world_size is not None), None)
    if first.world_size == 1 and local_rank is None and local_size is None:
        local_rank, local_size = 0, 1  # There is no other process.
    if local_rank is None or local_size is None:
        raise _incomplete("the rank among the processes of this host is not known", first.variables)
    address = next((claim.master_address for claim in claims if claim.master_address), None)
    try:
        return Rank(first.rank, first.world_size, local_rank, local_size, first.launcher, address)
    except ValueError as impossible:
        raise _incomplete(str(impossible), [variable for claim in claims for variable in claim.variables]) from None


def _torch(variables: Mapping[str, str]) -> _Claim | None:
    names = _TORCH
    if "RANK" in variables and "LOCAL_WORLD_SIZE" not in variables and "LOCAL_SIZE" in variables:  # DeepSpeed's
        names = (*names[:3], "LOCAL_SIZE")
    launcher: Launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment"
    return _read(launcher, names, variables, variables.get("MASTER_ADDR") or None)


def _read(
    launcher: Launcher, names: tuple[str, str, str, str], variables: Mapping[str, str], address: str | None = None
) -> _Claim | None:
    present = [name for name in names if name in variables]
    if not present:
        return None
    evidence = tuple(f"{name}={variables[name]}" for name in present)
    missing = [name for name in names[:2] if name not in variables]
    if missing:
        raise _incomplete(f"{', '.join(present)} is set, and {', '.join(missing)} is not", evidence)
    numbers = [_number(name, variables[name], evidence) if name in variables else None for name in names]
    rank, size, local_rank, local_size = numbers
    assert rank is not None
    assert size is not None
    return _Claim(launcher, rank, size, local_rank, local_size, evidence, address)


def _srun(variables: Mapping[str, str]) -> _Claim | None:
    """Read srun's variables if srun started this step. A batch script has SLURM_PROCID=0 too, but no numbered step."""
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    if "SLURM_PROCID" not in variables or not step.isdecimal() or int(step) >= _UNNUMBERED_STEPS:
        return None
    names = [
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS",
        "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in variables else "SLURM_TASKS_PER_NODE",
        "SLURM_NODEID",
    ]
    evidence = tuple(f"{name}={variables[name]}" for name in names if name in variables)
    missing = [name for name in names if name not in variables]
    if missing:
        raise _incomplete(f"srun started this process, and {', '.join(missing)} is not set", evidence)
    rank, local_rank, size, node = (_number(name, variables[name], evidence) for name in (*names[:3], names[4]))
    tasks = parse_tasks_per_node(variables[names[3]])
    if tasks is None or node >= len(tasks):
        raise _incomplete(f"{names[3]} does not say how many tasks run on node {node}", evidence)
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    return _Claim("srun", rank, size, local_rank, tasks[node], evidence, first_host(hosts))


def _reject_part_of_srun(variables: Mapping[str, str]) -> None:
    """Raise if part of srun's variables is missing, as in a container. A batch script has rank 0 and no step."""
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")
    if variables.get("SLURM_PROCID", "0") != "0" and not {"SLURM_STEP_ID", "SLURM_STEPID"} & variables.keys():
        evidence = [f"{name}={variables[name]}" for name in names if name in variables]
        raise _incomplete("srun started this process, and SLURM_STEP_ID is not set", evidence)


def parse_tasks_per_node(text: str) -> list[int] | None:
    """Return the numbers of tasks in Slurm's list: "2(x3),1" is 2, 2, 2, 1. None if it is no such list."""
    tasks: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", entry.strip())
        if match is None:
            return None
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def first_host(nodelist: str) -> str | None:
    """Return the first host of Slurm's list: node03 of "node[03-05,9],login". By default task 0 is there."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist.strip())
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else None


def _is_pmi_of(srun: _Claim, claim: _Claim) -> bool:
    """Return True if srun --mpi=pmi2 set these variables of MPICH. MPICH's own launcher sets local numbers, too."""
    numbers = (claim.rank, claim.world_size, claim.local_rank, claim.local_world_size)
    return claim.launcher == "mpich" and numbers == (srun.rank, srun.world_size, None, None)


def _was_started_by(srun: _Claim, inner: _Claim, variables: Mapping[str, str]) -> bool:
    """Return True if srun started the launcher's own process on this host, and not its ranks.

    torchrun gives the number of its agents. mpirun lets srun start one daemon on each host; Open MPI starts none on
    its own host. The shell of ``srun --pty`` starts anything.
    """
    if inner.launcher == "torchrun":
        return variables.get("GROUP_WORLD_SIZE") == str(srun.world_size)
    if inner.launcher == "environment" and srun.world_size > 1:
        return False
    return srun.local_world_size == 1 and inner.world_size > srun.world_size


def _number(name: str, text: str, evidence: tuple[str, ...]) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise _incomplete(f"{name}={text!r} is not a number", evidence)
    return int(text)


def _contradiction(claims: list[_Claim]) -> LauncherConflictError:
    # Exported variables are likelier to be left over. Between two launchers only the user can choose.
    doubtful = [claim for claim in claims if claim.launcher == "environment"] or claims
    fixes = []
    for claim in doubtful:
        by_hand = claim.launcher == "environment"
        why = "they are left over" if by_hand else f"it was not {claim.launcher} that started this process"
        fixes.append(manual(f"if {why}, unset {', '.join(entry.partition('=')[0] for entry in claim.variables)}"))
    return LauncherConflictError(
        "the variables of two launchers contradict each other about which rank this is",
        evidence=[
            f"{claim.launcher} says rank {claim.rank} of {claim.world_size}: {', '.join(claim.variables)}"
            for claim in claims
        ],
        fixes=fixes,
    )


def _incomplete(what: str, evidence: tuple[str, ...] | list[str]) -> LauncherConflictError:
    return LauncherConflictError(
        f"the launcher's variables do not say which rank this is: {what}",
        evidence=evidence,
        fixes=[
            manual("start the program with torchrun, mpirun or srun; or unset these variables, if they are left over"),
            manual(
                "or set all of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE: the last two count processes of a "
                "host, 0 and 1 where it has one"
            ),
        ],
    )


def visibility(visible_devices: str | None) -> str:
    return "CUDA_VISIBLE_DEVICES is not set" if visible_devices is None else f"CUDA_VISIBLE_DEVICES={visible_devices}"


FOLDER_NEEDED = manual(
    "set XDG_RUNTIME_DIR or TMPDIR to a folder that this user may write to, the same for each rank of a host"
)
_AT_AN_ADDRESS = ("torchrun", "environment")  # MASTER_ADDR is part of the identity of their jobs.
_HYDRA_PROXY = "hydra_pmi_proxy"  # It starts all ranks of one host, for MPICH and its derivatives.


def identity_of(rank: Rank, environ: Mapping[str, str] | None = None) -> str:
    """Return a text that the ranks of a job share on one host, and no other job has there at the same time.

    torchrun, Open MPI and srun number their jobs. MASTER_ADDR and MASTER_PORT serve one job at a time. MPICH gives no
    number, so the process that started the ranks of this host, or else the parent, identifies its job.
    """
    variables = os.environ if environ is None else environ
    names = _named(rank, variables)
    if rank.launcher in _AT_AN_ADDRESS:
        names = [*names, variables.get("MASTER_ADDR", "")]
    if any(names):
        return " ".join([rank.launcher or "", *names])
    above = list(_ancestors())
    proxy = next((process for process in above if process[1] == _HYDRA_PROXY), None)
    number, _, started = proxy or (above[0] if above else (os.getppid(), "", "0"))
    return f"{rank.launcher} started by process {number} of {started}"  # Numbers are reused, so the time is needed.


def is_told_apart_by_starter(rank: Rank) -> bool:
    """Return True for ranks started by hand if no variable names their job: one process started them."""
    names = [*_named(rank, os.environ), os.environ.get("MASTER_ADDR")]
    return rank.launcher == "environment" and not any(names)


def identity_between_hosts(rank: Rank) -> str | None:
    """Return a text that the ranks of a job share on all hosts, None if the launcher gives none.

    MASTER_ADDR is no part of it: a host may have another name for itself (localhost in a Kubernetes pod).
    """
    names = _named(rank, os.environ)
    return " ".join([rank.launcher or "", *names]) if any(names) else None


def _named(rank: Rank, variables: Mapping[str, str]) -> list[str]:
    port = variables.get("MASTER_PORT", "")
    if rank.launcher == "torchrun":
        return [variables.get("TORCHELASTIC_RUN_ID", ""), port]
    if rank.launcher == "environment":
        return [port]
    if rank.launcher == "openmpi":
        return [variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")]
    if rank.launcher == "srun":
        step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID", "")
        return [variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID", ""), step]
    return []


def short_name(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def runtime_folder() -> Path:
    """Return a folder of this user alone, in XDG_RUNTIME_DIR or else where temporary files are. Raises OSError."""
    if sys.platform == "win32":  # The temporary folder is this user's own there.
        folder = Path(tempfile.gettempdir(), "ortgpu")
        folder.mkdir(exist_ok=True)
        return folder
    refused = []
    for is_runtime, name in ((True, "ortgpu"), (False, f"ortgpu-{os.getuid()}")):
        # On a full disk or a read-only system there is no temporary folder, and perhaps no need for it.
        parent = os.environ.get("XDG_RUNTIME_DIR") if is_runtime else tempfile.gettempdir()
        if not parent or not os.path.isdir(parent):  # A launcher may pass on XDG_RUNTIME_DIR of another host.
            continue
        folder = Path(parent, name)
        try:
            make_own_folder(folder)  # Another user may have set a trap in the shared temporary folder.
        except OSError as error:
            refused.append(str(error))
            continue
        return folder
    raise OSError("; ".join(refused) or "there is neither XDG_RUNTIME_DIR nor a temporary folder")


def _ancestors() -> Iterator[tuple[int, str, str]]:
    """Yield number, name and start of the parent, its parent and so on, from /proc/PID/stat: proc(5)."""
    number = os.getppid()
    while number > 0:
        try:
            text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        yield number, name, fields[19]
        number = int(fields[1])
