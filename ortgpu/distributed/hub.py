"""Rank 0's side of a preflight: it admits the ranks of the job, collects what each reports, and gives the verdict.

It is driven from outside: its methods are called when a socket is ready or a deadline has come. None of them waits, but
for a moment where this process may open no more files.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import time
from typing import Any

from ..errors import GPUError
from . import verdicts, wire
from .verdicts import Known

logger = logging.getLogger("ortgpu")

# What each rank posts, in this order. After the last, a rank may close its connection.
FACTS, ID, LAST = "facts", "id", "results"

_SILENT = 5.0  # seconds for a connection to prove who it is
_GUESTS = 64  # unproven connections at a time, beside one for each rank
_NOTED = 8  # refused connections that an error lists
_REST = 0.05  # seconds without serving anybody, after this process ran out of descriptors


class Hub:
    """The connections of rank 0.

    A rank of this job must know ``key``. All ranks must have come at ``arrival``, and everything ends at ``verdict``,
    by time.monotonic. ``settling`` is the time in seconds for the other ranks to report their own faults.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        known: Known,
        selector: selectors.BaseSelector,
        arrival: float,
        verdict: float,
        settling: float,
    ) -> None:
        self._listener: socket.socket | None = listener
        self._key = key
        self._selector = selector
        self._arrival, self._verdict, self._settling = arrival, verdict, settling
        self._settled_at: float | None = None
        self._guests: dict[wire.Connection, tuple[float, str]] = {}  # deadline and challenge
        self._members: dict[int, wire.Connection] = {}
        self._gathered: dict[str, dict[int, Any]] = {}
        self._refused: dict[str, None] = {}  # reasons, each once
        self._is_over = False
        self.known = known
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def next_deadline(self) -> float:
        if self._is_over:
            return float("inf")
        times = [self._verdict, *(until for until, _ in self._guests.values())]
        if not self.known.all_came:
            times.append(self._arrival)
        elif self._settled_at is not None:
            times.append(self._settled_at)
        return min(times)

    def check_deadline(self) -> None:
        now = time.monotonic()
        for guest in [connection for connection, (until, _) in self._guests.items() if now >= until]:
            self._refuse(guest, "it did not say who it is")
        if self._is_over:
            return
        everyone_failed = len(self.known.failures) == self.known.world_size
        if not self.known.all_came:  # no verdict before, since a late rank must learn of it too
            if now >= self._arrival:
                self._decide(verdicts.never_came(self.known, self._refused))
        elif self._settled_at is not None and (now >= self._settled_at or everyone_failed):
            self._decide(verdicts.cause(self.known))
        elif now >= self._verdict:
            self._decide(verdicts.timeout_error(self.known))

    @property
    def is_done(self) -> bool:
        return not any(member.is_open for member in self._members.values())

    def close(self) -> None:
        self._stop_listening()
        for connection in [*self._guests, *self._members.values()]:
            self._drop(connection)

    def _accept(self, _events: int) -> None:
        if self._listener is None:  # an event of the same look has let in the last rank
            return
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # closed by the other side
            return
        except OSError as error:  # too many open files, for instance
            self._remember(f"a connection: {error.strerror}")
            time.sleep(_REST)  # the listener stays ready, and would keep this process busy
            return
        if len(self._guests) >= _GUESTS + self.known.world_size:  # A rank would have answered, so the oldest is none.
            self._refuse(next(iter(self._guests)), "it did not say who it is")
        connection, number = wire.Connection(connected, wire.FROM_A_STRANGER), wire.challenge()
        self._guests[connection] = (time.monotonic() + _SILENT, number)
        connection.watch(self._selector, lambda: self._read_guest(connection))
        connection.send({"challenge": number})

    def _read_guest(self, connection: wire.Connection) -> None:
        try:
            messages = connection.receive()
            if messages:
                return self._let_in(connection, messages[0])
        except (wire.GarbledError, LookupError, TypeError, ValueError, OverflowError) as error:
            return self._refuse(connection, f"it is no rank: {error}")
        if not connection.is_open:
            self._drop(connection)
        return None

    def _let_in(self, connection: wire.Connection, hello: wire.Message) -> None:
        rank, host = hello.get("rank"), hello.get("host")
        number = self._guests[connection][1]
        if not wire.is_proof(hello.pop("proof", None), self._key, "rank", number, hello):
            return self._refuse(connection, f"it belongs to another job, or has another secret: rank {rank} on {host}")
        if type(rank) is not int:
            return self._refuse(connection, f"it has no rank: {rank!r} on {host}")
        own_proof = wire.proof(self._key, "rank 0", hello.get("challenge"))
        unfit = verdicts.unfit(self.known, rank, str(host), hello.get("ortgpu"), hello.get("world_size"))
        if unfit is not None and not self.known.awaits(rank):
            if rank in self._members:
                self._note(rank, unfit)
            connection.send({"verdict": wire.error_to_message(unfit), "proof": own_proof})
            return self._refuse(connection, unfit.summary)
        arrival, verdict = map(float, hello["seconds"])
        if not (math.isfinite(arrival) and math.isfinite(verdict)):
            raise wire.GarbledError("its deadline is no time")
        now = time.monotonic()
        del self._guests[connection]
        self._members[rank] = connection
        self.known.hosts[rank] = wire.shorten(host)
        self._arrival = min(self._arrival, now + arrival)
        self._verdict = min(self._verdict, now + verdict)
        connection.watch(self._selector, lambda: self._read_member(rank))
        connection.trust(wire.FROM_A_RANK)
        connection.send({"in": True, "proof": own_proof})
        if unfit is not None:  # still admitted: all ranks get the verdict when all have come
            self._note(rank, unfit)
        if self.known.all_came:
            self._stop_listening()
            self._tell({"welcome": max(0.0, self._verdict - now)})
        return None

    def _refuse(self, connection: wire.Connection, reason: str) -> None:
        reason = wire.shorten(reason)
        self._remember(reason)
        connection.send({"refused": reason})
        self._drop(connection)

    def _remember(self, reason: str) -> None:
        logger.debug("preflight: a connection was refused: %s", reason)
        if len(self._refused) < _NOTED:
            self._refused[reason] = None

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._guests):
            self._drop(connection)

    def _drop(self, connection: wire.Connection) -> None:
        self._guests.pop(connection, None)
        connection.close()

    def _read_member(self, rank: int) -> None:
        member = self._members[rank]
        try:
            for message in member.receive():
                self._handle(rank, message)
        except (wire.GarbledError, LookupError, TypeError, ValueError) as error:
            logger.debug("preflight: rank %d: %s", rank, error)
            member.close()
        if not (member.is_open or self._is_over):
            self._note(rank, verdicts.gone(self.known, rank))

    def _handle(self, rank: int, message: wire.Message) -> None:
        if self._is_over or rank in self.known.failures:
            return
        if "at" in message:
            number, step = message["at"]
            if type(number) is not int or not isinstance(step, str):
                raise wire.GarbledError("its position has the wrong type")
            self.known.positions[rank] = number, step
        elif "failed" in message:
            self._note(rank, wire.error_from_message(message["failed"], f"rank {rank}"))
        elif "post" in message:
            if message["post"] not in (FACTS, ID, LAST):
                raise wire.GarbledError("an unknown post")
            gathered = self._gathered.setdefault(message["post"], {})
            gathered[rank] = message["value"]
            if len(gathered) == self.known.world_size:
                self.known.has_exchanged = True
                values = [gathered[number] for number in range(self.known.world_size)]
                self._is_over = message["post"] == LAST
                self._tell({"all": values})

    def _note(self, rank: int, error: GPUError) -> None:
        self.known.failures.setdefault(rank, error)
        if self._settled_at is None:
            self._settled_at = time.monotonic() + self._settling

    def _decide(self, error: GPUError) -> None:
        self._is_over = True
        self._stop_listening()
        self._tell({"verdict": wire.error_to_message(error)})

    def _tell(self, message: wire.Message) -> None:
        encoded = wire.encode(message)  # once: the facts of a thousand ranks take 10 ms
        for member in self._members.values():
            if member.is_open:
                member.send(encoded)
