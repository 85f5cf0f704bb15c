"""The choice of a rank's own GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..environment.gpu.cuda import CudaDevice, initialise
from ..environment.ranks import Rank, current_rank, visibility
from ..errors import RankDeviceError, manual
from . import lifetime
from .devices import describe


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
        from .claims import claim

        claim(rank, device.uuid)
    return device.ordinal
