"""Messages with arrays between two processes: both ends are in this one."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import ExecutionError
from ortgpu.process.channel import Channel
from ortgpu.session.pool import shared_memory
from ortgpu.session.pool.shared_memory import KEPT, Exchange, SharedArrays, memory_file

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="worker processes are for Linux")

TIMEOUT = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Exchange, Exchange]]:
    one, other = map(Channel, socket.socketpair())
    ours, theirs = memory_file("ours"), memory_file("theirs")
    exchanges = Exchange(one, ours, theirs), Exchange(other, os.dup(theirs), os.dup(ours))
    yield exchanges
    for each in exchanges:
        each.close()


@pytest.fixture
def memory() -> Iterator[SharedArrays]:
    made = SharedArrays(memory_file("ortgpu-test"))
    yield made
    made.drop()
    os.close(made.descriptor)


def floats(count: int, value: float = 1.0) -> Any:
    return np.full(count, value, np.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10, dtype=np.int64),
        np.empty((0, 4), np.float32),
        np.array(3.5),
        np.arange(24).reshape(2, 3, 4)[:, ::2],
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array([True, False]),
        np.zeros(9 << 20, np.int8),  # in huge pages
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_arrives_as_it_was(ends: tuple[Exchange, Exchange], array: Any) -> None:
    ours, theirs = ends
    ours.send({"a": 1}, [array])
    message, (found,) = theirs.receive(TIMEOUT)
    assert message == {"a": 1}
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


def test_several_arrays_lie_apart_and_the_next_message_uses_the_same_memory(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    addresses = []
    for number in range(3):
        ours.send(number, [floats(70, number), floats(90, -number)])
        message, (first, second) = theirs.receive(TIMEOUT)
        assert message == number
        assert (first == number).all()
        assert (second == -number).all()
        addresses.append(first.__array_interface__["data"][0])
        assert first.__array_interface__["data"][0] % 256 == 0
        theirs.send("taken")
        ours.receive(TIMEOUT)
    assert len(set(addresses)) == 1
    assert ours.ours.size == theirs.theirs.size > 0


def test_memory_grows_with_a_message_and_stays(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    sizes = []
    for size in (4, 1 << 20, 8):
        ours.send(None, [floats(size)])
        _, (found,) = theirs.receive(TIMEOUT)
        assert found.shape == (size,)
        theirs.send("taken")
        ours.receive(TIMEOUT)
        sizes.append(theirs.theirs.size)
    assert sizes[0] < sizes[1] == sizes[2]
    assert os.fstat(ours.ours.descriptor).st_size == sizes[2]


def test_a_message_that_was_not_sent_takes_no_room(ends: tuple[Exchange, Exchange]) -> None:
    ours, _ = ends
    sizes = set()
    for _ in range(5):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            ours.send(lambda: None, [floats(1 << 14)])
        sizes.add(ours.ours.size)
    assert len(sizes) == 1


def test_an_array_that_was_made_in_the_memory_is_not_copied(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    copied: list[int] = []

    def copy(to: Any, array: Any) -> None:
        copied.append(array.nbytes)
        np.copyto(to, array)

    ours.ours._copy = copy
    ours.send(None, [floats(100)])
    theirs.receive(TIMEOUT)
    theirs.send(None)
    ours.receive(TIMEOUT)
    made = ours.ours.try_empty((50,), np.dtype(np.float32))
    assert made is not None
    made[:] = 7
    ours.send(None, [made])
    _, (found,) = theirs.receive(TIMEOUT)
    assert (found == 7).all()
    assert copied == [400]


def test_there_is_only_so_much_room(memory: SharedArrays) -> None:
    assert memory.try_empty((4,), np.dtype(np.float32)) is None, "there is none yet"
    places = memory.put([floats(4)])
    assert memory.try_empty((memory.size,), np.dtype(np.int8)) is None
    assert memory.try_empty((0,), np.dtype(np.int8)) is None
    memory.used = 0
    assert memory.try_empty((memory.size,), np.dtype(np.int8)) is not None
    assert memory.try_empty((1,), np.dtype(np.int8)) is None
    assert np.array_equal(memory.array(places[0]), floats(4))


def test_memory_is_pinned_while_it_is_mapped(memory: SharedArrays) -> None:
    pinned: list[int] = []

    def pin(address: int, size: int) -> Callable[[], None]:
        pinned.append(size)
        return lambda: pinned.append(-size)

    memory._pin = pin
    for size in (100, 1 << 20):
        memory.put([floats(size)])
    memory.drop()
    assert len(pinned) == 4
    assert pinned[0] == -pinned[1]
    assert pinned[2] == -pinned[3]
    memory.drop()
    assert len(pinned) == 4
    assert memory.size == 0


def test_where_there_is_no_room_nothing_is_sent_and_the_exchange_goes_on(
    ends: tuple[Exchange, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(ExecutionError, match="no space for the arrays") as caught:
            ours.send("lost", [floats(4)])
    assert "No space left on device" in caught.value.evidence[0]
    ours.send("next", [floats(4)])
    assert theirs.receive(TIMEOUT)[0] == "next"


def test_what_is_too_large_to_keep_is_freed_but_for_the_arrays_that_use_it(
    ends: tuple[Exchange, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    assert KEPT == 256 << 20
    ours.send(None, [floats(100)])
    _, (found,) = theirs.receive(TIMEOUT)
    theirs.drop_if_large(frees=False)
    assert theirs.theirs.size > 0, "it is small enough"
    monkeypatch.setattr(shared_memory, "KEPT", 0)
    theirs.drop_if_large(frees=False)
    assert theirs.theirs.size == 0
    assert os.fstat(ours.ours.descriptor).st_size > 0, "the side that began may still read"
    assert (found == 1).all()
    theirs.send("taken")
    ours.receive(TIMEOUT)
    del found
    ours.drop_if_large(frees=True)
    assert os.fstat(ours.ours.descriptor).st_size == 0
    ours.send(None, [floats(100, 2)])
    assert (theirs.receive(TIMEOUT)[1][0] == 2).all()


def test_no_child_inherits_the_memory() -> None:
    descriptor = shared_memory.memory_file("ortgpu-test")
    try:
        assert not os.get_inheritable(descriptor)
        assert os.fstat(descriptor).st_size == 0
    finally:
        os.close(descriptor)
