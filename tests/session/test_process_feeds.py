"""Feeds for the processes of a pool: arrays of numbers on the host, copied while the caller waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortgpu.errors import PoisonedContextError, ProviderRequestError
from ortgpu.model.files import stamp_of
from ortgpu.process import parent
from ortgpu.process.channel import PickledError
from ortgpu.session.pool import worker_process
from ortgpu.session.pool.isolated import ProcessFeeds, ProcessWorker
from tests.support.made_sessions import L4

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


# The words about a process that was lost, and what a process does that lost its GPU


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("SIGKILL", "look for the OOM killer"),
        ("SIGSEGV", "run the same feeds in a GPUSession"),
        ("it ended with 3", "run"),
    ],
)
def test_who_kills_a_process_is_looked_for_where_it_is_written(cause: str, advice: str) -> None:
    worker = ProcessWorker.__new__(ProcessWorker)
    worker.number, worker._device = 2, L4
    child = SimpleNamespace(process=SimpleNamespace(pid=77))
    lost: Any = SimpleNamespace(cause=lambda: cause, child=child)
    error = worker._lost(lost)
    assert error.summary == f"worker 2 on {L4}, process 77, was lost: {cause}"
    assert [fix.startswith(advice) for fix in error.fixes] == [True]
    assert (error.worker, error.device, error.cause) == (2, str(L4), cause)


class Failing:
    """A session in a worker process whose runs fail."""

    device = L4
    _pinned_memory_limit = 0
    _gpu_runner = SimpleNamespace(own=None)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, names: Any, feed: Any) -> Any:
        raise self.error

    def warm(self, feeds: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "ends"),
    [(PoisonedContextError("an illegal memory access", cuda_code=700), True), (ValueError("a wrong feed"), False)],
    ids=["the GPU is lost", "the feed is wrong"],
)
@pytest.mark.parametrize("names", [None, worker_process.WARM], ids=["run", "warm"])
def test_a_process_ends_with_its_gpu_and_with_nothing_else(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ends: bool, names: Any
) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(parent, "end", ended.append)
    answer, outputs = worker_process._Serving(Failing(error))._answer((names, [[]]), [])  # type: ignore[arg-type]  # as much as is used
    assert ended == ([error] if ends else [])
    assert isinstance(answer, PickledError)
    assert (type(answer.error()), outputs) == (type(error), [])


@pytest.mark.skipif(sys.platform != "linux", reason="a pool with processes works on Linux only")
@pytest.mark.parametrize("replaced", ["never", "before", "meanwhile"])
def test_a_new_process_serves_the_model_that_the_pool_has_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: str
) -> None:
    """Another model takes its path before the session opens, or while it does."""
    path, opened = tmp_path / "model.onnx", list[Any]()
    path.write_bytes(b"the pool's")
    descriptor = os.open(path, os.O_RDONLY)
    files = [(path.name, stamp_of(descriptor))]

    def replace() -> None:
        (tmp_path / "new").write_bytes(b"another one")
        (tmp_path / "new").replace(path)

    class Session(Failing):
        def __init__(self, model: str, *, device: Any) -> None:
            if replaced == "meanwhile" and not opened:
                replace()
            self.content, self.is_closed = Path(model).read_bytes(), False
            opened.append(self)

        def close(self) -> None:
            self.is_closed = True

        def get_inputs(self) -> list[Any]:
            return []

        get_outputs = get_inputs

    monkeypatch.setattr(parent, "descriptors", [descriptor])
    monkeypatch.setattr(worker_process, "choose_devices", lambda devices: [L4.ordinal])
    if replaced == "before":
        replace()
    try:
        worker_process.serve(str(path), files, 0, lambda: Session, None, 0, {})
    finally:
        os.close(descriptor)
    assert [session.content for session in opened if not session.is_closed] == [b"the pool's"]
    assert len(opened) == (2 if replaced == "meanwhile" else 1)
