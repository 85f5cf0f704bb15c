"""Messages with arrays between two processes: both ends are in this one."""

from __future__ import annotations

import errno
import os
import pickle
import socket
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from ortgpu.errors import ExecutionError
from ortgpu.process.channel import Channel, memory_file
from ortgpu.session.pool import shared_memory
from ortgpu.session.pool.shared_memory import KEPT, Exchange

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="worker processes are for Linux")

TIMEOUT = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Exchange, Exchange]]:
    one, other = map(Channel, socket.socketpair())
    file = memory_file("ortgpu-test")
    exchanges = Exchange(one, file), Exchange(other, os.dup(file))
    yield exchanges
    for each in exchanges:
        each.close()


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


def answered(ours: Exchange, theirs: Exchange, *results: Any) -> list[Any]:
    """Answer a request that ``theirs`` has received, and return copies of the results as ``ours`` receives them."""
    theirs.send("taken", results)
    arrived = [array.copy() for array in ours.receive(TIMEOUT)[1]]
    theirs.end(frees=False)
    ours.end(frees=True)
    return arrived


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
        answered(ours, theirs)
    assert len(set(addresses)) == 1
    assert ours.size == theirs.size > 0


def test_an_answer_leaves_the_arrays_of_its_request_alone(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    for number in range(3):
        ours.send(None, [floats(70, number)])
        _, (found,) = theirs.receive(TIMEOUT)
        results = answered(ours, theirs, floats(70, -number), found[:5])
        assert (found == number).all()
        assert [set(result) for result in results] == [{-number}, {number}]
        assert ours.size == theirs.size


def test_memory_grows_with_a_message_and_stays(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    sizes = []
    for size in (4, 1 << 20, 8):
        ours.send(None, [floats(size)])
        _, (found,) = theirs.receive(TIMEOUT)
        assert found.shape == (size,)
        answered(ours, theirs)
        sizes.append(theirs.size)
    assert sizes[0] < sizes[1] == sizes[2]
    assert os.fstat(ours.descriptor).st_size == sizes[2]


def test_a_message_that_was_not_sent_takes_no_room(ends: tuple[Exchange, Exchange]) -> None:
    ours, _ = ends
    sizes = set()
    for _ in range(5):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            ours.send(lambda: None, [floats(1 << 14)])
        ours.end(frees=True)
        sizes.add(ours.size)
    assert len(sizes) == 1


def test_an_array_that_was_made_in_the_memory_is_not_copied(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    copied: list[int] = []

    def copy(to: Any, array: Any) -> None:
        copied.append(array.nbytes)
        np.copyto(to, array)

    theirs._copy = copy
    for _ in range(2):
        ours.send(None, [floats(100)])
        _, (found,) = theirs.receive(TIMEOUT)
        made = theirs.try_empty((50,), np.dtype(np.float32))
        assert made is not None
        made[:] = 7
        (arrived,) = answered(ours, theirs, made)
        assert (arrived == 7).all()
        assert (found == 1).all()
    assert copied == []


def test_there_is_only_so_much_room(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    assert theirs.try_empty((4,), np.dtype(np.float32)) is None, "there is none yet"
    ours.send(None, [floats(4)])
    _, (found,) = theirs.receive(TIMEOUT)
    rest = theirs.size - theirs.used
    assert theirs.try_empty((rest + 1,), np.dtype(np.int8)) is None
    assert theirs.try_empty((0,), np.dtype(np.int8)) is None
    array = theirs.try_empty((rest,), np.dtype(np.int8))
    assert array is not None
    array[:] = 9
    assert theirs.try_empty((1,), np.dtype(np.int8)) is None
    assert np.array_equal(found, floats(4))


def test_memory_is_pinned_while_it_is_mapped(ends: tuple[Exchange, Exchange]) -> None:
    ours, theirs = ends
    pinned: list[int] = []

    class Runtime:
        def pin(self, address: int, size: int) -> None:
            pinned.append(size)

        def unpin(self, address: int) -> None:
            pinned.append(-pinned[-1])

    theirs._runtime = cast("Any", Runtime())
    for size in (100, 1 << 20):
        ours.send(None, [floats(size)])
        theirs.receive(TIMEOUT)
        answered(ours, theirs)
    assert len(pinned) == 3
    theirs.close()
    assert len(pinned) == 4
    assert pinned[0] == -pinned[1]
    assert pinned[2] == -pinned[3]
    theirs.descriptor = os.dup(ours.descriptor)  # The fixture closes it again.


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


def test_a_limit_on_the_size_of_files_is_named(
    ends: tuple[Exchange, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ExecutionError, match="no space for the arrays") as caught:
        ends[0].send(None, [floats(1000)])
    assert "ulimit -f" in str(caught.value.fixes[0])


def test_a_side_that_cannot_map_a_request_answers_with_the_error_and_goes_on(
    ends: tuple[Exchange, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends

    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    ours.send(None, [floats(1000)])
    with monkeypatch.context() as patched:
        patched.setattr(shared_memory, "_map_file", refuse)
        with pytest.raises(ExecutionError, match="no space for the arrays"):
            theirs.receive(TIMEOUT)
        assert answered(ours, theirs) == [], "an answer without arrays needs no memory"
    ours.send(None, [floats(1000, 2)])
    assert (theirs.receive(TIMEOUT)[1][0] == 2).all()


def test_what_is_too_large_to_keep_is_freed_but_for_the_arrays_that_use_it(
    ends: tuple[Exchange, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    assert KEPT == 512 << 20
    ours.send(None, [floats(100)])
    _, (found,) = theirs.receive(TIMEOUT)
    answered(ours, theirs)
    assert ours.size == theirs.size > 0, "it is small enough"
    monkeypatch.setattr(shared_memory, "KEPT", 0)
    ours.send(None, [floats(100)])
    _, (found,) = theirs.receive(TIMEOUT)
    theirs.send("taken")
    theirs.end(frees=False)
    assert theirs.size == 0
    assert os.fstat(ours.descriptor).st_size > 0, "the side that made the request may still read"
    assert (found == 1).all()
    ours.receive(TIMEOUT)
    del found
    ours.end(frees=True)
    assert os.fstat(ours.descriptor).st_size == 0
    ours.send(None, [floats(100, 2)])
    assert (theirs.receive(TIMEOUT)[1][0] == 2).all()


def test_no_child_inherits_the_memory() -> None:
    descriptor = memory_file("ortgpu-test")
    try:
        assert not os.get_inheritable(descriptor)
        assert os.fstat(descriptor).st_size == 0
    finally:
        os.close(descriptor)
