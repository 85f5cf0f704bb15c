"""What the ranks said of themselves, judged before NCCL is touched. Pure: every rank comes to the same error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..environment.ranks import Rank
from ..errors import CollectiveMismatchError, GPUError, NCCLError, RankDeviceError, manual
from .reports import Collective, RankFacts, named
from .verdicts import EXCHANGE, of_rank
from .wire import GarbledError, Message, error_from_message

_INVALID_USAGE = 5  # ncclInvalidUsage


@dataclass(frozen=True, slots=True)
class Described:
    """One rank's description of itself: facts, what is wrong with its GPU or its NCCL, and what it is going to call."""

    facts: RankFacts
    problem: GPUError | None
    nccl_problem: GPUError | None
    calls: tuple[Collective, ...]

    @classmethod
    def parse(cls, message: Message) -> Described:
        """Raises GarbledError."""
        try:
            facts = RankFacts(**message["facts"])
            if type(facts.rank) is not int or not all(isinstance(each, str | None) for each in astuple(facts)[1:]):
                raise TypeError("facts that are none")
            return cls(
                facts,
                error_from_message(message["problem"]) if message["problem"] else None,
                error_from_message(message["nccl_problem"]) if message["nccl_problem"] else None,
                tuple(Collective(*call) for call in message["calls"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GarbledError(f"no description of a rank: {error!r}") from None


def broken(roster: Sequence[Described]) -> GPUError | None:
    """The first reason why these ranks cannot work together, the others attached; or None."""
    found = [
        *_alike({each.facts.rank: each.problem for each in roster if each.problem is not None}, roster),
        _same_gpu(roster),
        _different_calls(roster),
        *_alike({each.facts.rank: each.nccl_problem for each in roster if each.nccl_problem is not None}, roster),
        _different_nccl(roster),
    ]
    errors = [error for error in found if error is not None]
    return errors[0].with_others(errors[1:]) if errors else None


def _alike(problems: dict[int, GPUError], roster: Sequence[Described]) -> list[GPUError]:
    """One error for each kind, with all ranks that have it."""
    hosts = {each.facts.rank: each.facts.host for each in roster}
    by_kind: dict[tuple[str, str], list[int]] = {}
    for rank, error in problems.items():
        by_kind.setdefault((error.code, error.summary), []).append(rank)
    found = []
    for ranks in by_kind.values():
        error = of_rank(problems[ranks[0]], ranks[0], hosts[ranks[0]])
        if len(ranks) > 1:
            places = sorted({hosts[rank] for rank in ranks})
            error.evidence = (f"on {named(ranks)}, on {', '.join(places)}", *error.evidence[1:])
        if "ranks" in error.fields:
            error.ranks = tuple(ranks)  # type: ignore[attr-defined]  # fields has it
        found.append(error)
    return found


def _same_gpu(roster: Sequence[Described]) -> RankDeviceError | None:
    by_uuid: dict[str, list[int]] = {}
    for each in roster:
        if each.facts.uuid is not None:
            by_uuid.setdefault(each.facts.uuid, []).append(each.facts.rank)
    shared = {uuid: ranks for uuid, ranks in by_uuid.items() if len(ranks) > 1}
    if not shared:
        return None
    ranks = tuple(sorted(rank for some in shared.values() for rank in some))
    return RankDeviceError(
        f"{named(ranks)} do not have a GPU each: " + "; ".join(f"{named(r)} have {uuid}" for uuid, r in shared.items()),
        evidence=[f"rank {each.facts.rank} on {each.facts.host}: {each.facts.uuid or 'unknown'}" for each in roster],
        fixes=[
            manual("show each rank all GPUs of its host, or one of its own: CUDA_VISIBLE_DEVICES, or the launcher"),
            manual("start as many ranks on a host as it has GPUs"),
        ],
        ranks=ranks,
        phase=EXCHANGE,
    )


def _different_calls(roster: Sequence[Described]) -> CollectiveMismatchError | None:
    plans = {each.calls for each in roster}
    if len(plans) == 1:
        return None
    length = max(map(len, plans))
    place = next(n for n in range(length) if len({plan[n : n + 1] for plan in plans}) > 1)
    by_call: dict[str, list[int]] = {}
    for each in roster:
        call = str(each.calls[place]) if place < len(each.calls) else "nothing more"
        by_call.setdefault(call, []).append(each.facts.rank)
    most = max(by_call.values(), key=len)
    odd = tuple(sorted(rank for ranks in by_call.values() if ranks is not most for rank in ranks))
    return CollectiveMismatchError(
        f"the ranks plan different operations: call {place + 1} is another one on {named(odd)}",
        evidence=[f"call {place + 1} on {named(ranks)}: {call}" for call, ranks in by_call.items()],
        fixes=[manual("make the same calls, in the same order, on every rank")],
        ranks=odd,
        phase=EXCHANGE,
    )


def _different_nccl(roster: Sequence[Described]) -> NCCLError | None:
    by_version: dict[str, list[int]] = {}
    for each in roster:
        if each.facts.nccl is not None:
            by_version.setdefault(each.facts.nccl, []).append(each.facts.rank)
    if len(by_version) < 2:
        return None
    return NCCLError(
        "the ranks have different releases of NCCL, which refuse to work together",  # src/init.cc compares them
        evidence=[f"NCCL {version} on {named(ranks)}" for version, ranks in by_version.items()],
        fixes=[manual("install one release of NCCL on all hosts")],
        ranks=tuple(sorted(rank for ranks in by_version.values() for rank in ranks)),
        phase=EXCHANGE,
        status=_INVALID_USAGE,
    )


def notes(rank: Rank, roster: Sequence[Described]) -> tuple[str, ...]:
    """What a preflight of these ranks does not cover."""
    found = []
    if rank.world_size == 1:
        found.append("one rank: each operation ran, and nothing passed between GPUs")
    elif rank.on_one_host:  # two hosts may have one name
        found.append("one host: no network between hosts was used")
    if any(each.facts.uuid is None for each in roster):
        found.append("the driver tells no UUIDs: whether ranks share a GPU is not known")
    return tuple(found)
