"""GPU memory that runs out: the next run of the same shape is right, and a budget is kept."""

from __future__ import annotations

import pytest

from .budgets import KINDS, MIB, WAYS
from .children import Report, run_program

pytestmark = pytest.mark.ortgpu


@pytest.fixture(scope="module")
def repeated() -> Report:
    return run_program("after_out_of_memory", deadline=180)


@pytest.mark.parametrize("case", [*WAYS, *KINDS])
def test_the_next_run_of_the_same_shape_is_right(repeated: Report, case: str) -> None:
    """Plain ONNX Runtime up to 1.31 uses the plan of an earlier shape, and its result is wrong."""
    assert repeated[case] == "right"


def test_runs_of_random_shapes_within_a_budget_are_right_or_out_of_memory() -> None:
    runs = run_program("random_shapes", deadline=180)
    outcomes = runs["outcomes"]
    assert outcomes["wrong"] == 0
    assert outcomes["right"] > 0
    assert outcomes["out of memory"] > 0
    assert runs["above"] <= 64 * MIB


def test_plans_for_further_shapes_count_in_a_budget_and_go_first() -> None:
    runs = run_program("plans_within_a_budget", deadline=180)
    assert runs["kept"] == [8, None]
    assert all(runs["right"])
    assert runs["plans"] > 0
    assert runs["large"] is True
    assert runs["given back"] == 0
    assert runs["above"] <= 64 * MIB
    assert runs["then"][0] is True


def test_graphs_count_in_a_budget_and_a_large_run_gets_their_part() -> None:
    runs = run_program("graphs_within_a_budget", deadline=180)
    assert all(runs["right"])
    assert runs["captures"] > 0
    assert runs["graphs"] > 0
    assert runs["large"] == [[True] * 3, [1, 0, 0]]
    assert max(runs["above"], runs["above with a large run"]) <= 64 * MIB


@pytest.mark.parametrize("isolate", [False, True])
def test_the_sessions_of_a_pool_share_a_budget(isolate: bool) -> None:
    runs = run_program("pool_within_a_budget", {"isolate": isolate}, deadline=180)
    outcomes = runs["outcomes"]
    assert outcomes["wrong"] == 0
    assert outcomes["right"] >= 16
    assert outcomes["out of memory"] == 4, "those of 400 MiB in and out"
    assert runs["then"] is True
    assert runs["above"] <= 64 * MIB
