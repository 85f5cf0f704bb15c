"""Copies by threads of ONNX Runtime: each byte, and nothing else; and no thread is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import onnx.printer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.running import copying
from ortgpu.running.copying import Copier, ParallelCopy
from tests.support.cpu_session import child

GUARD = 7  # bytes before and behind, which must stay as they are


@pytest.fixture(scope="module", params=[1, 2, 5])
def copies(request: pytest.FixtureRequest) -> ParallelCopy:
    return ParallelCopy(request.param)


def check(copies: ParallelCopy, size: int, offset: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    source = random.integers(0, 256, size + offset, np.uint8)
    target = np.full(size + 2 * GUARD, 77, np.uint8)
    copies.copy(target.ctypes.data + GUARD, source.ctypes.data + offset, size)
    assert np.array_equal(target[GUARD : GUARD + size], source[offset:])
    assert set(target[:GUARD]) == set(target[GUARD + size :]) == {77}


@pytest.mark.parametrize("size", [0, 1, 63, 255, 256, 257, 1279, 1280, 1281, 4096, 1 << 20, (1 << 22) + 12345])
def test_each_byte_is_copied_and_no_other(copies: ParallelCopy, size: int) -> None:
    check(copies, size, 3, size)


@given(size=st.integers(0, 50_000), offset=st.integers(0, 64), seed=st.integers(0, 9))
def test_of_any_size_at_any_address(copies: ParallelCopy, size: int, offset: int, seed: int) -> None:
    check(copies, size, offset, seed)


@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 40])
def test_parts_are_copied_one_after_another(copies: ParallelCopy, count: int) -> None:
    """Also in the order of small and large, and with empty ones among them."""
    random = np.random.default_rng(count)
    for sizes in (random.integers(0, 3000, count), random.integers(0, 3, count) * 100_000, np.zeros(count, np.int64)):
        parts = [random.integers(0, 256, size, np.uint8) for size in sizes]
        target = np.full(int(sum(sizes)) + 2 * GUARD, 77, np.uint8)
        copies.join(target.ctypes.data + GUARD, [(part.ctypes.data, part.nbytes) for part in parts])
        assert np.array_equal(target[GUARD : len(target) - GUARD], np.concatenate([*parts, np.zeros(0, np.uint8)]))
        assert set(target[:GUARD]) == set(target[len(target) - GUARD :]) == {77}


def test_the_model_that_copies_is_the_one_that_its_comment_says() -> None:
    parts = ", ".join(copying._PARTS)
    text = f"""<ir_version: 8, opset_import: ["": 13]>
        join ({", ".join(f"uint8[?] {part}" for part in copying._PARTS)}) => (uint8[?] to)
        {{ to = Concat <axis = 0> ({parts}) }}"""
    written = onnx.load_from_string(copying._MODEL)
    assert onnx.printer.to_text(written) == onnx.printer.to_text(onnx.parser.parse_model(text))


def test_the_work_in_a_lent_stream_is_done_when_the_stream_comes_back() -> None:
    """Also after an error: the memory of its copies may be used again from then on."""
    waited: list[int] = []
    runtime: Any = SimpleNamespace(ordinal=0, synchronise=waited.append)
    stream: Any = SimpleNamespace(handle=5)
    copier = Copier(runtime, threads=1)
    copier._streams.append(stream)
    with copier.stream() as lent:
        assert (lent, waited, len(copier._streams)) == (5, [], 0)
    assert waited == [5]
    with pytest.raises(KeyError), copier.stream():
        raise KeyError
    assert waited == [5, 5]
    assert list(copier._streams) == [stream]


def test_threads_of_python_share_it() -> None:
    assert child("running.parallel_copy.threads_of_python_share_it") == []


def test_its_threads_end_with_it() -> None:
    there, one, other, again, after = child("running.parallel_copy.its_threads_end_with_it")
    assert [one - there, other - there, again - there, after - there] == [3, 6, 6, 0]


def test_it_is_none_of_the_sessions_of_the_process() -> None:
    assert child("running.parallel_copy.it_is_none_of_the_sessions_of_the_process") == [0, True]


def test_a_forked_child_ends_and_makes_its_own() -> None:
    assert child("running.parallel_copy.a_forked_child_ends_and_makes_its_own") == [0, True]


@pytest.mark.parametrize("room", [4, 12, 20, 36, 48, 64])
def test_where_there_is_room_for_a_part_of_the_threads_it_says_so(room: int) -> None:
    """MiB of address space; a thread takes as much as its stack. ONNX Runtime would wait for ever for those it made."""
    outcome, left = child("running.parallel_copy.where_there_is_room_for_a_part_of_the_threads_it_says_so", str(room))
    assert outcome in ("made", "RuntimeError")
    assert left == 0


def test_where_the_threads_cannot_be_started_the_calling_one_copies() -> None:
    assert child("running.parallel_copy.where_the_threads_cannot_be_started_the_calling_one_copies") == [
        True,
        True,
        [],
    ]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 4), (12, 12), (64, 12)])
def test_a_copy_has_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    """A container may give fewer cores than the machine has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 99)
    assert copying.copy_threads() == threads


@pytest.mark.parametrize("parts", [1, 2, 16, 17, 40])
def test_one_thread_copies_as_many_threads_do(parts: int) -> None:
    """It does so where the system gives no further thread."""
    sources = [np.full(number + 1, number, np.uint8) for number in range(parts)]
    expected = np.concatenate(sources)
    to = np.full(len(expected) + 2 * GUARD, 255, np.uint8)
    pairs = [(source.ctypes.data, source.nbytes) for source in sources]
    copying._OneThread()._join(to.ctypes.data + GUARD, pairs)
    np.testing.assert_array_equal(to[GUARD:-GUARD], expected)
    assert {*to[:GUARD], *to[-GUARD:]} == {255}
