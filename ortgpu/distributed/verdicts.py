"""What went wrong between the ranks, from what rank 0 knows of each: pure functions to one error, the same for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributedError,
    GPUError,
    NCCLError,
    RendezvousError,
    manual,
)
from .reports import OWN_VERSION, named

RENDEZVOUS, EXCHANGE = "rendezvous", "exchange"
BETWEEN_HOSTS = manual(
    "look at the network between the hosts: whether it was up all the time, and passes packets as large as the MTU of "
    "its ends, as `ping -M do -s 1472 HOST` shows for 1500"
)
_REMOTE_ERROR = 6  # ncclRemoteError
NCCL_BETWEEN_HOSTS = manual(
    "if NCCL chose a network interface that other hosts do not reach, name the right one: NCCL_SOCKET_IFNAME. "
    "its choice is in what NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p has it write"
)


@dataclass(frozen=True, slots=True)
class Position:
    """How many steps the child of a rank has begun, and the last one."""

    number: int
    step: str


NOWHERE = Position(0, "starting")
RUN = 100  # steps from this number on are the same on all ranks


@dataclass(slots=True)
class Known:
    """What rank 0 knows: ``where`` it waits for the others.

    ``hosts``: of the ranks that came; ``failures``: in the order of their arrival.
    """

    world_size: int
    where: str
    hosts: dict[int, str] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    failures: dict[int, GPUError] = field(default_factory=dict)
    has_exchanged: bool = False  # every rank's facts are known to all

    def position_of(self, rank: int) -> Position:
        return self.positions.get(rank, NOWHERE)

    @property
    def all_came(self) -> bool:
        return len(self.hosts) == self.world_size

    def awaits(self, rank: int) -> bool:
        return 0 <= rank < self.world_size and rank not in self.hosts

    @property
    def is_abreast(self) -> bool:
        """Every rank has begun as many steps as the others."""
        return len({self.position_of(rank).number for rank in range(self.world_size)}) == 1

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self.hosts)


def never_came(known: Known, refused: Collection[str] = ()) -> RendezvousError:
    """Not every rank was at the rendezvous in time. ``refused``: connections that were none of this job's ranks."""
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
    """Why what came as this rank cannot take part, however long it is waited for; or None."""
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
    """The connection to a rank ended before its time."""
    step = known.position_of(rank).step
    return _unfinished(
        known,
        (rank,),
        step,
        f"rank {rank} ended, or lost its connection, during: {step}",
        [],
        f"look at the output of rank {rank}",
    )


def out_of_time(known: Known) -> DistributedError:
    """The deadline came. Who is behind the others, else who has not said that it waits for them, is at fault."""
    positions = {rank: known.position_of(rank) for rank in known.hosts}
    least = min(position.number for position in positions.values())
    behind = tuple(rank for rank, position in positions.items() if position.number == least)
    silent = tuple(rank for rank in positions if rank not in known.failures)
    furthest = max(positions.values(), key=lambda position: position.number).step
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
        [f"rank {rank} on {known.hosts[rank]}: {position.step}" for rank, position in sorted(positions.items())],
        f"look at {named(late)} first: the last step that it began is named above",
    )
    if known.has_exchanged and BETWEEN_HOSTS in error.fixes:
        error.fixes = (*error.fixes, NCCL_BETWEEN_HOSTS)
    return error


def _unfinished(
    known: Known, ranks: tuple[int, ...], phase: str, summary: str, evidence: list[str], fix: str
) -> DistributedError:
    cls = CollectiveTimeoutError if known.has_exchanged else RendezvousError
    fixes = [manual(fix), manual("if it was only slow, give it more time: the timeout")]
    if len(set(known.hosts.values())) > 1:
        fixes.append(BETWEEN_HOSTS)
    return cls(summary, evidence=evidence, fixes=fixes, ranks=ranks, phase=phase)


def out_of_step(known: Known) -> CollectiveMismatchError | None:
    """Ranks began different operations in the same place."""
    by_number: dict[int, dict[str, list[int]]] = {}
    running = {rank: position for rank, position in known.positions.items() if position.number >= RUN}
    for rank, position in running.items():
        by_number.setdefault(position.number, {}).setdefault(position.step, []).append(rank)
    for _, found in sorted(by_number.items()):
        if len(found) > 1:
            steps = dict(sorted(found.items(), key=lambda step: min(step[1])))  # the same whoever was heard of first
            most, *others = sorted(steps.values(), key=len, reverse=True)
            ranks = tuple(sorted(rank for some in others for rank in some))
            summary = f"{named(ranks)} called another operation than {named(most)} in the same place"
            if len(most) == len(others[0]):  # who is to say which of them is wrong?
                ranks = tuple(sorted([*most, *ranks]))
                summary = f"{named(ranks)} called different operations in the same place"
            return CollectiveMismatchError(
                summary,
                evidence=[f"{named(some)}: {step}" for step, some in steps.items()],
                fixes=[manual("make the same calls, in the same order, on every rank")],
                ranks=ranks,
                phase=max(steps, key=lambda step: len(steps[step])),
            )
    return None


def cause(known: Known) -> GPUError:
    """Of what ranks reported, the first that does not follow from another rank's failure."""
    failures: Mapping[int, GPUError] = known.failures
    roots = {rank: error for rank, error in failures.items() if not is_consequence(error)}
    if not roots:
        if all(isinstance(error, CollectiveTimeoutError) for error in failures.values()):
            return out_of_time(known)
        roots = {rank: error for rank, error in failures.items() if isinstance(error, NCCLError)}
    rank, error = next(iter(roots.items()))
    others = [other for number, other in failures.items() if number != rank and not is_consequence(other)]
    return of_rank(error, rank, known.hosts.get(rank)).with_others(others)


def is_consequence(error: GPUError) -> bool:
    """A timeout without ranks is that of a rank that waits; ncclRemoteError is what NCCL says of another's failure."""
    return (isinstance(error, CollectiveTimeoutError) and not error.ranks) or (
        isinstance(error, NCCLError) and error.status == _REMOTE_ERROR
    )


def of_rank(error: GPUError, rank: int, host: str | None) -> GPUError:
    """The error with its rank named; returns it."""
    place = f"on rank {rank}" + (f", host {host}" if host else "")
    error.evidence = (place, *error.evidence)
    if isinstance(error, DistributedError) and not error.ranks:
        error.ranks = (rank,)
    return error
