"""The budget of GPU memory for a session: the limit of its arena, and the errors that name the budget.

ONNX Runtime's arena holds the weights, the activations and the workspaces of cuDNN. The arena has a limit. The handles
of cuBLAS and cuDNN lie outside of it. They take 65 MiB of an H200 for each stream, and for each thread that makes a run
until the thread ends. With all runs in one stream, 65 MiB are all. So a session with a budget has one stream, and makes
one run at a time: two threads must not use the same handles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import Fix, GPUOutOfMemoryError, InsufficientDeviceMemoryError, ProviderRequestError, manual
from ..process.threads import Turns
from ..provider.options import config_entry
from ..provider.requests import CUDA, TENSORRT, ProviderList
from ..provider.settings import LIMIT, ONE_STREAM
from ..running.memory import Holdings, measure

if TYPE_CHECKING:
    from ..running.plain_runs import RunningSession

_MIB = 1 << 20

# Bytes that a session may take outside of its arena. Five networks had 62 to 78 MiB there on an H200, whatever the
# number of threads.
OUTSIDE = 150 * _MIB
_LEAST_PLANS = 64 * _MIB  # the least memory for activations and workspaces of plans
_SHARED_ARENA = "session.use_env_allocators"
_GROWTH = "arena_extend_strategy"
_OWN_ALLOCATOR = "gpu_external_alloc"


def choose_limits(budget: int, own: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the options of the CUDA provider that keep a budget, each with its value and the reason.

    ``own``: the options that the caller set. They stay.
    """
    limit = max(budget - OUTSIDE, _MIB)  # A limit of 0 bytes would mean no limit.
    limits = {
        LIMIT: (str(limit), f"memory={budget} less {OUTSIDE // _MIB} MiB for what lies outside of the arena"),
        _GROWTH: ("kSameAsRequested", "regions of powers of two waste a budget"),
        ONE_STREAM: ("1", "handles for each stream and each thread would take more than the budget"),
    }
    return {name: choice for name, choice in limits.items() if name not in own}


def share_with_plans(limit: tuple[str, str], weights: int | None) -> dict[str, tuple[str, str]]:
    """Return the limit of the arena that leaves half of it to plans for further shapes.

    Nothing is left to them if they have no room there: their session holds the weights once more.
    """
    size, why = limit
    half = int(size) // 2
    if weights is None or half - OUTSIDE < 2 * weights + _LEAST_PLANS:
        return {}
    return {LIMIT: (str(int(size) - half), f"{why}, and {half // _MIB} MiB for plans of further shapes")}


def share_with_graphs(limit: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """Return the limit of the arena that leaves a quarter of it to captured CUDA graphs and their buffers."""
    size, why = limit
    part = int(size) // 4
    return {LIMIT: (str(int(size) - part), f"{why}, and {part // _MIB} MiB for CUDA graphs")}


def room_in(budget: int, limit: str | None, *, captures: bool) -> int:
    """Return the bytes that the arena of plans, or captured graphs, may take within a budget.

    ``limit``: that of the session's arena; None: the caller set it, and there are no plans.
    """
    if limit is None:
        return 0
    return max(0, budget - (OUTSIDE if captures else 2 * OUTSIDE) - int(limit))  # The plans are a session of their own.


def why_not_limited(providers: ProviderList, options: Any) -> str | None:
    """Return why no limit would keep a session within a budget; None if one would."""
    if tensorrt := [name for name in providers.names if name in TENSORRT]:
        return f"{tensorrt[0]} allocates GPU memory without a limit"
    if providers.options_of(CUDA).get(_OWN_ALLOCATOR, "0") != "0":
        return f"the provider option {_OWN_ALLOCATOR} hands memory to an allocator of the caller's"
    if options is not None and config_entry(options, _SHARED_ARENA) == "1":
        return f"the session option {_SHARED_ARENA} has sessions share an arena"
    return None


def not_limited(reason: str) -> ProviderRequestError:
    """Return the error for a budget that cannot be kept."""
    return ProviderRequestError(
        "memory= cannot limit this session",
        evidence=[reason],
        fixes=[manual("leave out memory= and ORTGPU_MEMORY, or what contradicts them")],
        requested="memory",
    )


def holdings_within(
    budget: int,
    chosen: Mapping[str, tuple[str, str]],
    own: Mapping[str, str],
    former: Holdings | None,
    *,
    captures: bool,
) -> Holdings:
    """Return the holdings of a session with a budget.

    Args:
        chosen: the options of the CUDA provider that the session set.
        own: the options that the caller set.
        former: the holdings before the session was opened again. Runs that wait for its turn will use the new session.
        captures: True if the session captures CUDA graphs.
    """
    limit = chosen[LIMIT][0] if LIMIT in chosen else own.get(LIMIT) if captures else None
    return Holdings(budget, (former and former.turns) or Turns(), room_in(budget, limit, captures=captures))


def too_small(error: InsufficientDeviceMemoryError, budget: int) -> InsufficientDeviceMemoryError:
    """Return the error of a model that does not open within a budget."""
    return InsufficientDeviceMemoryError(
        f"this model does not open within memory={budget} ({_mebibytes(budget)})",
        evidence=[*error.evidence, f"{OUTSIDE // _MIB} MiB of it are for memory outside of the arena"],
        fixes=[_RAISE, manual("`ortgpu check MODEL --fit` tells how much a model needs")],
        requested=error.requested,
        free=error.free,
        total=error.total,
    )


def exceeded(error: GPUOutOfMemoryError, session: RunningSession, budget: int) -> GPUOutOfMemoryError:
    """Return the error of a run that did not fit into the budget even after the session gave back memory."""
    lines = str(measure(session)).splitlines()
    size = f": {error.requested // _MIB} MiB were asked for" if error.requested is not None else ""
    return GPUOutOfMemoryError(
        f"the session's budget of {_mebibytes(budget)} is reached{size}",
        evidence=[*error.evidence, "the session holds, without what it gave back:", *lines],
        fixes=[manual("use a smaller batch; the session keeps working"), _RAISE],
        requested=error.requested,
        free=error.free,
        total=error.total,
    )


_RAISE: Fix = manual("or raise memory= (ORTGPU_MEMORY)")


def _mebibytes(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"
