"""GPUSessionPool.map: in order, with so many feeds ahead and no more, and without leftovers."""

from __future__ import annotations

from tests.support.pool_child import child


def test_map_takes_no_more_feeds_than_allowed() -> None:
    found = child("session.pool_map.map_takes_no_more_feeds_than_allowed")
    assert found["ahead"] == [3] * 47 + [2, 1, 0]
    assert found["ahead by itself"] == 11
    assert found["not asked"] == []
    assert found["empty"] == []
    assert found["named"] == [[4]]
    assert [each["type"] for each in found["bad"]] == ["ValueError", "TypeError"]


def test_map_raises_at_the_place() -> None:
    found = child("session.pool_map.map_raises_at_the_place")
    assert found["request"] == [[0, 1, 2, 3, 4], "InvalidArgument", 0, [0, 0]]
    assert found["feeds"] == [[0, 1, 2, 3, 4], "ZeroDivisionError", 0, [0, 0]]
    assert found["after"] == 1


def test_map_that_is_left_early_leaves_nothing_running() -> None:
    found = child("session.pool_map.map_that_is_left_early_leaves_nothing_running")
    assert found["first"] == 0
    assert found["left"] == [0, 0, True]
    assert found["after"] == 1


def test_an_interrupt_while_it_waits_for_a_result_leaves_nothing_running() -> None:
    """The run whose result is waited for reads the caller's arrays, as those after it do."""
    found = child("session.pool_map.an_interrupt_while_it_waits_for_a_result_leaves_nothing_running")
    assert found["left"] == ["KeyboardInterrupt", 0, 0, 1, "ended"]
    assert found["after"] == 1
