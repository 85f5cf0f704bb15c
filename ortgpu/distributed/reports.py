"""What a preflight exchanges, and what it returns: plain facts of each rank, and the operations between them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..environment.ranks import Rank

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]

OWN_VERSION = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])  # importing it would make a circle
_READABLE = 16  # ranks in a sentence
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation, as NCCL counts it.

    ``operation``: "all_reduce", "all_gather" or "reduce_scatter"; ``dtype``: "float32", "float16", "bfloat16" or
    "int32". ``count`` is the number of elements that a rank hands in for an all_reduce or an all_gather, and that it
    receives from a reduce_scatter. Reductions are sums. Others raise ValueError.
    """

    operation: Operation
    dtype: str
    count: int

    def __post_init__(self) -> None:
        if self.dtype not in BYTES_OF or str(self.operation) not in OPERATIONS:
            raise ValueError(f"{self.operation} of {self.dtype} is not known: {OPERATIONS} of {tuple(BYTES_OF)}")
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"count={self.count!r} is not a number of elements: a positive int")

    def __str__(self) -> str:
        return f"{self.operation} of {self.count} {self.dtype}"

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Elements of the buffer that a rank sends, and of the one that it receives into."""
        many = self.count * world_size
        sent = many if self.operation == "reduce_scatter" else self.count
        return sent, many if self.operation == "all_gather" else self.count

    def bus_bytes(self, world_size: int) -> float:
        """Bytes that pass each GPU's links: doc/PERFORMANCE.md of NVIDIA/nccl-tests."""
        whole = max(self.sizes(world_size)) * BYTES_OF[self.dtype]
        return whole * (world_size - 1) / world_size * (2 if self.operation == "all_reduce" else 1)


def default_calls(world_size: int) -> tuple[Collective, ...]:
    """Small, odd and large; each type once. The large ones are 32 MiB whatever the number of ranks."""
    large = max(1, (8 << 20) // world_size)
    return (
        Collective("all_reduce", "float32", 1),
        Collective("all_reduce", "float32", 65_537),
        Collective("all_reduce", "float16", 65_537),
        Collective("all_reduce", "bfloat16", 65_537),
        Collective("all_reduce", "int32", 65_537),
        Collective("all_reduce", "float32", 8 << 20),
        Collective("all_gather", "float32", 1_023),
        Collective("all_gather", "float32", large),
        Collective("reduce_scatter", "float32", 1_023),
        Collective("reduce_scatter", "float32", large),
    )


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank as it described itself. None is unknown.

    ``onnxruntime`` is the installed build, as "onnxruntime-gpu 1.31.1 (CUDA 13)"; ``nccl`` and ``nccl_path`` the
    library that its child loaded; ``cuda`` the newest CUDA that the driver supports.
    """

    rank: int
    host: str
    gpu: str | None = None
    uuid: str | None = None
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nccl_path: str | None = None
    onnxruntime: str | None = None


# What should be the same on all ranks, in the words of a table
COMPARED = {
    "gpu": "GPU",
    "driver": "driver",
    "cuda": "CUDA of the driver",
    "nccl": "NCCL",
    "onnxruntime": "ONNX Runtime",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not the same on all ranks. ``values``: each value with the ranks that have it."""

    fact: str
    values: tuple[tuple[str | None, tuple[int, ...]], ...]

    def __str__(self) -> str:
        return f"{self.fact}: " + "; ".join(f"{value or 'unknown'} on {named(ranks)}" for value, ranks in self.values)


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """An operation whose values were right on every rank. ``seconds``: of one call, on the slowest rank."""

    call: Collective
    seconds: float
    bus_bandwidth: float | None  # bytes a second, as nccl-tests counts; None with one rank


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What a preflight that passed has found; the same on every rank but for ``rank``, the one that was asked.

    ``ranks``: each as it described itself; ``differences``: what is not the same on all of them; ``collectives``: in
    the order in which they ran; ``notes``: what was not covered, in sentences; ``seconds``: of all of it.
    """

    rank: Rank
    ranks: tuple[RankFacts, ...]
    differences: tuple[Difference, ...]
    collectives: tuple[CollectiveResult, ...]
    notes: tuple[str, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


def differences(ranks: Sequence[RankFacts]) -> tuple[Difference, ...]:
    """Every fact of :data:`COMPARED` that ranks do not have in common."""
    found = []
    for field, name in COMPARED.items():
        by_value: dict[str | None, list[int]] = {}
        for facts in ranks:
            by_value.setdefault(getattr(facts, field), []).append(facts.rank)
        if len(by_value) > 1:
            found.append(Difference(name, tuple((value, tuple(numbers)) for value, numbers in by_value.items())))
    return tuple(found)


def named(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 1"; the first ones and how many more there are, where they are too many to read."""
    numbers = sorted(ranks)
    shown = numbers if len(numbers) <= _READABLE else numbers[: _READABLE // 2]
    more = f" and {len(numbers) - len(shown)} more" if len(shown) < len(numbers) else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, shown))}{more}"
