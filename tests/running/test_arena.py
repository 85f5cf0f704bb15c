"""How much the arena of a session holds, and how it is shrunk: what ONNX Runtime is asked, and how it answers.

The real arena: test_memory.py.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.provider.devices import CPU, Device
from ortgpu.running import arena
from ortgpu.running.arena import reserved_bytes, shrink

GPU = Device("cuda", 1, None, None, None, None, None)
MIB = 1 << 20


class Inner:
    """Stands for the C++ session: it has 10 MiB in use, and says so as bfc_arena.cc does."""

    session_options: Any = None
    outputs_meta = (SimpleNamespace(name="y"), SimpleNamespace(name="z"))

    def __init__(self, left: int | None, words: str = "the run was terminated: terminate flag") -> None:
        self.left, self.words = left, words
        self.asked: list[Any] = []
        self.ran: list[Any] = []

    def create_ortvalue_from_shape_and_type(self, shape: Any, kind: Any, place: Any) -> Any:
        assert kind is np.float64
        self.asked.append((shape[0] * 8, place.device_type(), place.device_id()))
        if shape == [1]:
            return object()
        if self.left is None:
            raise RuntimeError("another error")
        text = f"bfc_arena.cc Available memory of {self.left} is smaller than requested bytes of {shape[0] * 8}"
        raise RuntimeError(text)

    def run(self, names: Any, feed: Any, options: Any) -> None:
        self.ran.append((names, feed, options))
        raise RuntimeError(self.words)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session on the second GPU, whose arena may hold 64 MiB and has 54 left."""
    made = SimpleNamespace(_sess=Inner(54 * MIB), device=GPU, options={"gpu_mem_limit": str(64 * MIB)}, shared="0")
    monkeypatch.setattr(arena, "device_of", lambda each: each.device)
    monkeypatch.setattr(arena, "_options_of", lambda each: each.options)
    monkeypatch.setattr(arena, "config_entry", lambda options, key: made.shared)
    return made


def test_a_session_that_another_thread_opens_again_has_no_arena_now(session: Any) -> None:
    """ONNX Runtime's constructor sets it to None. A run that is out of memory meanwhile measures and shrinks."""
    session._sess = None
    assert reserved_bytes(session) is None
    shrink(session)


def test_what_is_held_is_the_limit_without_what_is_left(session: Any) -> None:
    assert reserved_bytes(session) == 10 * MIB
    (first, *place), (asked, *_) = session._sess.asked
    assert first == 8, "an empty arena would look for ever for a size that fits"
    assert asked > 64 * MIB
    assert asked - 64 * MIB <= 256
    assert place[1] == 1


def test_a_limit_between_the_sizes_of_the_arena_is_rounded_down(session: Any) -> None:
    session.options = {"gpu_mem_limit": str(64 * MIB + 255)}
    assert reserved_bytes(session) == 10 * MIB


def test_without_a_limit_the_largest_request_that_there_is_is_made(session: Any) -> None:
    session.options = {"gpu_mem_limit": str((1 << 64) - 1)}
    usable = ((1 << 64) - 1) // 256 * 256
    session._sess.left = usable - 5 * MIB
    assert reserved_bytes(session) == 5 * MIB
    assert session._sess.asked[-1][0] < 1 << 64


def test_on_the_cpu_there_is_no_limit(session: Any) -> None:
    session.device, session.options = CPU, {}
    session._sess.left = ((1 << 64) - 1) // 256 * 256 - MIB
    assert reserved_bytes(session) == MIB


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpu_mem_limit": "x"},
        {"gpu_mem_limit": "1", "gpu_external_alloc": "7"},
        {"gpu_mem_limit": "1", "gpu_external_free": "7"},
    ],
)
def test_without_an_arena_of_its_own_nothing_is_known(session: Any, options: dict[str, str]) -> None:
    session.options = options
    assert reserved_bytes(session) is None
    assert session._sess.asked == []


def test_an_arena_that_sessions_share_is_none_of_its_own(session: Any) -> None:
    session.shared = "1"
    assert reserved_bytes(session) is None


def test_an_older_release_and_another_error_tell_nothing(session: Any) -> None:
    session._sess.left = None
    assert reserved_bytes(session) is None
    session._sess = SimpleNamespace(session_options=None)
    assert reserved_bytes(session) is None


def test_a_session_with_graphs_is_asked_behind_them(session: Any) -> None:
    inner = session._sess
    session._sess = SimpleNamespace(_inner=inner)
    assert reserved_bytes(session) == 10 * MIB


@pytest.mark.parametrize(("device", "place"), [(GPU, "gpu:1"), (CPU, "cpu:0")])
def test_an_arena_is_shrunk_by_a_run_that_is_terminated(session: Any, device: Device, place: str) -> None:
    session.device = device
    shrink(session)
    ((names, feed, options),) = session._sess.ran
    assert (names, feed) == (["y", "z"], {})
    assert options.terminate
    assert options.log_severity_level == 4
    assert options.get_run_config_entry("memory.enable_memory_arena_shrinkage") == place


def test_a_run_that_fails_otherwise_is_logged(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    session._sess.words = "no such output"
    with caplog.at_level(logging.DEBUG, "ortgpu"):
        shrink(session)
    assert caplog.messages == ["the arena of a session was not shrunk: no such output"]


@pytest.mark.parametrize(
    ("options", "captures", "shrinks"),
    [
        ({"enable_cuda_graph": "0"}, {1: 2}, True),
        ({"enable_cuda_graph": "1"}, {}, True),
        ({"enable_cuda_graph": "1"}, {1: 2}, False),
        ({"enable_cuda_graph": "1"}, None, False),
    ],
)
def test_the_addresses_of_captured_graphs_are_not_given_back(
    session: Any, options: dict[str, str], captures: Any, shrinks: bool
) -> None:
    session.options = options
    if captures is not None:
        session._sess.captures = captures
    shrink(session)
    assert bool(session._sess.ran) is shrinks
