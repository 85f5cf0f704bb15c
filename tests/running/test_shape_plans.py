"""Which lane and which branch serve a shape, and which shapes go for others. The lanes are made up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.running.shape_plans import Lane, OneAtATime, ShapePlans


class Session:
    """A session with branches: it notes the bits that choose one, and returns what a test says."""

    def __init__(self, results: Any = None) -> None:
        self._sess = SimpleNamespace(queue=[])
        self._pinned: Any = None
        self.results = results if results is not None else [np.ones(3, np.float32)]
        self.feeds: list[Any] = []

    def run(self, names: Any, feed: Any) -> Any:
        self.feeds.append(feed)
        return self.results


def lane(branches: int = 2, results: Any = None) -> Any:
    return Lane(Session(results), SimpleNamespace(), ["bit"], branches)  # type: ignore[arg-type]  # no more is used


@pytest.fixture
def plans() -> Any:
    """Plans for two shapes, with a lane that a test may open."""
    return ShapePlans(lane(), SimpleNamespace())  # type: ignore[arg-type]  # no thread of these tests opens a lane


def add(plans: Any) -> Any:
    """Add a lane, and return it."""
    further = lane()
    plans.add_lane(lambda: further)
    return further


def keep(plans: Any, shape: Any, of: Any = None) -> Any:
    """Run a shape as a session does. Return its branch."""
    chosen, branch = plans.choose(shape, plans.lanes[:1] if of is None else [of])
    plans.keep(shape, chosen, branch, {"x": shape})
    return branch


def test_a_shape_runs_in_the_branch_that_has_its_plans(plans: Any) -> None:
    first, second = keep(plans, (1,)), keep(plans, (2,))
    assert first is not second
    for _ in range(3):
        assert plans.choose((1,), plans.lanes)[1] is first
        assert plans.choose((2,), plans.lanes)[1] is second
    assert [first.shape, second.shape] == [(1,), (2,)]
    assert first.selectors["bit"] != second.selectors["bit"]
    assert plans.inputs() == ({"x": (1,)}, {"x": (2,)})


def test_the_shape_that_was_used_least_recently_goes(plans: Any) -> None:
    first = keep(plans, (1,))
    keep(plans, (2,))
    plans.choose((1,), plans.lanes)
    third = keep(plans, (3,))
    assert plans.kept() == ((1,), (3,))
    assert plans.find((2,)) is None
    assert third is not first
    assert plans.choose((1,), plans.lanes)[1] is first
    keep(plans, (4,))
    assert plans.kept() == ((1,), (4,))


def test_it_goes_where_another_lane_has_room_for_a_further_shape_too(plans: Any) -> None:
    keep(plans, (1,))
    keep(plans, (2,))
    plans.choose((1,), plans.lanes)
    further = add(plans)
    further.is_verified = True
    keep(plans, (3,), further)
    assert plans.kept() == ((1,), (3,))


def test_a_branch_has_the_plans_of_one_shape(plans: Any) -> None:
    branch = keep(plans, (1,))
    plans.keep((2,), plans.lanes[0], branch, {"x": (2,)})
    assert plans.kept() == ((2,),)
    assert branch.shape == (2,)


def test_the_least_busy_lane_with_the_plans_runs_a_shape(plans: Any) -> None:
    first = keep(plans, (1,))
    further = add(plans)
    further.is_verified = True
    other = keep(plans, (1,), further)
    assert plans.lanes[0].load == further.load == 0
    plans.lanes[0].session._sess.queue.append(None)
    assert plans.choose((1,), plans.lanes) == (further, other)
    further.session._sess.queue += [None, None]
    assert plans.choose((1,), plans.lanes) == (plans.lanes[0], first)
    plans.lanes[0].is_planning = True
    assert plans.choose((1,), plans.lanes) == (further, other), "a lane that plans is busy for long"
    assert plans.choose((1,), plans.lanes[:1]) == (plans.lanes[0], first), "only these lanes were asked for"


def test_a_lane_that_is_not_verified_serves_nothing(plans: Any) -> None:
    further = add(plans)
    plans.lanes[0].session._sess.queue.append(None)
    assert plans.choose((7,), plans.lanes)[0] is plans.lanes[0]
    further.is_verified = True
    assert plans.choose((7,), plans.lanes)[0] is further


def test_a_further_lane_must_give_the_results_of_the_first(plans: Any) -> None:
    keep(plans, (1,))
    kept = plans.find((1,))
    kept.wanted, kept.feed = 2, {"x": 1}
    right = add(plans)
    assert right.is_verified
    assert [place[0] for place in plans.find((1,)).places] == [plans.lanes[0], right]
    wrong, kept.wanted = lane(results=[np.zeros(3, np.float32)]), 3
    with pytest.raises(ValueError, match="differ"):
        plans.add_lane(lambda: wrong)
    assert not wrong.is_verified
    assert not wrong.is_planning
    assert not wrong.is_filled
    assert len(plans.find((1,)).places) == 2
    (feed,) = right.session.feeds
    assert {*feed} == {"x", "bit"}


def test_lanes_that_are_dropped_close_and_their_shapes_go(plans: Any) -> None:
    keep(plans, (1,))
    further = add(plans)
    further.is_verified = True
    keep(plans, (1,), further)
    keep(plans, (2,), further)
    plans.drop([further])
    assert plans.lanes == (plans.lanes[0],)
    assert plans.kept() == ((1,),)
    assert [place[0] for place in plans.find((1,)).places] == [plans.lanes[0]]
    assert further.session is None


def test_close_frees_each_lane_and_keeps_nothing_afterwards(plans: Any) -> None:
    branch = keep(plans, (1,))
    first, second = plans.lanes[0], add(plans)
    plans.close()
    assert first.session is second.session is None
    assert plans.is_closed
    assert plans.kept() == ()
    plans.keep((1,), first, branch, {"x": (1,)})
    assert plans.kept() == ()


def test_a_lane_that_opens_at_the_end_is_closed(plans: Any) -> None:
    late = lane()

    def open_late() -> Any:
        plans.close()
        return late

    plans.add_lane(open_late)
    assert late.session is None
    plans.add_lane(lambda: pytest.fail("nothing is opened after the end"))


def test_runs_of_a_lane_follow_each_other() -> None:
    at_work, most, lock, began = [0], [0], threading.Lock(), threading.Barrier(4)

    class Native:
        def run(self, number: int) -> int:
            with lock:
                at_work[0] += 1
                most[0] = max(most[0], at_work[0])
            threading.Event().wait(0.002)
            with lock:
                at_work[0] -= 1
            if number == 3:
                raise ValueError("as runs may")
            return number

        def run_with_ortvaluevector(self, number: int) -> int:
            return self.run(number)

    native = OneAtATime(Native())
    results: list[Any] = []

    def run(number: int) -> None:
        began.wait(30)
        for call in (native.run, native.run_with_ortvaluevector):
            try:
                results.append(call(number))
            except ValueError:
                results.append(-1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert most == [1]
    assert native.queue == []
