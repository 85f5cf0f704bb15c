"""Copies of feeds: whatever a caller may write to again is copied, or said not to be."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortgpu.running.feed_copies import CopiesOnDevice, FeedCopies, _NotCopiedError
from ortgpu.running.pinned import STAGED_FROM, OrdinaryMemory
from tests.support.made_sessions import L4, made_session

LARGE = STAGED_FROM // 4 + 1024  # elements of float32
ARRAYS: dict[str, Callable[[], Any]] = {
    "small": lambda: np.arange(6, dtype=np.float32).reshape(2, 3),
    "large": lambda: np.arange(LARGE, dtype=np.float32).reshape(8, -1),
    "transposed": lambda: np.arange(LARGE * 2, dtype=np.float32).reshape(8, 4, -1).transpose(2, 0, 1),
    "with gaps": lambda: np.arange(LARGE * 2, dtype=np.float32).reshape(8, -1)[:, ::2],
    "of text": lambda: np.array(["a", "b"], object),
    "empty": lambda: np.empty((0, 4), np.float32),
    "a scalar": lambda: np.array(3.5),
    "a matrix": lambda: np.matrix([[1.0, 2.0]]),
}


class Memory(OrdinaryMemory):
    """Memory of a session with a limit, in the place of pinned memory."""


def copies(limit: int = 64 << 20) -> FeedCopies:
    memory = Memory(limit)
    made = FeedCopies(lambda: (memory,), limit, None)  # type: ignore[arg-type,return-value]  # no pinned memory here
    made.memory = memory  # type: ignore[attr-defined]  # it lives as long
    return made


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ARRAYS)
def test_a_copy_is_what_the_array_was(name: str) -> None:
    array = ARRAYS[name]()
    expected = np.array(array)
    copied, is_whole = copies().of({"x": array})
    assert is_whole
    assert type(copied["x"]) is np.ndarray
    assert not np.shares_memory(copied["x"], np.asarray(array))
    array[...] = array.flat[0] if array.size and array.dtype == object else -1
    np.testing.assert_array_equal(copied["x"], expected)
    assert copied["x"].dtype == expected.dtype


@pytest.mark.parametrize("container", [list, tuple])
def test_items_of_sequences_and_mappings_are_copied(container: Any) -> None:
    array = np.ones(3, np.float32)
    feed = {"s": container([array, 1, "text"]), "m": {1: array}}
    copied, is_whole = copies().of(feed)
    assert is_whole
    array[:] = 9
    assert type(copied["s"]) is container
    assert copied["s"][0].tolist() == copied["m"][1].tolist() == [1, 1, 1]
    assert copied["s"][1:] == container([1, "text"])


def test_a_value_of_the_host_is_copied_as_an_array() -> None:
    array = np.arange(4, dtype=np.float32)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    copied, is_whole = copies().of({"x": value})
    assert is_whole
    value.update_inplace(np.full(4, 9, np.float32))
    assert copied["x"].tolist() == [0, 1, 2, 3]


class Mutable:
    pass


@pytest.mark.parametrize(
    "value",
    [Mutable(), np.array([Mutable()], object), np.array([[1], [2, 3]], object), [Mutable()], {"a": Mutable()}, {1}],
)
def test_what_cannot_be_copied_is_said_so_and_passed_on(value: Any) -> None:
    array = np.ones(3, np.float32)
    copied, is_whole = copies().of({"x": array, "other": value})
    assert not is_whole
    assert copied["other"] is value
    assert not np.shares_memory(copied["x"], array)


def test_a_feed_that_is_none_is_left_to_the_run() -> None:
    assert copies().of([1, 2]) == ([1, 2], True)


def test_feeds_take_half_of_the_memory_and_wait_for_runs_before_they_take_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = copies(limit=1 << 20)
    memory: Memory = made.memory  # type: ignore[attr-defined]  # set above
    shape, dtype = ((1 << 18) // 4,), np.dtype(np.float32)
    held = [made.empty(shape, dtype) for _ in range(2)]
    assert memory.bytes_in_use == 1 << 19
    waited: list[int] = []

    def wait_and_free() -> None:
        waited.append(len(held))
        held.pop()

    third = made.empty(shape, dtype, [wait_and_free])
    assert waited == [2]
    assert memory.bytes_in_use == 1 << 19
    fourth = made.empty(shape, dtype, [lambda: waited.append(0)])
    assert waited == [2, 0], "the last run has ended, and the memory is still full"
    assert memory.bytes_in_use == 1 << 19
    assert third.nbytes == fourth.nbytes


def test_an_array_that_never_fits_is_not_waited_for() -> None:
    made, waited = copies(limit=1 << 20), list[int]()
    kept = made.empty((1,), np.dtype(np.float32))
    array = made.empty((1 << 20,), np.dtype(np.float32), [lambda: waited.append(1)])
    assert array.nbytes == 4 << 20
    assert waited == []
    assert kept.size


def test_memory_goes_with_the_copies() -> None:
    made = copies()
    reference = weakref.ref(made.of({"x": ARRAYS["large"]()})[0]["x"])
    assert reference() is None
    made.close()
    assert made.of({"x": np.ones(2)})[1]


# Values on a GPU


class LateRuntime:
    """The CUDA runtime for the second GPU. A copy is made when its stream is waited for: CUDA may make it so late."""

    def __init__(self, *on_device: int) -> None:
        self.on_device = on_device
        self.pending: list[tuple[int, int, int]] = []
        self.allocated: list[Any] = []  # ONNX Runtime does not keep the memory of an array

    def is_on_device(self, address: int) -> bool:
        return address in self.on_device

    def device_guard(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def new_stream(self) -> int:
        return 9

    def destroy_stream(self, stream: int) -> None:
        pass

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        assert stream == 9
        self.pending.append((to, source, size))

    def synchronise(self, stream: int) -> None:
        assert stream == 9
        while self.pending:
            ctypes.memmove(*self.pending.pop(0))


def on_device(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> CopiesOnDevice:
    """Return the copies of a session on the second GPU, whose memory is the host's here."""
    monkeypatch.setattr("ortgpu.running.feed_copies.gives_memory", lambda session: True)

    session = made_session(device=L4)

    def create(shape: Any, dtype: Any, place: Any) -> Any:
        assert place.device_id() == L4.ordinal
        runtime.allocated.append(onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype)))
        return runtime.allocated[-1]._ortvalue

    session._sess = SimpleNamespace(create_ortvalue_from_shape_and_type=create)
    return CopiesOnDevice(session, runtime)


def test_a_value_on_the_gpu_is_copied_before_the_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    runtime = LateRuntime(value.data_ptr())
    copy = on_device(monkeypatch, runtime).copy(value)
    value.numpy()[:] = 0
    np.testing.assert_array_equal(copy.numpy(), np.arange(6, dtype=np.float32).reshape(2, 3))


def test_a_value_of_another_gpu_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))
    with pytest.raises(_NotCopiedError):
        on_device(monkeypatch, LateRuntime()).copy(value)
