"""The memory of runs that are staged: what is kept, used again and given back. See staged_sessions.py."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.lab


def test_large_results_are_in_memory_that_is_used_again(staged_child: Any) -> None:
    found = staged_child("running.staging_memory.large_results_are_in_memory_that_is_used_again")
    assert found == [1, 1, 0, 7 << 16, 20]  # what is pinned for the input is used again for the output


def test_a_result_is_never_another_s_while_it_or_a_view_of_it_lives(staged_child: Any) -> None:
    """In memory that is used again, and beyond its limit."""
    found = staged_child("running.staging_memory.a_result_is_never_another_s_while_it_or_a_view_of_it_lives")
    assert found == [True, True]


def test_results_that_are_kept_are_beyond_the_limit_in_memory_of_their_own(staged_child: Any) -> None:
    found = staged_child("running.staging_memory.results_that_are_kept_are_beyond_the_limit_in_memory_of_their_own")
    assert found == [4 << 20, True, 0, 4 << 20, 1 << 19, True]


def test_out_of_pinned_memory_copies_the_ordinary_way(staged_child: Any) -> None:
    found = staged_child("running.staging_memory.out_of_pinned_memory_copies_the_ordinary_way")
    assert found == [-3, -4, False, [True, True]]


def test_closed_it_says_so_and_results_live_on(staged_child: Any) -> None:
    found = staged_child("running.staging_memory.closed_it_says_so_and_results_live_on")
    assert found == ["ExecutionError", -3, [0, 0, 0]]


def test_dropped_without_closing_only_what_results_use_stays(staged_child: Any) -> None:
    found = staged_child("running.staging_memory.dropped_without_closing_only_what_results_use_stays")
    # The last result was beyond the limit, in memory of its own.
    assert found == [3 << 19, [1 << 20, 1 << 19, [0, -4]], 0, 0, 0]


def test_a_forked_child_keeps_its_results_refuses_and_frees_nothing(staged_child: Any) -> None:
    found = staged_child("running.staging_memory.a_forked_child_keeps_its_results_refuses_and_frees_nothing")
    assert found == [["ForkedSessionError", True, True], -4, True]


@pytest.mark.parametrize("can_be_pinned", [True, False])
def test_results_are_written_into_shared_memory_where_there_is_some(staged_child: Any, can_be_pinned: bool) -> None:
    """As in a worker process of a pool: its feed lies in shared memory, and its results are to."""
    found = staged_child(
        "running.staging_memory.results_are_written_into_shared_memory_where_there_is_some", str(can_be_pinned)
    )
    right, pinned, allocations, left, error, ran = found
    assert right == [True] * 4
    # The first result comes before there is shared memory for it.
    assert pinned == [[can_be_pinned, can_be_pinned and number > 0] for number in range(4)]
    assert allocations == 1  # for the first result; what is not pinned uses that too
    assert (left, error) == (0, 0)
    assert ran == [True] * 4
