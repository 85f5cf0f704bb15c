"""Prove that the ranks of a job can work together: meet, compare, then run collective operations on the GPUs.

The driver, CUDA and NCCL may hang or crash, so each rank calls them in a child process. The rank itself is a loop over
the sockets to its child, to rank 0, and on rank 0 to all ranks. It can always report what happened, and it can always
kill the child.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..environment.child import kill_group, python_command, signal_name
from ..environment.packages.plugins import environ_of_child
from ..environment.ranks import Rank, current_rank
from ..errors import (
    CollectiveTimeoutError,
    DistributedError,
    GPUError,
    RendezvousError,
    UnsupportedPlatformError,
    escape_controls,
    manual,
)
from . import verdicts, wire
from .hub import FACTS, ID, LAST, Hub
from .meeting import SECRET, Address, Meeting, meeting_of, resolve
from .reports import OWN_VERSION, Collective, CollectiveResult, PreflightReport, default_calls, differences, named
from .verdicts import RENDEZVOUS, Described

_LONGEST = 1_000_000.0  # seconds: poll(2) takes milliseconds in 31 bits
MOST_CALLS = 10_000  # they fit into one message between ranks
_RETRY = 0.05  # seconds between two attempts to reach rank 0
_ASK_AGAIN = 1.0  # seconds between two questions to the resolver for one name
_CONNECTION = 2.0  # seconds for an address to take a connection
_ANSWER = 5.0  # Seconds for the listener to prove that it is rank 0. Rank 0 may be busy.
_GIVING_BACK = 5.0  # seconds for a child to give its communicator back
_RUN = 100  # steps from this number on are the same on all ranks
_WAITING = 8  # unread messages of rank 0 at most; it sends fewer in all

_LINES_KEPT, _BYTES_KEPT = 200, 1 << 18
_CHUNK = 1 << 16  # bytes of one read, as many as a pipe holds
_DEATH = 2.0  # seconds for a process to end after it has closed its channel
_BOOT = "from ortgpu.distributed.worker import main; main(int(sys.argv[1]))"


def preflight(
    timeout: float = 60.0,
    *,
    rank: Rank | None = None,
    address: str | None = None,
    calls: Sequence[Collective] | None = None,
) -> PreflightReport:
    """Meet the other ranks, compare their facts, and run NCCL's operations between all GPUs with values checked.

    Every rank calls it, at about the same time. In a world of one, without a launcher, it checks what one rank can.

    Args:
        timeout: seconds for everything. Half of them are for the ranks to arrive. When they have passed, this function
            has returned or raised on every rank that called it.
        rank: the rank of this process; None asks the launcher's variables.
        address: HOST:PORT for rank 0 to listen at, the same on every rank. Needed if the launcher names no host:
            mpirun over several machines.
        calls: the operations to run, in order, for instance a program's. Every rank has to name the same. None
            means a selection of sizes and types.

    Returns:
        The report, the same on all ranks.

    Raises:
        LauncherConflictError: the launchers' variables do not give this rank.
        RendezvousError: ranks did not meet, or did not describe themselves, in time. ``ranks`` names them. Or the
            secret cannot be read, or is empty.
        RankDeviceError: a rank has no GPU, or the same one as another.
        CollectiveMismatchError: the ranks' ``calls`` differ.
        CollectiveTimeoutError: an operation did not end. ``ranks`` names who held it up, and ``phase`` where.
        NCCLError: NCCL failed, gave wrong values, or cannot be used. ``status`` is its ncclResult_t.
        GPUError: the reason why a rank has no usable GPU, as :func:`ortgpu.diagnose` gives it. ``evidence`` names the
            ranks.
        UnsupportedPlatformError: this is not Linux. NCCL exists for Linux only.
        ValueError: ``timeout`` or ``address`` is malformed, or there are more than 10,000 calls.

    A fault of one rank is raised on all of them. No process, socket or file is left. This process's CUDA is not used.
    The calling thread waits.

    On one host, without ``address``, only processes of the same user take part. Between hosts and with ``address``,
    whoever reaches rank 0's port and knows the port or the job can take a rank's place. To prevent that, give all ranks
    one secret: the variable ORTGPU_PREFLIGHT_SECRET, or ORTGPU_PREFLIGHT_SECRET_FILE with the path of a file.

    Not promised: that the ranks' programs call the same operations later, or how fast. The connection is not encrypted,
    and NCCL's own connections are not protected by the secret: use a trusted network. Whoever floods the port can keep
    ranks from meeting, but no rank from its deadline.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} is not a number of seconds")
    if sys.platform != "linux":
        raise UnsupportedPlatformError(
            f"NCCL exists for Linux only, and this is {sys.platform}",
            fixes=[manual("run the ranks on Linux", needs="host")],
            system=sys.platform,
        )
    if calls is not None and len(calls) > MOST_CALLS:
        raise ValueError(f"{len(calls)} calls are too many: at most {MOST_CALLS}")
    identity = rank if rank is not None else current_rank()
    planned = tuple(calls) if calls is not None else default_calls(identity.world_size)
    return Participant(identity, planned, meeting_of(identity, address), min(timeout, _LONGEST)).run()


