"""The plain data of a preflight: the facts of each rank, the operations between ranks, and the report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..environment.ranks import Rank

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
Value = TypeVar("Value")

OWN_VERSION = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])  # an import would make a circle
_READABLE = 16  # ranks in a sentence
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation, with NCCL's meaning of ``count``.

    ``operation`` is "all_reduce", "all_gather" or "reduce_scatter"; ``dtype`` is "float32", "float16", "bfloat16" or
    "int32". ``count`` is the number of elements that a rank sends in an all_reduce or an all_gather, or receives from a
    reduce_scatter. Reductions are sums. Other values raise ValueError.
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
        """Return the numbers of elements in a rank's send buffer and in its receive buffer."""
        many = self.count * world_size
        sent = many if self.operation == "reduce_scatter" else self.count
        return sent, many if self.operation == "all_gather" else self.count


def default_calls(world_size: int) -> tuple[Collective, ...]:
    """Return calls with small, odd and large counts. The large ones have 32 MiB for any number of ranks."""
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
    """The facts of one rank, as it reported them. None means unknown.

    ``onnxruntime`` is the installed build, as "onnxruntime-gpu 1.31.1 (CUDA 13)"; the brackets name the plugin, if CUDA
    came as a plugin. ``nccl`` and ``nccl_path`` are the library that its child loaded. ``cuda`` is the
    newest CUDA that the driver supports.
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


# Facts that should be the same on all ranks, and their names in a report
_COMPARED = {
    "gpu": "GPU",
    "driver": "driver",
    "cuda": "CUDA of the driver",
    "nccl": "NCCL",
    "onnxruntime": "ONNX Runtime",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that differs between ranks. ``values`` has each value with its ranks."""

    fact: str
    values: tuple[tuple[str | None, tuple[int, ...]], ...]

    def __str__(self) -> str:
        return f"{self.fact}: " + "; ".join(f"{value or 'unknown'} on {named(ranks)}" for value, ranks in self.values)


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """An operation with right values on every rank. ``seconds`` is one call on the slowest rank."""

    call: Collective
    seconds: float
    bus_bandwidth: float | None  # bytes a second, as nccl-tests counts; None with one rank

    @classmethod
    def of(cls, call: Collective, seconds: float, world_size: int) -> CollectiveResult:
        whole = max(call.sizes(world_size)) * BYTES_OF[call.dtype]
        # The bytes that pass each GPU's links: doc/PERFORMANCE.md of NVIDIA/nccl-tests
        moved = whole * (world_size - 1) / world_size * (2 if call.operation == "all_reduce" else 1)
        return cls(call, seconds, moved / seconds if moved and seconds else None)


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """The result of a preflight that passed. It is the same on every rank, except ``rank``.

    ``ranks`` are the facts of each rank, and ``differences`` those that are not the same on all. ``collectives`` are in
    the order of their runs. ``notes`` name the gaps in sentences. ``seconds`` is the whole duration.
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
    groups = {
        name: grouped((getattr(facts, field), facts.rank) for facts in ranks) for field, name in _COMPARED.items()
    }
    return tuple(
        Difference(name, tuple((value, tuple(numbers)) for value, numbers in values.items()))
        for name, values in groups.items()
        if len(values) > 1
    )


def grouped(pairs: Iterable[tuple[Value, int]]) -> dict[Value, list[int]]:
    """Return the ranks of each value, from pairs of value and rank."""
    ranks: dict[Value, list[int]] = {}
    for value, rank in pairs:
        ranks.setdefault(value, []).append(rank)
    return ranks


def named(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 1". Of many ranks, name the first and count the others."""
    numbers = sorted(ranks)
    shown = numbers if len(numbers) <= _READABLE else numbers[: _READABLE // 2]
    more = f" and {len(numbers) - len(shown)} more" if len(shown) < len(numbers) else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, shown))}{more}"
