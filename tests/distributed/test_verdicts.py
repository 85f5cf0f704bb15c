"""Judgement of what ranks report: one error for all of them, which names who is to blame. Over made reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ortgpu.distributed import verdicts
from ortgpu.distributed.reports import OWN_VERSION, Collective, RankFacts
from ortgpu.distributed.verdicts import BETWEEN_HOSTS, NCCL_BETWEEN_HOSTS, Described, Known
from ortgpu.distributed.wire import GarbledError, error_to_message
from ortgpu.environment.ranks import Rank
from ortgpu.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GPUError,
    NCCLError,
    NoDeviceError,
    RankDeviceError,
    RendezvousError,
)

CALL = Collective("all_reduce", "float32", 1)


def described(rank: int, **changes: Any) -> Described:
    facts = RankFacts(rank, f"host{rank}", uuid=f"GPU-{rank}", nccl="2.27.3")
    return dataclasses.replace(Described(facts, None, None, (CALL,)), **changes)


def with_facts(rank: int, **facts: Any) -> Described:
    whole = described(rank)
    return dataclasses.replace(whole, facts=dataclasses.replace(whole.facts, **facts))


def known(world_size: int = 3, *failures: GPUError | None, **changes: Any) -> Known:
    """All ranks came and are at the second step; of those that failed, the errors are given in their order."""
    found = Known(
        world_size,
        "127.0.0.1:21000",
        {rank: f"host{rank}" for rank in range(world_size)},
        dict.fromkeys(range(world_size), (2, "second")),
        {rank: error for rank, error in enumerate(failures) if error is not None},
    )
    return dataclasses.replace(found, **changes)


# Before NCCL is used


def test_ranks_that_fit_have_no_fault() -> None:
    assert verdicts.mismatch([described(rank) for rank in range(3)]) is None
    assert verdicts.mismatch([described(0)]) is None


def test_the_same_fault_of_several_ranks_is_told_once() -> None:
    errors = [NoDeviceError("no GPU", evidence=["of this rank"]) for _ in range(2)]
    found = verdicts.mismatch([described(0), *(described(n + 1, problem=error) for n, error in enumerate(errors))])
    assert found is errors[0]
    assert found.others == ()
    assert found.evidence == ("on ranks 1, 2, on host1, host2", "of this rank")


def test_another_fault_is_told_beside_it() -> None:
    first, second = NoDeviceError("no GPU"), NCCLError("no library")
    found = verdicts.mismatch([described(0, nccl_problem=second), described(1, problem=first)])
    assert found is first
    assert found.evidence[0] == "on rank 1, host host1"
    assert [type(error) for error in found.others] == [NCCLError]


def test_control_characters_of_a_hosts_name_do_not_reach_a_terminal() -> None:
    found = verdicts.mismatch([with_facts(0, host="a\x1b[2J"), described(1)])
    assert found is None
    bad = dataclasses.replace(with_facts(0, host="a\x1b[2J"), problem=NoDeviceError("no GPU"))
    found = verdicts.mismatch([bad, described(1)])
    assert found is not None
    assert "\x1b" not in found.evidence[0]


def test_two_ranks_on_one_gpu() -> None:
    found = verdicts.mismatch([described(0), with_facts(1, uuid="GPU-0"), described(2)])
    assert isinstance(found, RankDeviceError)
    assert (found.ranks, found.phase) == ((0, 1), "exchange")
    assert found.summary == "ranks 0, 1 do not have a GPU each: ranks 0, 1 have GPU-0"


def test_gpus_whose_uuids_nobody_knows_are_not_taken_for_one() -> None:
    assert verdicts.mismatch([with_facts(0, uuid=None), with_facts(1, uuid=None)]) is None


@pytest.mark.parametrize(
    ("calls", "odd", "shown"),
    [
        (((CALL,), (CALL,), (CALL, CALL)), (2,), "call 2 on rank 2: all_reduce of 1 float32"),
        (((CALL,), (Collective("all_gather", "float32", 1),), (CALL,)), (1,), "call 1 on ranks 0, 2: all_reduce"),
        (((CALL, CALL), (CALL,), (CALL, CALL)), (1,), "call 2 on rank 1: nothing more"),
    ],
)
def test_ranks_that_plan_other_calls(calls: Any, odd: tuple[int, ...], shown: str) -> None:
    found = verdicts.mismatch([described(rank, calls=plan) for rank, plan in enumerate(calls)])
    assert isinstance(found, CollectiveMismatchError)
    assert found.ranks == odd
    assert any(fact.startswith(shown) for fact in found.evidence), found.evidence


def test_several_releases_of_nccl() -> None:
    found = verdicts.mismatch([described(0), with_facts(1, nccl="2.28.1"), with_facts(2, nccl=None)])
    assert isinstance(found, NCCLError)
    assert (found.ranks, found.status) == ((0, 1), 5)
    assert found.evidence == ("NCCL 2.27.3 on rank 0", "NCCL 2.28.1 on rank 1")


@pytest.mark.parametrize(
    ("rank", "uuid", "gaps"),
    [
        (Rank(0, 1, 0, 1), "GPU-0", ["one rank"]),
        (Rank(0, 2, 0, 2), "GPU-0", ["one host"]),
        (Rank(0, 2, 0, 1), "GPU-0", []),
        (Rank(0, 2, 0, 1), None, ["the driver tells no UUIDs"]),
    ],
)
def test_what_a_preflight_did_not_cover(rank: Rank, uuid: str | None, gaps: list[str]) -> None:
    found = verdicts.notes(rank, [with_facts(0, uuid=uuid)])
    assert [note.partition(":")[0] for note in found] == gaps


# What a rank says of itself


def message(**changes: Any) -> dict[str, Any]:
    facts = dataclasses.asdict(described(1).facts)
    return {"facts": facts, "problem": None, "nccl_problem": None, "calls": [["all_reduce", "float32", 1]], **changes}


def test_a_rank_comes_whole_out_of_its_message() -> None:
    assert Described.parse(message(), 1) == described(1)
    failed = Described.parse(message(problem=error_to_message(NoDeviceError("no GPU"))), 1)
    assert isinstance(failed.problem, NoDeviceError)
    assert failed.nccl_problem is None


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {}},
        {"facts": {"rank": "1", "host": "a"}},
        {"facts": {"rank": 1, "host": 5}},
        {"facts": {"rank": 1, "host": "a", "colour": "red"}},
        {"facts": None},
        {"calls": [["all_reduce", "float32", 0]]},
        {"calls": [["all_reduce"]]},
        {"calls": 5},
    ],
)
def test_what_describes_no_rank(changes: dict[str, Any]) -> None:
    with pytest.raises(GarbledError):
        Described.parse(message(**changes), 1)


@pytest.mark.parametrize("key", ["facts", "problem", "nccl_problem", "calls"])
def test_each_part_is_needed(key: str) -> None:
    part = message()
    del part[key]
    with pytest.raises(GarbledError):
        Described.parse(part, 1)


# From what rank 0 knows


def test_who_never_came() -> None:
    found = verdicts.never_came(known(4, hosts={0: "host0", 2: "host2"}), ["a stranger"])
    assert (found.ranks, found.phase) == ((1, 3), "rendezvous")
    assert found.summary == "ranks 1, 3 of 4 never came to the rendezvous"
    assert found.evidence == (
        "rank 0 waited for them on host0, 127.0.0.1:21000", "rank 2 came, from host2", "refused: a stranger",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "release", "world_size", "summary"),
    [
        (1, OWN_VERSION, 3, None),
        (1, "0.0.1", 3, f"rank 1 runs ortgpu 0.0.1, and rank 0 runs ortgpu {OWN_VERSION}"),
        (1, OWN_VERSION, 2, "rank 1 was told of 2 ranks in all, and rank 0 of 3"),
        (0, OWN_VERSION, 3, "two processes say that they are rank 0"),
        (3, OWN_VERSION, 3, "rank 3 is none of this job"),
        (-1, OWN_VERSION, 3, "rank -1 is none of this job"),
    ],
)
def test_who_cannot_take_part(rank: int, release: str, world_size: int, summary: str | None) -> None:
    found = verdicts.unfit(known(hosts={0: "host0"}), rank, "there", release, world_size)
    assert (found and found.summary) == summary
    if found is not None:
        assert (found.ranks, found.phase) == ((rank,), "rendezvous")
        assert f"rank {rank} came, from there" in found.evidence


def test_who_is_missing_and_awaited() -> None:
    some = known(hosts={0: "a", 2: "b"})
    assert (some.all_came, some.missing) == (False, (1,))
    assert [some.awaits(rank) for rank in (-1, 0, 1, 2, 3)] == [False, False, True, False, False]
    assert known().all_came


@pytest.mark.parametrize(("has_exchanged", "kind"), [(False, RendezvousError), (True, CollectiveTimeoutError)])
def test_a_rank_that_is_gone(has_exchanged: bool, kind: type[GPUError]) -> None:
    found = verdicts.gone(known(has_exchanged=has_exchanged), 1)
    assert type(found) is kind
    assert (found.ranks, found.phase) == ((1,), "second")
    assert BETWEEN_HOSTS in found.fixes


def test_on_one_host_no_network_is_blamed() -> None:
    here = known(hosts=dict.fromkeys(range(3), "here"), has_exchanged=True)
    assert BETWEEN_HOSTS not in verdicts.gone(here, 1).fixes
    assert NCCL_BETWEEN_HOSTS not in verdicts.timeout_error(here).fixes
    assert NCCL_BETWEEN_HOSTS in verdicts.timeout_error(known(has_exchanged=True)).fixes


def timed_out() -> CollectiveTimeoutError:
    return CollectiveTimeoutError("no answer")


@pytest.mark.parametrize(
    ("changes", "ranks", "summary"),
    [
        ({"positions": {0: (3, "third"), 2: (3, "third")}}, (1,), "rank 1 had not come to this"),
        ({"failures": {0: timed_out(), 2: timed_out()}}, (1,), "rank 1 did not come back from this"),
        ({}, (0, 1, 2), "no rank came back from this"),
        ({"failures": {rank: timed_out() for rank in range(3)}}, (0, 1, 2), "no rank came back from this"),
    ],
)
def test_who_is_late_at_the_deadline(changes: Any, ranks: tuple[int, ...], summary: str) -> None:
    found = verdicts.timeout_error(known(**changes))
    assert found.ranks == ranks
    assert found.summary.startswith(summary)
    assert found.summary.endswith(f"by the deadline: {found.phase}")


# Which of several failures is the cause


def test_a_failure_of_its_own_comes_before_what_follows_from_it() -> None:
    remote, own = NCCLError("of another rank", status=6), NoDeviceError("no GPU")
    found = verdicts.cause(known(3, remote, timed_out(), own))
    assert found is own
    assert found.evidence[0] == "on rank 2, host host2"
    assert found.others == ()


def test_several_causes_are_all_told_the_first_one_first() -> None:
    first, second = NCCLError("no memory", status=2), NoDeviceError("no GPU")
    found = verdicts.cause(known(2, first, second))
    assert found is first
    assert [type(error) for error in found.others] == [NoDeviceError]
    assert isinstance(found, NCCLError)
    assert found.ranks == (0,)


def test_where_all_only_waited_the_time_is_up() -> None:
    found = verdicts.cause(known(2, timed_out(), timed_out()))
    assert isinstance(found, RendezvousError)
    assert found.ranks == (0, 1)


def test_remote_errors_alone_are_all_that_is_known() -> None:
    remote = NCCLError("of another rank", status=6)
    assert verdicts.cause(known(2, timed_out(), remote)) is remote


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (CollectiveTimeoutError("late"), True),
        (CollectiveTimeoutError("late", ranks=(1,)), False),
        (NCCLError("remote", status=6), True),
        (NCCLError("other", status=2), False),
        (NoDeviceError("no GPU"), False),
    ],
)
def test_what_follows_from_another_ranks_failure(error: GPUError, follows: bool) -> None:
    assert verdicts.is_consequence(error) is follows


def test_a_rank_is_added_only_where_none_is_named() -> None:
    assert verdicts.add_rank(CollectiveTimeoutError("late", ranks=(2,)), 1, None).evidence == ("on rank 1",)
    named = CollectiveTimeoutError("late", ranks=(2,))
    assert verdicts.add_rank(named, 1, "a") is named
    assert named.ranks == (2,)
