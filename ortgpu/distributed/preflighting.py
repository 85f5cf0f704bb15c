"""Prove that the ranks of a job can work together: meet, compare, then run collective operations on the GPUs.

The driver, CUDA and NCCL may hang or crash, so each rank calls them in a child process. The rank itself watches the
child and talks to the others through rank 0. It can always report what happened, and it can always kill the child.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from ..environment.ranks import Rank, current_rank
from ..errors import GPUError, UnsupportedPlatformError, manual
from .meeting import meeting_of
from .reports import Collective, PreflightReport, default_calls

_LONGEST = 1_000_000.0  # seconds: poll(2) takes milliseconds in 31 bits
MOST_CALLS = 10_000  # they fit into one message between ranks


def preflight(
    timeout: float = 60.0,
    *,
    rank: Rank | None = None,
    address: str | None = None,
    calls: Sequence[Collective] | None = None,
) -> PreflightReport:
    """Meet the other ranks, compare their facts, and run NCCL's operations between all GPUs with values checked.

    Every rank calls it, at about the same time. In a world of one, without a launcher, it checks what one rank can.

    Args:
        timeout: seconds for everything. Half of them are for the ranks to arrive. When they have passed, this function
            has returned or raised on every rank that called it.
        rank: the rank of this process; None asks the launcher's variables.
        address: HOST:PORT at which rank 0 is to listen, the same on every rank. Needed if the launcher names no host:
            mpirun over several machines.
        calls: the operations to run, in order; those of a program, for instance. Every rank has to name the same. None
            means a selection of sizes and types.

    Returns:
        The report, which is the same on all ranks.

    Raises:
        LauncherConflictError: the launchers' variables do not say which rank this is.
        RendezvousError: ranks did not meet, or did not describe themselves, in time. ``ranks`` names them. Or the
            secret cannot be read, or is empty.
        RankDeviceError: a rank has no GPU, or the same one as another.
        CollectiveMismatchError: the ranks' ``calls`` differ, or they called different operations.
        CollectiveTimeoutError: an operation did not end. ``ranks`` names who held it up, and ``phase`` where.
        NCCLError: NCCL failed, gave wrong values, or cannot be used. ``status`` is its ncclResult_t.
        GPUError: the reason why a rank has no usable GPU, as :func:`ortgpu.diagnose` gives it. ``evidence`` names the
            ranks.
        UnsupportedPlatformError: this is not Linux. NCCL exists for Linux only.
        ValueError: ``timeout`` or ``address`` is malformed, or there are more than 10,000 calls.

    A fault of one rank is raised on all of them. No process, socket or file is left. This process's CUDA is not used.
    The calling thread waits.

    On one host, without ``address``, only processes of the same user take part. Between hosts and with ``address``,
    whoever reaches rank 0's port and knows the port or the job can take a rank's place. To prevent that, give all ranks
    one secret: the variable ORTGPU_PREFLIGHT_SECRET, or ORTGPU_PREFLIGHT_SECRET_FILE with the path of a file.

    Not promised: that the ranks' programs call the same operations later, or how fast. The connection is not encrypted,
    and NCCL's own connections are not protected by the secret: use a trusted network. Whoever floods the port can keep
    ranks from meeting, but no rank from its deadline.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} is not a number of seconds")
    if sys.platform != "linux":
        raise UnsupportedPlatformError(
            f"NCCL exists for Linux only, and this is {sys.platform}",
            fixes=[manual("run the ranks on Linux", needs="host")],
            system=sys.platform,
        )
    if calls is not None and len(calls) > MOST_CALLS:
        raise ValueError(f"{len(calls)} calls are too many: at most {MOST_CALLS}")
    own = rank if rank is not None else current_rank()
    planned = tuple(calls) if calls is not None else default_calls(own.world_size)
    from .participant import Participant, Schedule  # Linux only

    participant = Participant(own, planned, meeting_of(own, address), Schedule.of(min(timeout, _LONGEST)))
    try:
        return participant.run()
    except GPUError:
        raise
    except BaseException:
        participant.leave_others()
        raise
    finally:
        participant.close()
