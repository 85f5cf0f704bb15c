"""Feeds for the processes of a pool: arrays of numbers on the host, copied while the caller waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortgpu.errors import ProviderRequestError
from ortgpu.session.pool.isolated import ProcessFeeds

LARGE = 2 << 20  # bytes, from where on threads copy


@pytest.fixture
def feeds() -> Iterator[ProcessFeeds]:
    made = ProcessFeeds(64 << 20)
    yield made
    made.close()


class OnHost:
    def __init__(self, array: Any, device: tuple[int, int]) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__()


def test_arrays_pass_through_as_they_are(feeds: ProcessFeeds) -> None:
    array = np.arange(4)
    assert feeds.pass_through({"x": array})["x"] is array


def test_a_subclass_is_seen_as_an_array(feeds: ProcessFeeds) -> None:
    class Own(np.ndarray):
        pass

    passed = feeds.pass_through({"x": np.arange(4).view(Own)})["x"]
    assert type(passed) is np.ndarray


@pytest.mark.parametrize("kind", [1, 3])  # DLDeviceType: kDLCPU, kDLCUDAHost
def test_arrays_of_other_libraries_on_the_host(feeds: ProcessFeeds, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(4.0)
    monkeypatch.setattr(np, "from_dlpack", lambda value: value.array)
    assert feeds.pass_through({"x": OnHost(array, (kind, 0))})["x"] is array


def test_the_memory_of_another_library_is_not_copied(feeds: ProcessFeeds) -> None:
    array = np.arange(4.0)
    assert np.shares_memory(feeds.pass_through({"x": OnHost(array, (1, 0))})["x"], array)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.array(["a"]), "text"),
        (np.array([b"a"]), "text"),
        (np.array([None]), "text"),
        ([1, 2], "a list"),
        (3, "a int"),
        (onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(2)), "a OrtValue"),
        (OnHost(None, (2, 0)), "on a GPU"),
    ],
)
def test_anything_else_is_refused_with_what_can_be_done(feeds: ProcessFeeds, value: Any, what: str) -> None:
    with pytest.raises(ProviderRequestError, match=f"input 'x' is {what}, and a pool with isolate=True") as caught:
        feeds.pass_through({"x": value})
    assert caught.value.requested == "isolate"
    assert "NumPy array of numbers" in str(caught.value.fixes[0])


@pytest.mark.parametrize("size", [4, LARGE // 8, LARGE])
def test_a_copy_is_the_callers_no_more(feeds: ProcessFeeds, size: int) -> None:
    array = np.arange(size, dtype=np.float64)
    copied, is_whole = feeds.copied({"x": array})
    assert is_whole
    array[:] = -1
    assert (copied["x"] == np.arange(size)).all()


def test_a_large_array_with_gaps_is_copied_too(feeds: ProcessFeeds) -> None:
    array = np.arange(LARGE // 4, dtype=np.float64)[::2]
    assert array.nbytes >= LARGE // 2
    wide = np.repeat(array, 3)[::3]
    assert np.array_equal(feeds.copy_of(wide), array)


def test_the_memory_of_a_large_copy_is_used_again(feeds: ProcessFeeds) -> None:
    array = np.zeros(LARGE)
    first = feeds.copy_of(array)
    address = first.__array_interface__["data"][0]
    del first
    assert feeds.copy_of(array).__array_interface__["data"][0] == address


def test_where_no_threads_can_be_had_the_caller_copies(feeds: ProcessFeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(feeds), "_threads", None)
    array = np.random.default_rng(0).random(LARGE)
    assert np.array_equal(feeds.copy_of(array), array)
