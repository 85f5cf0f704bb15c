"""Sessions that keep plans for several shapes, with the CPU provider in the GPU's place: see programs/shaped.py."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import GPUOutOfMemoryError
from ortgpu.running.plain_runs import PlainRunner
from ortgpu.running.shape_returns import Policy, Replanning, Returns
from ortgpu.running.shaped_runs import ShapedRunner
from tests.support.children import child_environment
from tests.support.fork_server import fork_python

NONE: list[Any] = []
FORMS = (
    "subgraphs that read values from outside", "a loop", "a local function", "several outputs, one of them an input",
    "an output that is an initializer", "an optional input that is left out",
    "an output whose shape the values decide", "a sequence", "strings", "an initializer that is an input",
    "initializers that have to be inputs", "names like those of branches",
)  # fmt: skip


@functools.cache
def program(*arguments: str, deadline: float = 100) -> Any:
    """Run a program of shaped.py and return what it reported, by name."""
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1"})
    return fork_python(["-m", "tests.programs.shaped", *arguments], env=env, deadline=deadline).ok().reports


@pytest.fixture(scope="module")
def forms() -> Any:
    return program("run_forms")


@pytest.mark.parametrize("form", FORMS)
def test_plans_of_each_form_of_model_give_the_results_of_the_session(forms: Any, form: str) -> None:
    same, has_plans, why_none, kept = forms[form]
    assert [same, has_plans, why_none] == [True, True, None]
    assert kept >= 3


def test_plans_of_networks_give_the_results_of_the_session() -> None:
    found = program("run_kinds", "perceptron", "recurrent", "shuffle")
    assert found == {kind: [True, True, None, 2] for kind in ("perceptron", "recurrent", "shuffle")}


@pytest.mark.slow
def test_plans_of_large_networks_give_the_results_of_the_session() -> None:
    kinds = ("squeeze-excite", "vision-transformer", "unet", "dense", "grouped", "enlarging")
    assert program("run_kinds", *kinds, deadline=600) == {kind: [True, True, None, 2] for kind in kinds}


def test_weights_in_another_file() -> None:
    found = program("external_data")
    assert found["kept"] == [True, True, None, 4]
    assert found["removed"] == [True, False, True]


def test_a_model_whose_file_was_replaced_has_no_plans() -> None:
    """Also if that cannot be told from the file: the first results of the plans are compared."""
    found = program("changed_file")
    assert found["noticed"][:2] == found["unnoticed"][:2] == [True, False]
    assert "has changed" in found["noticed"][2]
    assert "differ" in found["unnoticed"][2]


def test_one_shape_and_shapes_that_never_come_back_make_nothing() -> None:
    found = program("one_shape")
    assert found["one"] == [[False, None, 0], True, []]
    assert found["new ones"] == [[False, None, 0], True]


def test_the_shape_that_was_used_least_recently_goes() -> None:
    before, after = program("many_shapes")["kept"]
    assert before == [[1, 1, height, 6] for height in (8, 9, 10, 11)]
    assert after == [[1, 1, 10, 6], [1, 1, 11, 6], [1, 1, 8, 6], [2, 1, 8, 6]]


def test_more_shapes_than_are_kept_warn_once() -> None:
    same, count, text, file = program("many_shapes")["warned"]
    assert [same, count, file] == [True, 1, "shaped.py"]
    assert "of the last 12 changes of shape planned the convolutions again" in text
    assert "has plans for 4 shapes, and its inputs have more" in text


def test_bindings_of_several_shapes_warn_once() -> None:
    found = program("bindings")
    for way in ("array", "value", "address"):
        (text,) = found[way]
        assert text.startswith("shaped.py: ")
        assert "of the last 12 changes of shape planned the convolutions again" in text
        assert "runs with an IOBinding keep the plan of one shape" in text
    assert found["one shape"] == found["quick"] == found["run_on_device"] == NONE


def test_plans_that_gain_nothing_are_given_up_or_never_made() -> None:
    """A release of ONNX Runtime may keep plans by itself."""
    found = program("no_gain")
    assert found["gain"] == [False, "they are no faster than the session itself", 0]
    assert found["quick"] == [[False, None, 0], True]


def test_a_session_goes_on_without_plans_that_cannot_be_made_or_fail() -> None:
    found = program("failures")
    assert found["not made"] == [True, False, "MemoryError: no room", 0, NONE]
    same, has_plans, why_none, kept, threads = found["broken"]
    assert [same, has_plans, kept, threads] == [True, False, 0, NONE]
    assert "a run with them failed" in why_none


def test_wrong_feeds_raise_as_ever_and_cost_no_plan() -> None:
    errors, is_unchanged, *state = program("failures")["wrong feeds"]
    assert errors == ["InvalidArgument", "InvalidArgument", "ValueError"]
    assert [is_unchanged, *state] == [True, True, None, 4]


def test_every_way_to_run_uses_the_plans() -> None:
    found = program("ways")
    assert found["run"] == found["names"] == found["values"] == found["mapping"] == [True] * 4
    assert found["map"] is found["run_on_device"] is found["options"] is True
    assert found["kept"] == [True, None, 4]
    assert found["threads"] == [400, True, True, None, 4]


def test_runs_that_take_turns_use_the_plans() -> None:
    """A turn lasts for a whole run, and is no lock that a further lane could wait for."""
    assert program("turns") == {"kept": [True, None, 4], "map": 16}


def test_lanes_serve_shapes_that_several_threads_run() -> None:
    found = program("busy")
    assert found["one thread"] == [1, [1, 1, 1, 1]]
    assert found["threads"] == [True, True, 3, [3, 3, 3, 3], True, None, 4]
    assert found["preferred"] == 3
    assert found["wrong feed"] == ["InvalidArgument", 4]
    assert found["other shapes"] == [True, [[32 + size, 20] for size in range(4)], [1, 1, 1, 1]]
    assert found["closed"] == [[True] * 3, []]


def test_shapes_go_on_in_one_lane_where_others_fail() -> None:
    expected = [True, 1, 1, NONE, True, True, None]
    assert program("lanes_that_fail") == {"not opened": expected, "other results": expected}


def test_a_run_that_fails_in_a_further_lane_is_made_in_the_first() -> None:
    """Shapes whose first places the lanes share: the further lane comes first for this one."""
    found = program("lanes_without_room")
    assert found["planned"] == [True, False]
    assert found["wrong feed"] == [["InvalidArgument"], 2, [True, None, 4]]
    assert found["no room"] == [[True, True], 1, 0, [True, None]]


def test_lanes_are_asked_for_once_where_the_gpu_has_room_for_fewer() -> None:
    assert program("lanes_with_little_room") == {"lanes": [[3], 2, [2, 2, 2, 2], NONE]}


def test_the_program_ends_once_a_lane_that_nobody_needs_is_open() -> None:
    assert program("dropped_while_a_lane_opens") == {"begun": True, "opened": True}


def test_threads_run_while_plans_are_made() -> None:
    same, has_plans, why_none, kept = program("from_the_start_in_threads")["threads"]
    assert [same, has_plans, why_none] == [True, True, None]
    assert kept > 0


def test_close_frees_plans_and_waits_for_those_being_made() -> None:
    found = program("closing")
    assert found == {name: [[False, "the session is closed", 0], NONE] for name in ("kept", "being made")}


def test_warm_makes_the_plans_of_all_shapes_at_once() -> None:
    found = program("warming")
    kept, most, why_none, steps = found["shapes"]
    assert kept == [[1, 1, height, 6] for height in (8, 9, 10, 11)]
    assert [most, why_none, steps] == [4, None, [[number, 4] for number in (1, 2, 3, 4)]]
    assert found["text"].splitlines() == [f"x 1x1x{height}x6" for height in (8, 9, 10, 11)]
    assert found["at a time"] == [True, 3, [3, 3, 3, 3]]
    assert found["quick"] == [[], True]
    assert found["plain"] == [[], "no plans for several shapes: none were needed"]
    assert found["too many"] == ["5 feeds were passed to warm(), and plans are kept for 4 shapes"]
    assert found["errors"] == ["TypeError", "TypeError", "ValueError", "RuntimeError"]
    assert found["trimmed"] == ["no plans for several shapes: none were needed", 0, True]


def test_warm_of_pools() -> None:
    found = program("pools")
    assert found == {
        name: [[[1, 1]], ["TypeError", "ValueError", "InvalidArgument"], True] for name in ("sessions", "processes")
    }


def noted(returns: Returns, *runs: tuple[str, float]) -> list[bool]:
    return [returns.note((shape,), seconds) for shape, seconds in runs]


def test_shapes_that_come_back_slowly_suffice() -> None:
    returns = Returns(Policy(returns=2))
    assert noted(returns, ("a", 0.30), ("b", 0.10), ("a", 0.09)) == [False, False, True]
    assert not returns.suffice
    assert noted(returns, ("b", 0.09)) == [True]
    assert returns.suffice


def test_shapes_that_come_back_quickly_do_not() -> None:
    returns = Returns(Policy(returns=2))
    assert not any(noted(returns, ("a", 0.30), ("b", 0.10), *[("a", 0.002), ("b", 0.002)] * 50))
    assert not returns.suffice


def test_shapes_that_would_have_gone_by_then_do_not_count() -> None:
    returns = Returns(Policy(most=2, returns=1))
    assert noted(returns, *[(shape, 0.1) for shape in "abcabcabc"]) == [False] * 3 + [True] * 6
    assert not returns.suffice


def test_shapes_that_come_back_now_and_then_do_not_suffice() -> None:
    returns = Returns(Policy(most=4, returns=3))
    for number in range(200):
        noted(returns, (f"new {number}", 0.1))
        if number % 20 == 0:
            noted(returns, ("other", 0.1), (f"new {number}", 0.1))
    assert not returns.suffice


def test_replanning_is_told_once_and_only_if_it_is_most_of_the_runs() -> None:
    replanning = Replanning(window=4)
    assert not any(replanning.note(0.1, planned=number % 2 == 0) for number in range(40))
    assert [replanning.note(0.1, planned=number != 1) for number in range(6)] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert (
        str(replanning)
        == "3 of the last 4 changes of shape planned the convolutions again, 100 ms instead of 100 a run"
    )


# The runner, with plans that are made up


class MadePlans:
    is_closed = False
    lanes = ()

    def close(self) -> None:
        self.is_closed = True


def with_plans() -> tuple[Any, MadePlans]:
    runner: Any = ShapedRunner(None, PlainRunner(), None)  # type: ignore[arg-type]  # it has plans from the start
    runner._plans = plans = MadePlans()
    return runner, plans


@pytest.mark.parametrize(("right", "holds"), [(1.0, True), (2.0, False)])
def test_the_first_results_of_plans_are_those_of_the_session(
    monkeypatch: pytest.MonkeyPatch, right: float, holds: bool
) -> None:
    """Plans with other results go, and the caller does not see one of them."""
    shrunk: list[Any] = []
    monkeypatch.setattr("ortgpu.running.arena.shrink", shrunk.append)
    runner, plans = with_plans()
    expected = [np.full(3, right, np.float32)]
    found = runner._verified("session", {}, lambda session, first, feed: expected, [np.ones(3, np.float32)])
    assert found is expected
    assert (plans.is_closed, runner._is_verified, shrunk) == (not holds, holds, ["session"] if holds else [])
    assert (runner.why_none is None) is holds


def test_plans_are_given_up_before_the_session_runs_where_they_have_no_room() -> None:
    runner, plans = with_plans()
    session: Any = SimpleNamespace(_gpu_explained=lambda error: GPUOutOfMemoryError("no memory"))
    closed = runner._run_after(RuntimeError("no memory"), session, {}, lambda *_: plans.is_closed)
    assert closed, "their memory is what the run lacks"
    assert runner.why_none == "the GPU has no room for them"


def test_plans_stay_where_the_session_cannot_run_the_feed_either() -> None:
    runner, plans = with_plans()
    session: Any = SimpleNamespace(_gpu_explained=lambda error: error)

    def refuse(*_: Any) -> Any:
        raise ValueError("a wrong feed")

    with pytest.raises(ValueError, match="a wrong feed"):
        runner._run_after(ValueError("a wrong feed"), session, {}, refuse)
    assert (plans.is_closed, runner.why_none) == (False, None)
    assert runner._run_after(RuntimeError("of the plans"), session, {}, lambda *_: plans.is_closed) is False
    assert plans.is_closed
    assert runner.why_none == "a run with them failed: RuntimeError: of the plans"


def test_plans_that_were_given_back_need_more_returns_each_time() -> None:
    """A session that is short of memory would make plans and give them back again and again."""
    runner, plans = with_plans()
    for times in (1, 4, 16):
        count = 0
        noted(runner._returns, ("a", 0.1), ("b", 0.1))
        while not runner._returns.suffice:
            noted(runner._returns, ("ab"[count % 2], 0.1))
            count += 1
        assert count == 3 * times
        runner._plans = plans = MadePlans()
        runner.give_back()
        assert plans.is_closed
