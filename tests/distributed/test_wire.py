"""What ranks of a preflight say to each other: messages that are whole or refused."""

from __future__ import annotations

import json
import socket
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.distributed.wire import (
    FROM_A_RANK,
    Connection,
    Decoder,
    GarbledError,
    encode,
    error_from_message,
    error_to_message,
    is_proof,
    proof,
)
from ortgpu.errors import GPUError, catalogue, manual, shell
from tests.distributed.test_hub import FOREIGN


@given(
    messages=st.lists(
        st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.none(), max_size=3), max_size=4
    ),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_messages_arrive_however_they_are_cut(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    data = b"".join(map(encode, messages))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = Decoder(FROM_A_RANK)
    pieces = [data[start:end] for start, end in pairwise(places)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == messages


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (proof("key", "rank", 1), True),
        (proof("another key", "rank", 1), False),
        (proof("key", "rank", 2), False),
        (proof("key", 1, "rank"), False),
        (proof("key", "rank", 1)[:-1], False),
        ("", False),
        ("\N{GREEK SMALL LETTER ALPHA}", False),
        (None, False),
        (1, False),
    ],
)
def test_only_who_knows_the_key_has_the_proof(given: Any, is_right: bool) -> None:
    assert is_proof(given, "key", "rank", 1) is is_right


def test_what_the_connection_does_not_take_yet_is_sent_later() -> None:
    one, other = socket.socketpair()
    sender, receiver = Connection(one), Connection(other, longest=1 << 23)
    sent = {"text": "x" * (1 << 22)}
    sender.send(sent)
    received: list[Any] = []
    for _ in range(10_000):
        received += receiver.receive()
        if received:
            break
        sender.send(b"")
    assert received == [sent]
    sender.close()
    receiver.close()


@given(st.binary(max_size=300))
def test_anything_else_is_refused_or_waited_for(data: bytes) -> None:
    try:
        for message in Decoder(FROM_A_RANK).feed(data):
            assert isinstance(message, dict)
    except GarbledError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", FROM_A_RANK + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 3) + b"\xff{}",
        struct.pack(">I", 20_000) + b"[" * 20_000,
        encode({"a": json.loads("[" * 100 + "]" * 100)}),
    ],
)
def test_no_message(data: bytes) -> None:
    with pytest.raises(GarbledError):
        Decoder(FROM_A_RANK).feed(data)


@pytest.mark.parametrize("cls", catalogue().values(), ids=lambda cls: cls.__name__)
def test_every_error_crosses_the_network(cls: type[GPUError]) -> None:
    details: dict[str, Any] = dict.fromkeys(cls.fields, (1, 2))
    other = GPUError("another", evidence=["c"])
    error = cls(
        "what failed",
        evidence=["a", "b"],
        fixes=[shell("true", needs="root"), manual("do it")],
        others=[other],
        severity="warning",
        **details,
    )
    arrived = error_from_message(json.loads(json.dumps(error_to_message(error))))
    assert type(arrived) is cls
    assert str(arrived) == str(error)
    assert arrived.details() == error.details()
    assert [(fix.kind, fix.needs) for fix in arrived.fixes] == [("shell", "root"), ("manual", None)]
    assert [str(each) for each in arrived.others] == [str(other)]


@pytest.mark.parametrize("sender", ["rank 0", "rank 1"])
def test_a_fix_of_another_host_is_no_command_here(sender: str) -> None:
    other = GPUError("another", fixes=[FOREIGN])
    sent = error_to_message(GPUError("it failed", fixes=[FOREIGN, manual("look there", needs="root")], others=[other]))
    arrived = error_from_message(json.loads(json.dumps(sent)), sender)
    sentence = "look there" if sender == "rank 0" else "rank 1 says: look there"
    assert [(str(fix), fix.kind, fix.needs) for fix in (*arrived.fixes, *arrived.others[0].fixes)] == [
        (f"{sender} says: {FOREIGN}", "manual", None),
        (sentence, "manual", "root"),
        (f"{sender} says: {FOREIGN}", "manual", None),
    ]
    assert not any(fix.executable for fix in arrived.fixes)


def test_a_fix_of_an_unknown_kind_is_no_message() -> None:
    sent = error_to_message(GPUError("it failed", fixes=[FOREIGN]))
    for change in ({"kind": "ansi"}, {"needs": ["root"]}):
        with pytest.raises(GarbledError):
            error_from_message({**sent, "fixes": [{**sent["fixes"][0], **change}]}, "rank 1")


@pytest.mark.parametrize("message", [{}, {"code": "nccl"}, {"code": "nccl", "details": None}])
def test_no_error(message: dict[str, Any]) -> None:
    with pytest.raises(GarbledError):
        error_from_message(message)
