"""The job of this process, and a folder in which the processes of a job on one host find each other."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import manual
from .ranks import Rank

FOLDER_NEEDED = manual(
    "set XDG_RUNTIME_DIR or TMPDIR to a folder that this user may write to, the same for each rank of a host"
)
_AT_AN_ADDRESS = ("torchrun", "environment")  # whose jobs are told apart by MASTER_ADDR too
_HYDRA_PROXY = "hydra_pmi_proxy"  # starts all ranks of one host, for MPICH and what derives from it


def identity_of(rank: Rank, environ: Mapping[str, str] | None = None) -> str:
    """Return a text that the ranks of a job share on one host, and no other job has there at the same time.

    torchrun, Open MPI and srun number their jobs, MASTER_ADDR and MASTER_PORT serve one job at a time. MPICH
    gives no number: its job is known by the process that started the ranks of this host, or else by the parent.
    """
    variables = os.environ if environ is None else environ
    named = _named(rank, variables)
    if rank.launcher in _AT_AN_ADDRESS:
        named = [*named, variables.get("MASTER_ADDR", "")]
    if any(named):
        return " ".join([rank.launcher or "", *named])
    return f"{rank.launcher} started by process {_starter()}"


def is_told_apart_by_starter(rank: Rank) -> bool:
    """Return True for ranks started by hand whose job no variable names: one process started them."""
    variables = os.environ
    return rank.launcher == "environment" and not any([*_named(rank, variables), variables.get("MASTER_ADDR")])


def identity_between_hosts(rank: Rank, environ: Mapping[str, str] | None = None) -> str | None:
    """Return a text that the ranks of a job share on all hosts, and no other job on rank 0's host has.

    None if the launcher gives none.

    MASTER_ADDR is no part of it: a host may have another name for itself, localhost in a pod of Kubernetes.
    """
    named = _named(rank, os.environ if environ is None else environ)
    return " ".join([rank.launcher or "", *named]) if any(named) else None


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
    """Return the identity as part of a file's name."""
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def runtime_folder() -> Path:
    """Return a folder of this user alone on this host, in XDG_RUNTIME_DIR or else in the temporary folder.

    Raises:
        OSError: neither can be used; the text says why for each.
    """
    refused = []
    for parent, name in (
        (os.environ.get("XDG_RUNTIME_DIR"), "ortgpu"),
        (tempfile.gettempdir(), f"ortgpu-{os.getuid()}"),
    ):
        if not parent or not os.path.isdir(parent):  # a launcher hands on XDG_RUNTIME_DIR of the host it was called on
            continue
        folder = Path(parent, name)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            refused.append(str(error))
            continue
        # The temporary folder is everyone's: what lies there under our name may be a trap of another user.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            return folder
        refused.append(f"{folder} is not this user's alone: owner {found.st_uid}, {stat.filemode(found.st_mode)}")
    raise OSError("; ".join(refused) or "there is neither XDG_RUNTIME_DIR nor a temporary folder")


def _starter() -> str:
    above = list(_ancestors())
    proxy = next((process for process in above if process[1] == _HYDRA_PROXY), None)
    number, _, started = proxy or (above[0] if above else (os.getppid(), "", "0"))
    return f"{number} of {started}"  # with the time, because numbers of processes are reused


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
