"""The choice of a rank's own GPU, and the locks that give no two ranks of a job on this host the same GPU.

There is one empty file for each GPU. A rank locks the byte at the offset of its job and rank. Then it asks for locks of
other ranks of its job. So at least one of two simultaneous ranks sees the other. The kernel releases the locks of a
process when it ends, and a forked child does not have them (fcntl(2)).
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from ..environment.gpu.cuda import CudaDevice, CudaState, initialise
from ..environment.ranks import (
    FOLDER_NEEDED,
    MOST_RANKS,
    Rank,
    current_rank,
    identity_of,
    runtime_folder,
    short_name,
    visibility,
)
from ..errors import LauncherConflictError, RankDeviceError, counted, manual
from ..process.background import fork_safe_lock, this_thread
from . import lifetime
from .devices import describe, narrowed_by, too_late

if sys.platform != "win32":
    import fcntl

_files: dict[Path, int] = {}  # descriptors; they stay open, since closing one gives up its locks
_claimed: set[tuple[int, int, int]] = set()  # process, descriptor, offset
_lock = fork_safe_lock()
_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process


def own_device(rank: Rank, cuda: CudaState) -> CudaDevice:
    """Return the GPU of a rank: the only visible GPU, or the GPU with the local rank as ordinal.

    A launcher that gives each rank its own GPU shows only this GPU. This function does not notice two ranks with the
    same GPU.

    Raises:
        RankDeviceError: there is no GPU, or there are several GPUs but fewer than ranks on this host.
    """
    devices = cuda.devices or ()
    if len(devices) == 1:
        return devices[0]
    if rank.local_rank < len(devices):
        return devices[rank.local_rank]
    narrowed = narrowed_by(os.environ.get("CUDA_VISIBLE_DEVICES"), cuda.hidden_by)
    raise RankDeviceError(
        f"rank {rank.rank} has no GPU: it is number {rank.local_rank} of {rank.local_world_size} on this host, and sees"
        f" {counted(len(devices), 'GPU')}",
        evidence=[
            *(describe(device.ordinal, device.name, device.uuid) for device in devices),
            narrowed or visibility(None),
        ],
        fixes=[
            manual(f"start at most {len(devices)} ranks on this host"),
            manual("or show the ranks more GPUs: CUDA_VISIBLE_DEVICES, or the launcher's option for GPUs"),
            *too_late(narrowed),
        ],
        ranks=(rank.rank,),
        phase="device",
    )


def local_rank_of_several() -> int | None:
    """Return the local rank in a job with several ranks on this host. None in other jobs, or if it is unknown."""
    try:
        rank = current_rank()
    except LauncherConflictError:
        return None
    return rank.local_rank if rank.local_world_size > 1 else None


def device_of_torch() -> int | None:
    """Return PyTorch's current device in the calling thread. None if PyTorch has not used CUDA in this process."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return None
    return int(cuda.current_device())


def warning_of_rank(local_rank: int) -> str:
    return (
        f"this session is on GPU 0, and so are those of the other ranks on this host: this process has local rank "
        f"{local_rank}, and device was not passed. GPUSession.for_rank(model) opens it on the GPU of its rank; "
        'device="cuda:0" says that GPU 0 is meant'
    )


def claimed_ordinal() -> int:
    """Claim the GPU of this process's rank, and return its ordinal.

    Initialises the driver and makes no context. If the driver fails or lists no devices, the ordinal is the local rank:
    the session reports the fault when it opens.

    Raises:
        LauncherConflictError: see :func:`~ortgpu.distributed.current_rank`.
        RankDeviceError: the rank has no GPU, or another rank has claimed it.
        ForkedSessionError, PoisonedContextError: this process cannot use CUDA any more.
    """
    lifetime.refuse_if_lost()
    rank = current_rank()
    cuda = initialise()
    if not cuda.devices:
        return rank.local_rank
    device = own_device(rank, cuda)
    if device.uuid is not None and sys.platform == "linux":
        claim(rank, device.uuid)
    return device.ordinal


def claim(rank: Rank, uuid: str) -> None:
    """Claim a GPU for this rank until the process ends. Other processes of the same rank may claim it, too.

    Raises:
        RankDeviceError: another rank of the job on this host has the GPU, or the file cannot be made.

    Not seen: ranks in containers that share no folder, and ranks that were started by hand without MASTER_ADDR or
    MASTER_PORT.
    """
    if rank.world_size == 1:
        return
    first = int(short_name(identity_of(rank))[:10], 16) * MOST_RANKS
    try:
        path = runtime_folder() / f"claims-{uuid}"
        with this_thread.holds, _lock:
            if path not in _files:
                _files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            claim_key = os.getpid(), _files[path], first + rank.rank
            fcntl.lockf(claim_key[1], fcntl.LOCK_SH, 1, claim_key[2])  # shared with the processes that a rank starts
            others = (other for other in range(rank.world_size) if other != rank.rank)
            holders = [other for other in others if _is_locked(claim_key[1], first + other)]
            if not holders:
                _claimed.add(claim_key)
            elif claim_key not in _claimed:
                fcntl.lockf(claim_key[1], fcntl.LOCK_UN, 1, claim_key[2])
    except OSError as error:
        raise RankDeviceError(
            "ortgpu cannot verify that every rank has a GPU of its own",
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


def _is_locked(descriptor: int, offset: int) -> bool:
    """Return True if another process has locked the byte at an offset."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return bool(kind != fcntl.F_UNLCK)
