"""What a preflight reports: operations and their sizes, what differs between ranks, and how ranks are named."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.distributed.reports import (
    BYTES_OF,
    OPERATIONS,
    Collective,
    CollectiveResult,
    Difference,
    PreflightReport,
    RankFacts,
    default_calls,
    differences,
    grouped,
    named,
)
from ortgpu.environment.ranks import Rank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("broadcast", "float32", 1), "is not known"),
        (("all_reduce", "float64", 1), "is not known"),
        (("all_reduce", "float32", 0), "a positive int"),
        (("all_reduce", "float32", -1), "a positive int"),
        (("all_reduce", "float32", 1.0), "a positive int"),
        (("all_reduce", "float32", True), "a positive int"),
    ],
)
def test_no_collective(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collective(*arguments)


def test_the_bytes_of_each_type_are_those_of_its_name() -> None:
    assert {name: bytes_ * 8 for name, bytes_ in BYTES_OF.items()} == {
        "float32": 32,
        "float16": 16,
        "bfloat16": 16,
        "int32": 32,
    }


@pytest.mark.parametrize(
    ("operation", "sent", "received"), [("all_reduce", 5, 5), ("all_gather", 5, 20), ("reduce_scatter", 20, 5)]
)
def test_sizes_of_the_buffers(operation: Any, sent: int, received: int) -> None:
    call = Collective(operation, "float32", 5)
    assert call.sizes(4) == (sent, received)
    assert call.sizes(1) == (5, 5)
    assert str(call) == f"{operation} of 5 float32"


@pytest.mark.parametrize(("operation", "times"), [("all_reduce", 2 * 3 / 4), ("all_gather", 3), ("reduce_scatter", 3)])
def test_the_bandwidth_is_that_of_nccl_tests(operation: Any, times: float) -> None:
    """Of the whole buffer S: 2(n-1)/n of S for an all_reduce, (n-1)/n of S for the others, in doc/PERFORMANCE.md."""
    found = CollectiveResult.of(Collective(operation, "float16", 1000), 0.5, 4)
    assert found.bus_bandwidth == pytest.approx(2 * 1000 * times / 0.5)


def test_one_rank_and_no_time_have_no_bandwidth() -> None:
    call = Collective("all_reduce", "float32", 1)
    assert CollectiveResult.of(call, 0.5, 1).bus_bandwidth is None
    assert CollectiveResult.of(call, 0.0, 4).bus_bandwidth is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1024, 1 << 24])
def test_the_usual_calls_use_every_operation_and_type_with_large_ones_of_one_size(world_size: int) -> None:
    calls = default_calls(world_size)
    assert {each.operation for each in calls} == set(OPERATIONS)
    assert {each.dtype for each in calls} == set(BYTES_OF)
    assert {each.count for each in calls} >= {1, 1_023, 65_537}
    largest = [max(max(each.sizes(world_size)) for each in calls if each.operation == kind) for kind in OPERATIONS]
    assert max(largest) <= max(8 << 20, 1_023 * world_size)


def test_only_what_differs_is_a_difference() -> None:
    ranks = [
        RankFacts(0, "a", gpu="H200", driver="580", uuid="x", nccl_path="/a"),
        RankFacts(1, "b", gpu="H200", driver="570", uuid="y", nccl_path="/b"),
        RankFacts(2, "b", gpu="H200", uuid="z"),
    ]
    (found,) = differences(ranks)
    assert found == Difference("driver", (("580", (0,)), ("570", (1,)), (None, (2,))))
    assert str(found) == "driver: 580 on rank 0; 570 on rank 1; unknown on rank 2"
    assert differences(ranks[:1]) == ()


def test_ranks_by_their_values() -> None:
    assert grouped([("a", 2), ("b", 0), ("a", 1)]) == {"a": [2, 1], "b": [0]}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        (range(16), f"ranks {', '.join(map(str, range(16)))}"),
        (range(20), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_names_of_ranks(ranks: Any, text: str) -> None:
    assert named(ranks) == text


def test_a_report_is_plain_data() -> None:
    facts = RankFacts(0, "a")
    call = CollectiveResult(Collective("all_reduce", "float32", 1), 0.1, None)
    document = PreflightReport(Rank(0, 1, 0, 1), (facts,), (), (call,), ("note",), 1.5).as_dict()
    assert document["ranks"] == ({
        "rank": 0, "host": "a", "gpu": None, "uuid": None, "driver": None, "cuda": None, "nccl": None,
        "nccl_path": None, "onnxruntime": None,
    },)  # fmt: skip
    assert document["collectives"][0]["call"] == {"operation": "all_reduce", "dtype": "float32", "count": 1}
    assert (document["notes"], document["seconds"]) == (("note",), 1.5)
