"""Inputs of several shapes: the results are those of plain ONNX Runtime, and a change of shape costs no plan."""

from __future__ import annotations

import pytest

from .children import Report, run_program
from .shaping import SIZES

pytestmark = pytest.mark.ortgpu


@pytest.fixture(scope="module")
def shapes() -> Report:
    return run_program("several_shapes", deadline=180)


@pytest.mark.parametrize("way", ["without plans", "run", "run_on_device"])
def test_results_are_equal_to_the_last_bit(shapes: Report, way: str) -> None:
    assert shapes[way] == [True] * len(SIZES)


def test_map_and_threads_are_right(shapes: Report) -> None:
    assert shapes["map"] is True
    assert shapes["threads"] == [800, True]


def test_each_shape_is_kept_and_a_change_costs_no_plan(shapes: Report) -> None:
    """A plan takes 44 ms a run there on an H200, and the run itself 0.7 ms: any release without plans is far off."""
    assert shapes["warm"] == [len(SIZES), None]
    changed, in_turn = shapes["times"]
    assert in_turn < changed / 4


def test_trim_gives_the_plans_back(shapes: Report) -> None:
    assert shapes["plans"] > 0
    assert shapes["trimmed"] == [0, True]


def test_lanes_refuse_after_a_sticky_error_and_the_process_ends() -> None:
    found = run_program("shapes_poisoned", deadline=180)
    assert found["lanes"] > 1
    for name in ("poison", "run_on_device", *(f"run {number}" for number in range(len(SIZES)))):
        assert found.error(name).type == "PoisonedContextError", name
    assert "error" not in found["close"]
    assert found.child.returncode == 0, found.child.output


def test_a_forked_child_is_told_and_the_lanes_of_the_parent_go_on() -> None:
    found = run_program("shapes_forked", deadline=180)
    assert found["lanes"] > 1
    assert found.error("run").type == "ForkedSessionError"
    assert found["run: status"] == found["close: status"] == 0
    assert len(found.returned("parent")) == len(SIZES)
    assert found.child.returncode == 0, found.child.output


def test_channels_last_sessions_have_plans_too() -> None:
    """Without plans a tuned session was slower with several shapes than an untuned one."""
    found = run_program("channels_last", deadline=180)
    for name in ("biases", "fused biases", "no biases"):
        assert found[name] == [len(SIZES), None, True, True]
