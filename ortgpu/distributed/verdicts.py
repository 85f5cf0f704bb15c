"""Judgement of the ranks' reports. Pure functions from facts to one error, the same on every rank.

:func:`mismatch` compares the ranks before NCCL is used. The others judge what rank 0 knows of each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, field

from ..environment.ranks import Rank
from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributedError,
    Fix,
    GPUError,
    NCCLError,
    RankDeviceError,
    RendezvousError,
    escape_controls,
    manual,
)
from .reports import OWN_VERSION, Collective, RankFacts, grouped, named
from .wire import GarbledError, Message, error_from_message

RENDEZVOUS, EXCHANGE = "rendezvous", "exchange"
BETWEEN_HOSTS = manual(
    "look at the network between the hosts: whether it was up all the time, and passes packets as large as the MTU of "
    "its ends, as `ping -M do -s 1472 HOST` shows for 1500"
)
_INVALID_USAGE, _REMOTE_ERROR = 5, 6  # ncclResult_t
NCCL_BETWEEN_HOSTS = manual(
    "if NCCL chose a network interface that other hosts do not reach, name the right one: NCCL_SOCKET_IFNAME. "
    "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p has it write its choice"
)


# Before NCCL is used


@dataclass(frozen=True, slots=True)
class Described:
    """A rank's description of itself: its facts, the faults of its GPU and its NCCL, and the calls that it plans."""

    facts: RankFacts
    problem: GPUError | None
    nccl_problem: GPUError | None
    calls: tuple[Collective, ...]

    @classmethod
    def parse(cls, message: Message, rank: int) -> Described:
        """Return the rank that a message describes. Raises GarbledError."""
        try:
            facts = RankFacts(**message["facts"])
            if type(facts.rank) is not int or not all(isinstance(rank, str | None) for rank in astuple(facts)[1:]):
                raise TypeError("a fact of the wrong type")
            problem, nccl_problem = (message[key] for key in ("problem", "nccl_problem"))
            return cls(
                facts,
                error_from_message(problem, f"rank {rank}") if problem else None,
                error_from_message(nccl_problem, f"rank {rank}") if nccl_problem else None,
                tuple(Collective(*call) for call in message["calls"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GarbledError(f"no description of a rank: {error!r}") from None


def mismatch(roster: Sequence[Described]) -> GPUError | None:
    """Return the first reason why these ranks cannot work together, with the others attached. None if they can."""
    problems = [
        *_reported(roster, [rank.problem for rank in roster]),
        _same_gpu(roster),
        _different_calls(roster),
        *_reported(roster, [rank.nccl_problem for rank in roster]),
        _different_nccl(roster),
    ]
    errors = [error for error in problems if error is not None]
    return errors[0].with_others(errors[1:]) if errors else None


def _reported(roster: Sequence[Described], problems: Iterable[GPUError | None]) -> list[GPUError]:
    """Return one error for each kind. It names all ranks that have it."""
    hosts = {rank.facts.rank: escape_controls(rank.facts.host) for rank in roster}
    errors = {rank.facts.rank: error for rank, error in zip(roster, problems, strict=True) if error is not None}
    found = []
    for ranks in grouped(((error.code, error.summary), rank) for rank, error in errors.items()).values():
        error = add_rank(errors[ranks[0]], ranks[0], hosts[ranks[0]])
        if len(ranks) > 1:
            places = sorted({hosts[rank] for rank in ranks})
            error.evidence = (f"on {named(ranks)}, on {', '.join(places)}", *error.evidence[1:])
        if "ranks" in error.fields:
            error.ranks = tuple(ranks)  # type: ignore[attr-defined]  # fields has it
        found.append(error)
    return found


def _same_gpu(roster: Sequence[Described]) -> RankDeviceError | None:
    by_uuid = grouped((rank.facts.uuid, rank.facts.rank) for rank in roster if rank.facts.uuid is not None)
    shared = {uuid: ranks for uuid, ranks in by_uuid.items() if len(ranks) > 1}
    if not shared:
        return None
    ranks = tuple(sorted(rank for some in shared.values() for rank in some))
    return RankDeviceError(
        f"{named(ranks)} do not have a GPU each: " + "; ".join(f"{named(r)} have {uuid}" for uuid, r in shared.items()),
        evidence=[f"rank {rank.facts.rank} on {rank.facts.host}: {rank.facts.uuid or 'unknown'}" for rank in roster],
        fixes=[
            manual("show each rank all GPUs of its host, or one of its own: CUDA_VISIBLE_DEVICES, or the launcher"),
            manual("start as many ranks on a host as it has GPUs"),
        ],
        ranks=ranks,
        phase=EXCHANGE,
    )


def _different_calls(roster: Sequence[Described]) -> CollectiveMismatchError | None:
    plans = {rank.calls for rank in roster}
    if len(plans) == 1:
        return None
    place = next(n for n in range(max(map(len, plans))) if len({plan[n : n + 1] for plan in plans}) > 1)
    by_call = grouped(
        (str(rank.calls[place]) if place < len(rank.calls) else "nothing more", rank.facts.rank) for rank in roster
    )
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
    by_version = grouped((rank.facts.nccl, rank.facts.rank) for rank in roster if rank.facts.nccl is not None)
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
    """Return the gaps of a preflight of these ranks, in sentences."""
    gaps = []
    if rank.world_size == 1:
        gaps.append("one rank: each operation ran, and nothing passed between GPUs")
    elif rank.share_one_host:  # two hosts may have one name
        gaps.append("one host: no network between hosts was used")
    if any(rank.facts.uuid is None for rank in roster):
        gaps.append("the driver tells no UUIDs: whether ranks share a GPU is not known")
    return tuple(gaps)


# From what rank 0 knows


Position = tuple[int, str]  # the number of steps that the child of a rank has begun, and the name of the last one
NOWHERE: Position = (0, "starting")


@dataclass(slots=True)
class Known:
    """The knowledge of rank 0, waiting at ``where``. ``failures`` are in the order of their arrival."""

    world_size: int
    where: str
    hosts: dict[int, str] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    failures: dict[int, GPUError] = field(default_factory=dict)
    has_exchanged: bool = False  # every rank's facts are known to all

    @property
    def all_came(self) -> bool:
        return len(self.hosts) == self.world_size

    def awaits(self, rank: int) -> bool:
        return 0 <= rank < self.world_size and rank not in self.hosts

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self.hosts)


def never_came(known: Known, refused: Collection[str] = ()) -> RendezvousError:
    """Return the error for ranks that missed the rendezvous. ``refused``: reasons why connections were refused."""
    missing = known.missing
    return RendezvousError(
        f"{named(missing)} of {known.world_size} never came to the rendezvous",
        evidence=[
            f"rank 0 waited for them on {known.hosts.get(0, 'its host')}, {known.where}",
            *(f"rank {rank} came, from {host}" for rank, host in sorted(known.hosts.items()) if rank != 0),
            *(f"refused: {reason}" for reason in refused),
        ],
        fixes=[
            manual(f"look at the output of {named(missing)}: it ended, it was not started, or it did something else"),
            manual("if it runs on another host: make sure that it reaches rank 0's address, through any firewall"),
        ],
        others=known.failures.values(),
        ranks=missing,
        phase=RENDEZVOUS,
    )


def unfit(known: Known, rank: int, host: str, release: object, world_size: object) -> RendezvousError | None:
    """Return the error for a process that came as this rank and cannot take part. None if it can."""
    if release != OWN_VERSION:
        summary = f"rank {rank} runs ortgpu {release}, and rank 0 runs ortgpu {OWN_VERSION}"
        fix = "install the same release of ortgpu on all hosts"
    elif world_size != known.world_size:
        summary = f"rank {rank} was told of {world_size} ranks in all, and rank 0 of {known.world_size}"
        fix = "tell all processes the same number: WORLD_SIZE, or the launcher's options for hosts and processes"
    elif not known.awaits(rank):
        taken = rank in known.hosts
        summary = f"two processes say that they are rank {rank}" if taken else f"rank {rank} is none of this job"
        fix = "give each process a number of its own: RANK, or the launcher's option for the number of the host"
    else:
        return None
    return RendezvousError(
        summary,
        evidence=[
            f"rank {number} came, from {place}" for number, place in ((rank, host), *sorted(known.hosts.items()))
        ],
        fixes=[manual(fix)],
        ranks=(rank,),
        phase=RENDEZVOUS,
    )


def gone(known: Known, rank: int) -> DistributedError:
    _, step = known.positions.get(rank, NOWHERE)
    return _unfinished(
        known,
        (rank,),
        step,
        f"rank {rank} ended, or lost its connection, during: {step}",
        [],
        [manual(f"look at the output of rank {rank}")],
    )


def timeout_error(known: Known) -> DistributedError:
    """Return the error at the deadline. It names the ranks that are behind, else those that report no timeout."""
    positions = {rank: known.positions.get(rank, NOWHERE) for rank in known.hosts}
    least = min(number for number, _ in positions.values())
    behind = tuple(rank for rank, (number, _) in positions.items() if number == least)
    silent = tuple(rank for rank in positions if rank not in known.failures)
    _, furthest = max(positions.values(), key=lambda position: position[0])
    if len(behind) < len(positions):
        late, summary = behind, f"{named(behind)} had not come to this by the deadline: {furthest}"
    elif 0 < len(silent) < len(positions):
        late, summary = silent, f"{named(silent)} did not come back from this by the deadline: {furthest}"
    else:
        late, summary = tuple(positions), f"no rank came back from this by the deadline: {furthest}"
    error = _unfinished(
        known,
        tuple(sorted(late)),
        furthest,
        summary,
        [f"rank {rank} on {known.hosts[rank]}: {step}" for rank, (_, step) in sorted(positions.items())],
        [
            manual(f"look at {named(late)} first: the last step that it began is named above"),
            manual("if it was only slow, give it more time: the timeout"),
        ],
    )
    if known.has_exchanged and BETWEEN_HOSTS in error.fixes:
        error.fixes = (*error.fixes, NCCL_BETWEEN_HOSTS)
    return error


def _unfinished(
    known: Known, ranks: tuple[int, ...], phase: str, summary: str, evidence: list[str], fixes: list[Fix]
) -> DistributedError:
    cls = CollectiveTimeoutError if known.has_exchanged else RendezvousError
    if len(set(known.hosts.values())) > 1:
        fixes = [*fixes, BETWEEN_HOSTS]
    return cls(summary, evidence=evidence, fixes=fixes, ranks=ranks, phase=phase)


def cause(known: Known) -> GPUError:
    """Return the first failure that does not follow from another rank's failure."""
    failures = known.failures
    roots = {rank: error for rank, error in failures.items() if not is_consequence(error)}
    if not roots:
        if all(isinstance(error, CollectiveTimeoutError) for error in failures.values()):
            return timeout_error(known)
        roots = {rank: error for rank, error in failures.items() if isinstance(error, NCCLError)}
    rank, error = next(iter(roots.items()))
    others = [other for number, other in failures.items() if number != rank and not is_consequence(other)]
    return add_rank(error, rank, known.hosts.get(rank)).with_others(others)


def is_consequence(error: GPUError) -> bool:
    """Return True if another rank's failure explains this one: a timeout that names no ranks, or ncclRemoteError."""
    return (isinstance(error, CollectiveTimeoutError) and not error.ranks) or (
        isinstance(error, NCCLError) and error.status == _REMOTE_ERROR
    )


def add_rank(error: GPUError, rank: int, host: str | None) -> GPUError:
    """Add the rank and its host to the error, and return it."""
    place = f"on rank {rank}" + (f", host {host}" if host else "")
    error.evidence = (place, *error.evidence)
    if isinstance(error, DistributedError) and not error.ranks:
        error.ranks = (rank,)
    return error
