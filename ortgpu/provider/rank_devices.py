"""The choice of a rank's own GPU, and the locked files by which no two ranks of a job on this host get the same one.

A rank locks its own file first and looks at those of other ranks then, so of two at the same time at least one sees the
other. The kernel releases a lock when the last process with the open file ends. The next claim removes its empty file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..environment.gpu.cuda import CudaDevice, initialise
from ..environment.ranks import FOLDER_NEEDED, Rank, current_rank, identity_of, runtime_folder, short_name, visibility
from ..errors import RankDeviceError, manual
from ..process.background import fork_safe_lock
from . import lifetime
from .devices import describe

if sys.platform != "win32":
    import fcntl

_held: dict[Path, int] = {}  # by path, its descriptor: open for the life of this process
_lock = fork_safe_lock()
_NAME = re.compile(r"claim-(?P<job>\w+)-(?P<uuid>[\w-]+)-rank(?P<rank>\d+)")


def own_device(rank: Rank, devices: Sequence[CudaDevice], visible_devices: str | None) -> CudaDevice:
    """Return the GPU of a rank among those that CUDA shows it: the one with the local rank as ordinal, or the only one.

    A launcher that gives each rank its own GPU shows only that. Two ranks with the same one are not noticed here.

    Raises:
        RankDeviceError: there are several GPUs, and fewer than ranks on this host; or none.
    """
    if len(devices) == 1:
        return devices[0]
    if rank.local_rank < len(devices):
        return devices[rank.local_rank]
    raise RankDeviceError(
        f"rank {rank.rank} has no GPU: it is number {rank.local_rank} of {rank.local_world_size} on this host, and sees"
        f" {len(devices)} GPU{'s' if len(devices) != 1 else ''}",
        evidence=[
            *(describe(device.ordinal, device.name, device.uuid) for device in devices),
            visibility(visible_devices),
        ],
        fixes=[
            manual(f"start at most {len(devices)} ranks on this host"),
            manual("or show the ranks more GPUs: CUDA_VISIBLE_DEVICES, or the launcher's option for GPUs"),
        ],
        ranks=(rank.rank,),
        phase="device",
    )


def claimed_ordinal() -> int:
    """Claim the GPU of this process's rank, and return its ordinal.

    Initialises the driver and makes no context. If the driver fails or lists no devices, it is the local rank: the
    session that follows finds out what is wrong.

    Raises:
        LauncherConflictError: see :func:`~ortgpu.distributed.current_rank`.
        RankDeviceError: there is no such GPU, or another rank has it.
        ForkedSessionError, PoisonedContextError: this process cannot use CUDA any more.
    """
    lifetime.refuse_if_lost()
    rank = current_rank()
    devices = initialise().devices
    if not devices:
        return rank.local_rank
    device = own_device(rank, devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device.uuid is not None and sys.platform != "win32":
        claim(rank, device.uuid)
    return device.ordinal


def claim(rank: Rank, uuid: str) -> None:
    """Claim a GPU for this rank until the process ends. Other processes of the same rank may claim it, too.

    Raises:
        RankDeviceError: another rank of the job on this host has it, or the file cannot be made.

    Not seen: ranks in containers that share no folder, and ranks that were started by hand without MASTER_ADDR or
    MASTER_PORT.
    """
    if rank.world_size == 1:
        return
    job = short_name(identity_of(rank))
    try:
        folder = runtime_folder()
        with _lock:
            path = folder / f"claim-{job}-{uuid}-rank{rank.rank}"
            is_new = path not in _held
            if is_new:
                _held[path] = _open_locked(path)
            holders = _other_ranks(folder, job, uuid, rank.rank)
            if holders and is_new:
                os.close(_held.pop(path))
    except OSError as error:
        raise RankDeviceError(
            "it cannot be made sure that every rank has a GPU of its own",
            evidence=[str(error)],
            fixes=[FOLDER_NEEDED],
            ranks=(rank.rank,),
            phase="device",
        ) from error
    if not holders:
        return
    ranks = tuple(sorted({rank.rank, *holders}))
    raise RankDeviceError(
        f"ranks {', '.join(map(str, ranks))} have the same GPU: {uuid}",
        evidence=[
            f"this is rank {rank.rank} of {rank.world_size}, number {rank.local_rank} of {rank.local_world_size} here",
            visibility(os.environ.get("CUDA_VISIBLE_DEVICES")),
        ],
        fixes=[
            manual(
                "show each rank all GPUs of the host, or one of its own: CUDA_VISIBLE_DEVICES, or the launcher's option"
            ),
            manual("start as many ranks on this host as it has GPUs"),
        ],
        ranks=ranks,
        phase="device",
    )


def _open_locked(path: Path) -> int:
    """Return the file, open and locked: shared, so that processes which a rank starts can claim its GPU, too."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for another process to look, no longer
            if _is_there(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed between the two calls


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _other_ranks(folder: Path, job: str, uuid: str, own: int) -> tuple[int, ...]:
    """Return the other ranks of this job that have the GPU. Remove files of any job that nobody holds."""
    found = []
    for path in sorted(folder.glob("claim-*")):
        match = _NAME.fullmatch(path.name)
        is_other = match is not None and (match["job"], match["uuid"], int(match["rank"])) != (job, uuid, own)
        if match is None or not is_other or path in _held:
            continue
        if _is_held(path) and (match["job"], match["uuid"]) == (job, uuid):
            found.append(int(match["rank"]))
    return tuple(found)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_there(path, descriptor):
            path.unlink()
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _let_go_in_child() -> None:
    """Close the descriptors in a forked child, which must not hold the GPU when the rank has ended."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
