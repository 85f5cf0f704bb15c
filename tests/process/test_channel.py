"""Channels: messages, deadlines, ends, and sends within sends."""

from __future__ import annotations

import gc
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from ortgpu.process.channel import Channel, PickledError
from tests.programs.child_functions import UnpicklableError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_of_any_size_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    messages = [None, {"x": 1}, b"x" * 10_000_000, "end"]

    def send() -> None:
        for message in messages:
            ends[0].send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [ends[1].receive(30) for _ in messages] == messages
    sender.join()


def test_a_message_that_does_not_unpickle_is_gone(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(Bad())
    ends[0].send(1)
    with pytest.raises(ValueError, match="bad"):
        ends[1].receive(5)
    assert ends[1].receive(5) == 1


class Bad:
    def __reduce__(self) -> tuple[object, ...]:
        return fail, ()


def fail() -> None:
    raise ValueError("bad")


def test_nothing_in_time(ends: tuple[Channel, Channel]) -> None:
    assert not ends[1].has_message(0)
    with pytest.raises(TimeoutError):
        ends[1].receive(0.01)
    ends[0].send(1)
    assert ends[1].has_message(5)
    assert ends[1].receive(5) == 1  # nothing of a message was lost


def test_a_receiver_that_takes_nothing_does_not_hold_the_sender(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send(b"x" * 100_000_000, timeout=0.05)
    with pytest.raises((EOFError, OSError)):  # half a message is of no use to anybody
        ends[1].receive(5)
    with pytest.raises(BrokenPipeError):
        ends[0].send(1)


def test_the_end_is_seen_from_both_sides(ends: tuple[Channel, Channel]) -> None:
    ends[0].shut()
    assert ends[1].has_message(5)
    with pytest.raises(EOFError):
        ends[1].receive(5)
    with pytest.raises(BrokenPipeError):
        ends[1].send(1)


def test_a_message_that_does_not_pickle_harms_nothing(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        ends[0].send(lambda: None)
    ends[0].send(1)
    assert ends[1].receive(5) == 1


def test_a_signal_handler_sends_amid_a_send(ends: tuple[Channel, Channel]) -> None:
    """The handler interrupts a send that waits for room, and its message must neither hang nor tear the other."""
    large = b"x" * 20_000_000
    sent: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        ends[0].send(len(sent))
        sent.append(number)
        if len(sent) < 20:
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    received: list[object] = []

    def receive() -> None:
        time.sleep(0.02)
        while not received or received[-1] != "end":
            received.append(ends[1].receive(30))

    before = signal.signal(signal.SIGALRM, handler)
    reader = threading.Thread(target=receive)
    try:
        reader.start()
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        ends[0].send(large)
        while len(sent) < 20:
            time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    ends[0].send("end")
    reader.join(30)
    assert [each for each in received if each != large] == [*range(20), "end"]
    assert received.count(large) == 1


def test_a_finalizer_sends_amid_a_send(ends: tuple[Channel, Channel]) -> None:
    class Sends:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ends[0].send("finalized")

        def __reduce__(self) -> tuple[object, ...]:
            return str, ()

    class Collects:
        def __reduce__(self) -> tuple[object, ...]:
            Sends()
            gc.collect()
            return str, ("message",)

    ends[0].send(Collects())
    assert {ends[1].receive(5) for _ in range(2)} == {"finalized", "message"}


def test_a_wait_may_be_as_long_as_one_likes(ends: tuple[Channel, Channel]) -> None:
    ends[0].send("message")
    assert ends[1].has_message(1e300)
    assert ends[1].receive(1e7) == "message", "116 days, in more milliseconds than an int of C has"


def test_errors_travel() -> None:
    error = PickledError.of(FileNotFoundError(2, "no such file", "x")).error()
    assert isinstance(error, FileNotFoundError)
    assert error.filename == "x"
    error = PickledError.of(UnpicklableError(1, 2)).error()
    assert type(error) is RuntimeError
    assert str(error) == "UnpicklableError: 1 and 2"