class Participant:
    def __init__(self, rank: Rank, calls: tuple[Collective, ...], meeting: Meeting, timeout: float) -> None:
        self._rank, self._calls, self._meeting = rank, calls, meeting
        # Deadlines, by time.monotonic: all ranks must have come, and rank 0 decides
        self._started = time.monotonic()
        self._arrival = self._started + timeout / 2
        self._settling = min(max(0.2 * timeout, 1.0), 6.0, 0.5 * timeout) / 4  # seconds that a decision takes
        self._verdict = self._started + timeout - 2 * self._settling
        self._selector = selectors.DefaultSelector()
        self._hub: Hub | None = None
        self._link: wire.Connection | None = None  # to rank 0, once that has admitted this rank; its own as well
        self._child: Child | None = None
        self._from_hub: list[wire.Message] = []
        self._from_child: list[wire.Message] = []
        self._resolved: dict[str, list[str]] = {}  # numeric addresses by host
        self._unresolved: dict[str, tuple[OSError, float]] = {}  # the error, and when to ask again
        self._failure: GPUError | None = None
        self._own_problems: list[GPUError] = []  # as this rank, or its child, found them
        self._number, self._step = verdicts.NOWHERE
        self._has_exchanged = False

    @property
    def _alone(self) -> float:
        """The time when this rank decides by itself."""
        return self._verdict + self._settling

    def run(self) -> PreflightReport:
        try:
            return self._run()
        except wire.GarbledError as error:  # The sender knows the key and is no rank.
            raise RendezvousError(
                "rank 0 received messages that no rank of a preflight sends",
                evidence=[str(error)],
                fixes=[manual(f"keep strangers out: give all ranks one secret, {SECRET}")],
                phase=self._step,
            ) from None
        except GPUError as error:
            self._use_own_fixes(error)
            raise
        except BaseException:
            if self._hub is not None:  # after an interrupt the others notice at once
                self._hub.close()
            raise
        finally:
            self._close()

    def _run(self) -> PreflightReport:
        self._start_child()
        self._meet()
        roster = self._describe()
        if (error := verdicts.mismatch(roster)) is not None:
            raise error
        unique_id = self._share_id()
        seconds = self._run_collectives(unique_id)
        timed = zip(self._calls, zip(*seconds, strict=True), strict=True)  # each call, with the seconds of each rank
        facts = tuple(each.facts for each in roster)
        return PreflightReport(
            self._rank,
            facts,
            differences(facts),
            tuple(CollectiveResult.of(call, max(each), self._rank.world_size) for call, each in timed),
            verdicts.notes(self._rank, roster),
            time.monotonic() - self._started,
        )

    def _use_own_fixes(self, error: GPUError) -> None:
        """Put this rank's fixes into an error that it reported: what came back over the network are sentences."""
        fixes = {(own.code, own.summary): own.fixes for own in self._own_problems}
        for problem in (error, *error.others):
            problem.fixes = fixes.get((problem.code, problem.summary), problem.fixes)

    def _close(self) -> None:
        if self._child is not None:
            self._child.end()
        if self._link is not None:
            self._link.close()
        self._meeting.close()
        if self._hub is not None:
            # Until the others hang up: closing first could discard messages that they have not read
            self._pump(lambda: self._hub is None or self._hub.is_done, self._alone)
            self._hub.close()
        self._selector.close()

    def _start_child(self) -> None:
        try:
            self._child = child = Child(self._rank, self._calls, self._selector)
        except DistributedError as error:  # reported to the others after the rendezvous
            self._failure = error
            return
        child.channel.watch(self._selector, lambda: self._hear_child(child))

    def _meet(self) -> None:
        own = self._listen() if self._rank.rank == 0 else None
        refusals: dict[str, dict[Address, None]] = {}  # reasons, each with addresses
        is_waiting = True
        while is_waiting:
            for address in [own] if own is not None else self._meeting.addresses():
                reason = self._try(address)
                if reason is None:
                    is_waiting = False
                    break
                # An attempt that had no time left says nothing about the address
                if not refusals or time.monotonic() < self._arrival:
                    refusals.setdefault(reason, {})[address] = None
            if is_waiting:
                self._pump(lambda: False, time.monotonic() + _RETRY)
                if time.monotonic() > self._arrival:
                    raise self._rank_0_not_found(refusals)
        rest = self._next(self._from_hub, "welcome")["welcome"]
        if not (isinstance(rest, float) and math.isfinite(rest)):
            raise wire.GarbledError(f"a deadline in {rest!r:.99} seconds")
        self._meeting.close()  # all are here
        self._verdict = min(self._verdict, time.monotonic() + rest)

    def _listen(self) -> Address:
        """Start the hub of rank 0. Return its address for this process, without a name of this host."""
        try:
            listener, key = self._meeting.listen()
        except OSError as error:
            raise RendezvousError(
                "rank 0 cannot listen for the other ranks",
                evidence=[f"it was to listen {self._meeting}", str(error)],
                fixes=[manual("name a host name of rank 0's machine and a free port of it as the address")],
                ranks=(0,),
                phase=RENDEZVOUS,
            ) from error
        known = verdicts.Known(self._rank.world_size, str(self._meeting))
        self._hub = Hub(listener, key, known, self._selector, self._arrival, self._verdict, self._settling)
        host, port = listener.getsockname()[:2]
        return Address("127.0.0.1" if host in ("::", "0.0.0.0") else host, port, key)  # noqa: S104 - compared only

    def _try(self, address: Address) -> str | None:
        """Join rank 0 there. Return None, or the reason why not."""
        try:
            connected = self._connected(address)
        except OSError as error:
            return error.strerror or str(error)
        until = min(time.monotonic() + _ANSWER, self._arrival)
        link = wire.Connection(connected, wire.FROM_A_RANK)
        link.watch(self._selector, lambda: self._hear_hub(link))
        try:
            own = wire.challenge()
            answer = self._answer(link, until)
            if "challenge" in answer:
                now = time.monotonic()
                hello = {
                    "ortgpu": OWN_VERSION,
                    "challenge": own,
                    "rank": self._rank.rank,
                    "world_size": self._rank.world_size,
                    "host": socket.gethostname(),
                    "seconds": [self._arrival - now, self._verdict - now],
                }
                link.send({**hello, "proof": wire.proof(address.key, "rank", answer["challenge"], hello)})
                answer = self._answer(link, until)
            if wire.is_proof(answer.get("proof"), address.key, "rank 0", own):
                if "verdict" in answer:
                    raise wire.error_from_message(answer["verdict"], wire.RANK_0)
                link.trust(wire.FROM_RANK_0)
                self._link = link
                self._tell({"at": [self._number, self._step]})
                if self._failure is not None:
                    self._fail(self._failure)
                return None
            return wire.shorten(answer.get("refused", "what listens there does not answer as rank 0 does"))
        finally:
            if self._link is None:
                link.close()
                self._from_hub.clear()

    def _answer(self, link: wire.Connection, until: float) -> wire.Message:
        self._pump(lambda: bool(self._from_hub) or not link.is_open, until)
        return self._from_hub.pop(0) if self._from_hub else {}

    def _connected(self, address: Address) -> socket.socket:
        hosts = self._addresses_of(address.host)
        until = min(time.monotonic() + _CONNECTION, self._arrival)
        refusal: OSError | None = None
        for tried, host in enumerate(hosts):  # each gets its share of the time: one of them may drop all packets
            share = (until - time.monotonic()) / (len(hosts) - tried)
            try:
                return socket.create_connection((host, address.port), timeout=max(share, _RETRY))
            except OSError as error:
                refusal = refusal or error
        raise refusal or OSError("it has no address")

    def _addresses_of(self, host: str) -> list[str]:
        """Return numeric addresses. An unknown name is asked for again: a pod's may become known later."""
        now = time.monotonic()
        if host in self._unresolved and now < self._unresolved[host][1]:
            raise self._unresolved[host][0]
        if host not in self._resolved:
            try:
                self._resolved[host] = resolve(host, max(self._arrival - now, _RETRY))
            except OSError as error:
                self._unresolved[host] = (error, time.monotonic() + _ASK_AGAIN)
                raise
        return self._resolved[host]

    def _describe(self) -> list[Described]:
        facts = self._next(self._from_child, "facts")
        self._own_problems += [wire.error_from_message(facts[key]) for key in ("problem", "nccl_problem") if facts[key]]
        calls = [[call.operation, call.dtype, call.count] for call in self._calls]
        self._tell({"post": FACTS, "value": {**facts, "calls": calls}})
        self._at("waiting for the facts of the others")
        roster = [Described.parse(message, rank) for rank, message in enumerate(self._collect_from_all())]
        if [described.facts.rank for described in roster] != list(range(self._rank.world_size)):
            raise wire.GarbledError("ranks with the numbers of others")
        self._has_exchanged = True
        return roster

    def _share_id(self) -> str:
        value = None
        if self._rank.rank == 0:
            self._ask_child({"make_id": True})
            value = self._next(self._from_child, "id")["id"]
        else:
            self._number += 1  # further than rank 0 while that makes the id
            self._at("waiting for NCCL's unique id")
        self._tell({"post": ID, "value": value})
        return str(self._collect_from_all()[0])

    def _run_collectives(self, unique_id: str) -> list[list[float]]:
        self._number = _RUN - 1
        seconds = self._verdict - 2 * self._settling - time.monotonic()
        self._ask_child({"id": unique_id, "seconds": seconds})
        self._tell({"post": LAST, "value": self._next(self._from_child, "results")["results"]})
        results = self._collect_from_all()
        for found in results:
            if not isinstance(found, list) or [type(each) for each in found] != [float] * len(self._calls):
                raise wire.GarbledError("results that are none")
        channel = self._ask_child({"end": True})
        channel.watch(self._selector, channel.receive)  # it gives its communicator back, and nothing else matters
        self._pump(lambda: not channel.is_open, min(self._alone, time.monotonic() + _GIVING_BACK))
        return results

    def _collect_from_all(self) -> list[Any]:
        """Return the next value that all ranks have posted, in the order of the ranks."""
        values = self._next(self._from_hub, "all")["all"]
        if not isinstance(values, list) or len(values) != self._rank.world_size:
            raise wire.GarbledError("not from every rank")
        return values

    def _next(self, messages: list[wire.Message], kind: str) -> wire.Message:
        """Wait for the first message that has this key, and return it. Raises a verdict that comes before it."""
        link = self._link
        assert link is not None
        self._pump(
            lambda: bool(_first(messages, kind) or _first(self._from_hub, "verdict")) or not link.is_open, self._alone
        )
        if (message := _first(messages, kind)) is not None:
            messages.remove(message)
            return message
        if (verdict := _first(self._from_hub, "verdict")) is not None:
            raise wire.error_from_message(verdict["verdict"], wire.RANK_0)
        if self._failure is not None and not verdicts.is_consequence(self._failure):
            raise verdicts.add_rank(self._failure, self._rank.rank, None)
        event = "went silent" if link.is_open else "ended, or the connection to it broke,"
        raise self._unfinished((0,), f"rank 0 {event} during: {self._step}", [])

    def _pump(self, is_done: Callable[[], bool], until: float) -> None:
        """Serve every socket until ``is_done`` or the time has come, and read all that has arrived by then."""
        is_over = False
        while not is_done() and not is_over:
            is_over = (now := time.monotonic()) >= until
            soonest = min(until, self._hub.next_deadline) if self._hub is not None else until
            for key, events in self._selector.select(max(0.0, soonest - now)):
                key.data(events)
            if self._hub is not None:
                self._hub.check_deadline()

    def _hear_hub(self, link: wire.Connection) -> None:
        try:
            self._from_hub += link.receive()
            if len(self._from_hub) > _WAITING:
                raise wire.GarbledError("it sends more messages than rank 0")
        except wire.GarbledError:  # The sender is not rank 0.
            link.close()

    def _hear_child(self, child: Child) -> None:
        for message in child.channel.receive():
            if "begin" in message:
                self._at(str(message["begin"]))
            elif "error" in message:
                error = wire.error_from_message(message["error"])
                error.evidence = (
                    *error.evidence,
                    *(escape_controls(line) for line in child.lines() if "NCCL WARN" in line),
                )
                self._fail(error)
            else:
                self._from_child.append(message)
        if not child.channel.is_open and self._failure is None:
            how = f"the preflight's child of rank {self._rank.rank} {child.how_it_ended()} during: {self._step}"
            self._fail(self._unfinished((self._rank.rank,), how, child.lines()[-8:]))

    def _at(self, step: str) -> None:
        self._number, self._step = self._number + 1, step
        self._tell({"at": [self._number, step]})

    def _fail(self, error: GPUError) -> None:
        """Report that this rank cannot go on. Rank 0 decides what that means for all."""
        self._failure = error
        self._own_problems.append(error)
        self._tell({"failed": wire.error_to_message(error)})

    def _tell(self, message: wire.Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _ask_child(self, message: wire.Message) -> wire.Connection:
        assert self._child is not None
        self._child.channel.send(message)
        return self._child.channel

    # Errors that this rank finds without rank 0

    def _unfinished(self, ranks: tuple[int, ...], summary: str, evidence: Sequence[str]) -> DistributedError:
        cls = CollectiveTimeoutError if self._has_exchanged else RendezvousError
        fixes = [manual(f"look at the output of {named(ranks)}")]
        if not self._rank.share_one_host:
            fixes.append(verdicts.BETWEEN_HOSTS)
        return cls(summary, evidence=evidence, fixes=fixes, ranks=ranks, phase=self._step)

    def _rank_0_not_found(self, refusals: Mapping[str, Iterable[Address]]) -> RendezvousError:
        hostname = socket.gethostname()
        names = {name: found for name, found in self._resolved.items() if found != [name]}
        return RendezvousError(
            "rank 0 was not at the rendezvous in time",
            evidence=[
                f"this is rank {self._rank.rank} of {self._rank.world_size}, on {hostname}",
                f"rank 0 was looked for {self._meeting}",
                *(f"{reason}: {', '.join(map(str, addresses))}" for reason, addresses in refusals.items()),
                *(f"on {hostname}, {name} is {', '.join(found)}" for name, found in names.items()),
            ],
            fixes=[
                *map(manual, self._meeting.ways),
                manual("look at the output of rank 0: it ended, it was not started, or it did something else"),
                manual(
                    "if it runs on another host: check that its name resolves to it here, and that no firewall is in "
                    "between"
                ),
            ],
            ranks=(0,),
            phase=RENDEZVOUS,
        )


def _first(messages: list[wire.Message], kind: str) -> wire.Message | None:
    return next((message for message in messages if kind in message), None)


class Child:
    """A running child. ``channel`` carries messages both ways. The text that its libraries print is kept."""

    def __init__(self, rank: Rank, calls: tuple[Collective, ...], selector: selectors.BaseSelector) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                python_command(_BOOT, str(os.getpid())),
                stdin=theirs.fileno(),  # Its number would be 2 in a process without standard streams.
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # NCCL's warnings are the evidence of a failure
                env={"NCCL_DEBUG": "WARN", **environ_of_child()},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise DistributedError(
                f"the child process of rank {rank.rank} cannot be started",
                evidence=[str(error)],
                fixes=[manual("run `ortgpu preflight` of an environment with Python, started as the program is")],
                ranks=(rank.rank,),
                phase="start",
            ) from error
        finally:
            theirs.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._text = b""
        self._selector = selector
        os.set_blocking(self._output.fileno(), False)
        selector.register(self._output, selectors.EVENT_READ, lambda _: self._read_output())
        self.channel = wire.Connection(ours)
        self.channel.send({"rank": asdict(rank), "calls": [[c.operation, c.dtype, c.count] for c in calls]})

    def _read_output(self) -> None:
        if self._output.closed:
            return
        data = self._output.read(_CHUNK)  # None: nothing has arrived
        self._text = b"\n".join((self._text + (data or b"")).split(b"\n")[-_LINES_KEPT:])[-_BYTES_KEPT:]
        if data == b"":
            self._close_output()

    def _close_output(self) -> None:
        if not self._output.closed:
            self._selector.unregister(self._output)
            self._output.close()

    def lines(self) -> list[str]:
        self._read_output()
        return [line.strip() for line in self._text.decode("utf-8", "replace").splitlines() if line.strip()]

    def how_it_ended(self) -> str:
        """Describe the signal or the exit status of the child's end. For after it has closed its channel."""
        try:
            status = self._process.wait(_DEATH)
        except subprocess.TimeoutExpired:
            return "hung up and did not end"
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        return f"ended with exit status {status}"

    def end(self) -> None:
        """Kill the child and all that it started. Only a process that hangs in the driver can be left."""
        kill_group(self._process)
        self._close_output()
        self.channel.close()
