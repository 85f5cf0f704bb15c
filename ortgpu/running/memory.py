"""Measures the GPU memory of one session, and gives its unused parts back in order.

The part of a session that holds memory beside the arena is a :class:`Holder`: its plans for further shapes or, with
``cuda_graph``, its graphs. A session never has both. The :class:`Holdings` of the session know it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Protocol

from ..environment.gpu.driver import processes_on
from ..errors import ExecutionError
from ..model.weights import bytes_of_weights
from ..provider.lifetime import device_of, refuse_if_unusable
from . import arena

if TYPE_CHECKING:
    from ..process.threads import Turns
    from ..provider.interfaces import VerifiedSession


Part = Literal["plans", "graphs"]
_MIB = 1 << 20


class Holder(Protocol):
    """A part of a session that holds GPU memory outside of the session's arena.

    It must not refer to the session, because it would keep the session's GPU memory. Any thread may call it at any
    time.
    """

    def bytes_held(self) -> int | None:
        """Return the bytes of GPU memory that it holds; None if they are unknown."""

    def give_back(self) -> None:
        """Free the memory that no run uses at this moment. Runs at work keep theirs."""


class Holdings:
    """The holder of one session, if there is one, and the session's budget.

    Attributes:
        budget: the bytes of the GPU that the session may take; None: unlimited.
        turns: the turns that runs take; None: any number of runs at a time.
        room: the bytes of the budget for plans of further shapes, or for captured graphs; None: no limit.
        retrying: held by a run that was out of memory, while memory is given back and it runs again.
    """

    def __init__(self, budget: int | None = None, turns: Turns | None = None, room: int | None = None) -> None:
        self.budget, self.turns, self.room = budget, turns, room
        self.retrying = threading.RLock()
        self._holder: tuple[Part, Holder] | None = None
        self._weights: list[int | None] = []  # empty until they are read

    def add(self, part: Part, holder: Holder) -> None:
        """Count a holder from now on, and ask it when memory is to be given back."""
        self._holder = part, holder

    def weights_of(self, session: VerifiedSession) -> int | None:
        """Return the bytes of the model's initialisers; None if the model cannot be read any more."""
        if not self._weights:
            self._weights.append(bytes_of_weights(session._request.model, session._model_stamp))
        return self._weights[0]

    def bytes_of(self, part: Part) -> int | None:
        """Return the bytes that a part of the session holds; None if they are unknown."""
        if self._holder is None or self._holder[0] != part:
            return 0
        return self._holder[1].bytes_held()

    def give_back(self) -> None:
        """Have the holder free its unused memory."""
        if self._holder is not None:
            self._holder[1].give_back()


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """The memory of a session in bytes, at the time of the measurement. None: unknown, or no such limit.

    ``str()`` has a line for each part.

    Attributes:
        budget: the most that the session may take of the GPU (``memory=``).
        weights: the initialisers as the model's file has them. They lie in the arena.
        arena: GPU memory that ONNX Runtime's arena holds for the session.
        arena_in_use: the part of it that is in use. ONNX Runtime up to 1.31 does not tell.
        plans: GPU memory of plans for further shapes.
        graphs: GPU memory of captured CUDA graphs and of their buffers.
        pinned: page-locked host memory.
        process: GPU memory of this whole process, its CUDA context and kernels included, as NVML has it. It is unknown
            in most containers.
    """

    budget: int | None
    weights: int | None
    arena: int | None
    arena_in_use: int | None
    plans: int | None
    graphs: int | None
    pinned: int
    process: int | None

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "\n".join(
            f"{_LABELS[name]:<26}{_mebibytes(size)}" for name, size in rows if name != "budget" or size is not None
        )


_LABELS = {
    "budget": "budget",
    "weights": "weights",
    "arena": "arena, with the weights",
    "arena_in_use": "arena, in use",
    "plans": "plans for further shapes",
    "graphs": "captured CUDA graphs",
    "pinned": "pinned host memory",
    "process": "this process on the GPU",
}


def _mebibytes(size: int | None) -> str:
    return f"{'unknown':>10}" if size is None else f"{size / _MIB:>10,.1f} MiB"


def holdings_of(session: VerifiedSession) -> Holdings:
    """Return the holdings of a session, made at the first use."""
    holdings: Holdings | None = session._holdings
    if holdings is None:  # setdefault is one step of C, so threads agree on one
        holdings = vars(session).setdefault("_holdings", Holdings())
    return holdings


def read_memory(session: VerifiedSession) -> SessionMemory:
    """Measure the memory of a session.

    Raises:
        ExecutionError: the session is closed, or lost the GPU.
    """
    refuse_if_unusable(session)
    return measure(session)


def measure(session: VerifiedSession) -> SessionMemory:
    """Measure the memory of a session as it is. A session that is to be opened again is not opened here."""
    holdings, device = holdings_of(session), device_of(session)
    used = processes_on(device.uuid) if device.uuid is not None else {}
    reserved = None
    with contextlib.suppress(ExecutionError):  # The session could not be opened again, and has no arena now.
        reserved = arena.reserved_bytes(session)
    return SessionMemory(
        budget=holdings.budget,
        weights=holdings.weights_of(session),
        arena=reserved,
        arena_in_use=None,
        plans=holdings.bytes_of("plans"),
        graphs=holdings.bytes_of("graphs"),
        pinned=session._pinned.bytes_held if session._pinned is not None else 0,
        process=used.get(os.getpid()),
    )


def give_back(session: VerifiedSession) -> None:
    """Give back the GPU memory that no run of a session uses: plans or graphs, then the arena's free regions.

    Shrinking the arena is a run, too: beside another one it would take a stream with handles.
    """
    holdings = holdings_of(session)
    holdings.give_back()
    if holdings.turns is not None:
        holdings.turns.run(arena.shrink, session)
    else:
        arena.shrink(session)


def trim(session: VerifiedSession) -> None:
    """Give back the GPU memory and the host memory that no run of a session uses.

    Raises:
        ExecutionError: the session is closed, or lost the GPU.
    """
    refuse_if_unusable(session)
    give_back(session)
    pinned = session._pinned
    if pinned is not None:
        pinned.give_back()
