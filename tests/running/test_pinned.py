"""Pinned memory: what is counted, used again and given back, against a stub CUDA runtime; and without any."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from ortgpu.running.pinned import PinnedMemory
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child


@pytest.fixture
def with_stub(stubs: Stubs) -> Any:
    """Code in a child, which finds the stub runtime as ``runtime`` and what it counts in ``stub``."""
    return lambda program: child(program, str(stubs.cudart), behind="running.pinned")


def test_an_array_is_pinned_and_its_memory_used_again(with_stub: Any) -> None:
    found = with_stub("running.pinned.an_array_is_pinned_and_its_memory_used_again")
    assert found == [[True, False], 1 << 20, 0, True, True, 1, True]


def test_types_with_a_shape_or_fields_are_those_of_numpy(with_stub: Any) -> None:
    found = with_stub("running.pinned.types_with_a_shape_or_fields_are_those_of_numpy")
    assert found == [[[True] * 3] * 18, True, True]


def test_an_interrupt_while_memory_is_pinned_leaves_it_for_the_next(with_stub: Any) -> None:
    """It is raised when the call has returned, which may take a tenth of a second."""
    found = with_stub("running.pinned.an_interrupt_while_memory_is_pinned_leaves_it_for_the_next")
    assert found == [[1 << 20, 1 << 20, 0], True, 1, 0]


def test_an_interrupt_anywhere_loses_no_memory(with_stub: Any) -> None:
    """At each call that is made for an array, from the first to the end of the array, and at the end of each call of C:
    where the interpreter looks whether there was a signal. New memory, memory that is used again, and memory for which
    other is freed; not while that is freed."""
    found = with_stub("running.pinned.an_interrupt_anywhere_loses_no_memory")
    assert found == [[], True, True]


def test_the_limit_counts_what_is_used_and_what_is_kept(with_stub: Any) -> None:
    found = with_stub("running.pinned.the_limit_counts_what_is_used_and_what_is_kept")
    assert found[:4] == [[True, False], 3 << 20, True, 2 << 20]
    assert "the limit is 4194304, of which 1048576 are free" in found[4][0]


def test_closing_gives_back_what_is_kept_and_later_what_is_used(with_stub: Any) -> None:
    found = with_stub("running.pinned.closing_gives_back_what_is_kept_and_later_what_is_used")
    assert found == [2 << 20, True, False, 0, 0]


def test_a_session_that_is_dropped_gives_it_back(with_stub: Any) -> None:
    found = with_stub("running.pinned.a_session_that_is_dropped_gives_it_back")
    assert found == [1 << 20, 0]


def test_a_session_that_is_constructed_again_gives_it_back(with_stub: Any) -> None:
    """As set_providers of a guarded one does: it was kept until the session ended, beside that of each other time."""
    found = with_stub("running.pinned.a_session_that_is_constructed_again_gives_it_back")
    assert found == [3 << 20, 2 << 20]


def test_a_session_that_cannot_be_opened_again_keeps_it(with_stub: Any) -> None:
    found = with_stub("running.pinned.a_session_that_cannot_be_opened_again_keeps_it")
    assert found == [True, True, 1 << 20, 1 << 20]


def test_what_cannot_be_pinned_is_ordinary_memory_and_leaves_no_error_behind(with_stub: Any) -> None:
    found = with_stub("running.pinned.what_cannot_be_pinned_is_ordinary_memory_and_leaves_no_error_behind")
    assert found == [False, 15, 0, True]


def test_shapes_and_types(with_stub: Any) -> None:
    found = with_stub("running.pinned.shapes_and_types")
    assert found[0] == [[0], [], [2, 0, 3], [5], [1, 2, 3], [4], [3]]
    assert found[1] == ["<f4", "<f8", "|i1", "<f2", "<c8", "<U3", "<f4"]
    assert found[2]["type"] == "TypeError"
    assert found[3]["type"] == "ValueError"


def test_shapes_as_numpy_takes_them(with_stub: Any) -> None:
    found = with_stub("running.pinned.shapes_as_numpy_takes_them")
    returned = [[each.get("returned") for each in both] for both in found]
    assert [ours for ours, _ in returned] == [numpys for _, numpys in returned]
    assert [ours.get("type") for ours, _ in found[5:]] == [numpys.get("type") for _, numpys in found[5:]]


def test_a_map_stages_large_arrays_in_few_blocks_and_gives_the_results_of_run(with_stub: Any) -> None:
    found = with_stub("running.pinned.a_map_stages_large_arrays_in_few_blocks_and_gives_the_results_of_run")
    assert found[:2] == [True, 30]
    assert 1 <= found[2] <= 5  # one a thread, and that of the caller
    assert found[3:] == [0, 0]


def test_a_result_is_not_the_memory_of_its_feed(with_stub: Any) -> None:
    """Staging buffers are used again: a model that hands its input through must not hand out such a buffer."""
    found = with_stub("running.pinned.a_result_is_not_the_memory_of_its_feed")
    assert found == [True] * 30


def test_an_array_that_copies_in_its_own_way_is_taken_as_it_is(with_stub: Any) -> None:
    """As astropy's, which converts units when it is copied into another: plain ``run`` reads its memory."""
    found = with_stub("running.pinned.an_array_that_copies_in_its_own_way_is_taken_as_it_is")
    assert found == [True, 1]


