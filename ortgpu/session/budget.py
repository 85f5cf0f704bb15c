"""The budget of GPU memory for a session: the limit of its arena, and the errors that name the budget.

ONNX Runtime's arena holds the weights, the activations and the workspaces of cuDNN. Memory outside of it cannot be
limited: handles and workspaces of cuBLAS, for each concurrent run, and captured CUDA graphs. So the limit of the arena
leaves room for this memory, and the number of concurrent runs is limited.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import Fix, GPUOutOfMemoryError, InsufficientDeviceMemoryError, ProviderRequestError, manual
from ..process.threads import Turns
from ..provider.options import config_entry
from ..provider.requests import CUDA, TENSORRT, ProviderList
from ..provider.settings import LIMIT
from ..running.memory import Holdings, measure

if TYPE_CHECKING:
    from ..running.plain_runs import RunningSession

_GIB = 1 << 30

_MIB = 1 << 20
_OUTSIDE_PLANS = 150 * _MIB  # the handles and workspaces of the session with the plans
_LEAST_PLANS = 64 * _MIB  # the least memory for activations and workspaces of plans
_SHARED_ARENA = "session.use_env_allocators"
_GROWTH = "arena_extend_strategy"
_OWN_ALLOCATOR = "gpu_external_alloc"


def runs_at_a_time(budget: int) -> int:
    """Return how many runs a session with a budget makes at a time. Each run takes memory outside of the arena."""
    return 1 if budget < _GIB else 2 if budget < 4 * _GIB else 4


def bytes_outside(budget: int) -> int:
    """Return the bytes to leave for memory outside of the arena.

    Sessions of five networks on an H200 had 65 MiB there once they were open, and 129 to 149 MiB after a run. After two
    concurrent runs they had 261 to 305 MiB, and after four 452 to 471 MiB.
    """
    runs = runs_at_a_time(budget)
    return (70 + 80 * runs + (80 if runs > 1 else 0)) * _MIB


def least_budget(arena: int) -> int:
    """Return the least budget that has room for an arena of so many bytes."""
    return next(
        budget
        for least in (0, _GIB, 4 * _GIB)
        if runs_at_a_time(budget := max(arena + bytes_outside(least), least)) == runs_at_a_time(least)
    )


def choose_limits(budget: int, own: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the options of the CUDA provider that keep a budget, each with its value and the reason.

    ``own``: the options that the caller set. They stay.
    """
    reserve = bytes_outside(budget)
    limit = max(budget - reserve, _MIB)  # A limit of 0 bytes would mean no limit.
    outside = f"memory={budget} less {reserve // _MIB} MiB for what lies outside of the arena"
    limits = {LIMIT: (str(limit), outside), _GROWTH: ("kSameAsRequested", "regions of powers of two waste a budget")}
    return {name: choice for name, choice in limits.items() if name not in own}


def share_with_plans(limit: tuple[str, str], weights: int | None) -> dict[str, tuple[str, str]]:
    """Return the limit of the arena that leaves half of it to plans for further shapes.

    Nothing is left to them if they have no room there: their session holds the weights once more.
    """
    size, why = limit
    half = int(size) // 2
    if weights is None or half - _OUTSIDE_PLANS < 2 * weights + _LEAST_PLANS:
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
    # A session that captures makes one run at a time.
    outside = bytes_outside(0) if captures else bytes_outside(budget) + _OUTSIDE_PLANS
    return max(0, budget - outside - int(limit))


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
    budget: int, chosen: Mapping[str, tuple[str, str]], own: Mapping[str, str], *, captures: bool
) -> Holdings:
    """Return the holdings of a session with a budget.

    Args:
        chosen: the options of the CUDA provider that the session set.
        own: the options that the caller set.
        captures: True if the session captures CUDA graphs.
    """
    limit = chosen[LIMIT][0] if LIMIT in chosen else own.get(LIMIT) if captures else None
    return Holdings(budget, Turns(runs_at_a_time(budget)), room_in(budget, limit, captures=captures))


def too_small(error: InsufficientDeviceMemoryError, budget: int) -> InsufficientDeviceMemoryError:
    """Return the error of a model that does not open within a budget."""
    return InsufficientDeviceMemoryError(
        f"this model does not open within memory={budget} ({_mebibytes(budget)})",
        evidence=[*error.evidence, f"{bytes_outside(budget) // _MIB} MiB of it are for memory outside of the arena"],
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
