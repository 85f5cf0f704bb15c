"""The buffers of a captured graph: what a caller gets is its own, and no buffer lies in another. No GPU, no child."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ortgpu.running.graph_buffers import Constant, Output, _pinned


def test_a_result_is_not_the_memory_of_the_next_run() -> None:
    output: Any = Output.__new__(Output)
    output._pinned = np.ones(2)
    output.result(output._pinned)[:] = 9
    constant = Constant(np.ones(2))
    constant.result(constant.begin([]))[:] = 9
    assert output._pinned.tolist() == constant.begin([]).tolist() == [1, 1]


def test_small_buffers_lie_apart() -> None:
    memory: Any = SimpleNamespace(try_empty=np.zeros)
    buffers = _pinned(memory, [((3,), np.dtype(np.float32)), ((5,), np.dtype(np.int64)), ((2,), np.dtype(np.float32))])
    for number, buffer in enumerate(buffers):
        assert buffer is not None
        buffer[:] = number
    assert [None if buffer is None else set(buffer.tolist()) for buffer in buffers] == [{0}, {1}, {2}]