def test_a_map_beyond_the_limit_works_without(with_stub: Any) -> None:
    found = with_stub("running.pinned.a_map_beyond_the_limit_works_without")
    assert found == [[-n for n in range(9)], 0]


def test_a_map_that_is_ended_early_holds_no_pinned_memory(with_stub: Any) -> None:
    found = with_stub("running.pinned.a_map_that_is_ended_early_holds_no_pinned_memory")
    assert found == [0, []]


def test_memory_that_was_lost_keeps_no_ordinary_memory_for_results(with_stub: Any) -> None:
    found = with_stub("running.pinned.memory_that_was_lost_keeps_no_ordinary_memory_for_results")
    assert found == [2 << 20, True, False]


def test_any_order_of_taking_and_giving_back(with_stub: Any) -> None:
    """Never more than the limit; what arrays use is intact, and none of it is another's; at the end nothing is left."""
    found = with_stub("running.pinned.any_order_of_taking_and_giving_back")
    assert found == 0


def test_the_current_device_is_that_of_the_session_while_memory_is_taken(with_stub: Any) -> None:
    """A thread's device is left as it was, but for one without a context: to set that would make one there."""
    found = with_stub("running.pinned.the_current_device_is_that_of_the_session_while_memory_is_taken")
    assert found == [0, 1]


def test_a_forked_child_frees_nothing_and_pins_nothing(with_stub: Any) -> None:
    """Nor does an array that outlives the session: in the parent its end frees memory."""
    found = with_stub("running.pinned.a_forked_child_frees_nothing_and_pins_nothing")
    assert found == [[False, 3 << 20], 3 << 20]


class Runtime:
    """A CUDA runtime of which all memory is pinned. It notes what it frees."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self._memory: list[Any] = []

    def is_pinned(self, address: int) -> bool:
        return True

    def allocate_pinned(self, size: int, address: ctypes.c_void_p) -> None:
        self._memory.append(ctypes.create_string_buffer(size))
        address.value = ctypes.addressof(self._memory[-1])

    def free_pinned(self, address: int) -> None:
        self.freed.append(address)


def test_the_gpu_cannot_copy_from_an_array_with_gaps() -> None:
    runtime: Any = Runtime()
    memory, array = PinnedMemory(runtime, 1 << 20), np.zeros((4, 4), np.float32)
    assert memory.is_pinned(array)
    assert not memory.is_pinned(array[:, ::2])
    assert not memory.is_pinned(array.T)


@pytest.mark.parametrize("is_lost", [False, True])
def test_memory_that_was_lost_is_never_freed(is_lost: bool) -> None:
    """Its addresses may be somebody else's by then."""
    runtime: Any = Runtime()
    memory = PinnedMemory(runtime, 1 << 20)
    used, _ = memory.empty(100, np.uint8), memory.empty(100, np.uint8)
    del _
    if is_lost:
        memory.abandon()
    memory.close()
    del used
    assert len(runtime.freed) == (0 if is_lost else 2)


def test_threads_share_it(with_stub: Any) -> None:
    found = with_stub("running.pinned.threads_share_it")
    assert found == [[], True, 0, 0]


def test_the_real_runtime_without_a_gpu_pins_nothing_and_says_why() -> None:
    found = child("running.unpinned.the_real_runtime_without_a_gpu_pins_nothing_and_says_why")
    if found is None:
        pytest.skip("no library of the CUDA runtime is installed")
    staged, pinned, message = found
    assert staged
    assert pinned == 0
    assert "bytes cannot be pinned: CUDA failure " in message


def test_on_the_cpu_it_is_ordinary_memory_with_a_debug_message() -> None:
    found = child("running.unpinned.on_the_cpu_it_is_ordinary_memory_with_a_debug_message")
    assert found == [[2, 3], "<f8", 0, "nothing is pinned for a session on cpu"]


def test_the_limit_is_an_argument_and_travels() -> None:
    found = child("running.unpinned.the_limit_is_an_argument_and_travels")
    assert found[0] == 5 << 20
    assert found[1]["type"] == "ValueError"
    assert found[2:] == ["ValueError", "TypeError", 2 << 30]
