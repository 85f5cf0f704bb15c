"""When plans for several shapes are worth it: which shapes come back, and how slow their runs are."""

from __future__ import annotations

import dataclasses

import pytest

from ortgpu.running.shape_returns import PATIENCE, Policy, Replanning, Returns, median


def test_the_policy_of_a_session() -> None:
    assert dataclasses.asdict(Policy()) == {
        "most": 8, "returns": 3, "slow": 0.5, "worth": 0.9, "judged": 8, "window": 60, "waits": 4, "waited": 2.0,
        "lanes": 8,
    }  # fmt: skip
    assert PATIENCE == 4


def test_slow_returns_add_up_to_a_reason() -> None:
    returns = Returns(Policy(returns=2))
    assert [returns.note((shape,), 1.0) for shape in (1, 2, 1)] == [False, False, True]
    assert not returns.suffice
    assert returns.note((2,), 0.5), "a half of the shortest first run is slow"
    assert returns.suffice
    assert returns.slow == {(1,): 1.0, (2,): 0.5}


def test_quick_returns_take_the_reason_back() -> None:
    returns = Returns(Policy(returns=1))
    for shape in (1, 2, 1):
        returns.note((shape,), 1.0)
    assert returns.suffice
    assert not returns.note((2,), 0.49)
    assert not returns.suffice
    assert (2,) not in returns.slow


def test_a_shape_that_comes_back_too_late_is_no_reason() -> None:
    """Its plans would have gone by then."""
    returns = Returns(Policy(most=2, returns=1))
    for shape in (1, 2, 3, 1):
        returns.note((shape,), 1.0)
    assert not returns.suffice
    assert returns.slow == {}
    returns.note((3,), 1.0)
    assert returns.suffice


def test_shapes_that_never_come_back_let_the_reason_fade() -> None:
    returns = Returns(Policy(most=4, returns=1))
    for shape in (1, 2, 1):
        returns.note((shape,), 1.0)
    assert returns.suffice
    returns.note((3,), 1.0)
    assert not returns.suffice


def test_only_so_many_shapes_are_remembered() -> None:
    returns = Returns(Policy(most=100))
    returns.note((0,), 1.0)
    returns.note((1,), 1.0)
    returns.note((0,), 1.0)
    assert (0,) in returns.slow
    for shape in range(100, 164):
        returns.note((shape,), 1.0)
    assert returns.slow == {}
    assert not returns.note((1,), 1.0), "it is new again"


def test_most_changes_that_plan_again_are_warned_of_once() -> None:
    replanning = Replanning(window=3)
    assert [replanning.note(seconds, planned=planned) for seconds, planned in ((0.02, True), (0.03, True))] == [
        False
    ] * 2
    assert replanning.note(0.001, planned=False)
    assert str(replanning) == (
        "2 of the last 3 changes of shape planned the convolutions again, 30 ms instead of 1 a run"
    )
    assert not any(replanning.note(0.02, planned=True) for _ in range(9))


def test_a_window_in_which_most_were_quick_begins_anew() -> None:
    replanning = Replanning(window=2)
    assert not replanning.note(0.02, planned=True)
    assert not replanning.note(0.001, planned=False), "not more than half"
    assert not replanning.note(0.02, planned=True)
    assert replanning.note(0.02, planned=True)


def test_without_a_quick_run_there_is_nothing_to_compare_with() -> None:
    replanning = Replanning(window=1)
    assert replanning.note(0.02, planned=True)
    assert str(replanning).endswith("20 ms a run")


@pytest.mark.parametrize(("values", "middle"), [([1.0], 1), ([3.0, 1.0], 3), ([3.0, 1.0, 2.0], 2)])
def test_the_median_is_one_of_the_values(values: list[float], middle: float) -> None:
    assert median(values) == middle
