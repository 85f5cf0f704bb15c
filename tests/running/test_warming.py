"""``warm``: feeds that are shapes, and what it runs. With plans: test_shaped_runs.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import PerformanceWarning
from ortgpu.provider import lifetime
from ortgpu.running import warming
from ortgpu.running.kept_shapes import SessionShapes

TYPES = {"x": "tensor(float)", "ids": "tensor(int64)", "text": "tensor(string)", "s": "seq(tensor(float))"}


class Noting:
    """Stands for a session: it notes what is prepared and run."""

    def __init__(self, most_shapes: int = 2) -> None:
        self._inputs_meta = [SimpleNamespace(name="x", type="tensor(float)")]
        self._overridable_initializers = [SimpleNamespace(name="w", type="tensor(int8)")]
        self.prepared: list[Any] = []
        self.widened: tuple[int, int] | None = None
        self.ran: list[Any] = []
        self.most_shapes = most_shapes
        self._gpu_runner = self

    def prepare(self, session: Any, feeds: Any) -> None:
        self.prepared = [each["x"].shape for each in feeds]

    def run(self, names: Any, feed: Any) -> None:
        assert names is None
        self.ran.append(feed["x"].shape[0])

    def widen(self, session: Any, feeds: Any, runs: int) -> None:
        self.widened = (len(feeds), runs)

    def shapes(self) -> SessionShapes:
        return SessionShapes(({"x": (1,)}, {"x": (2,)})[: self.most_shapes], self.most_shapes, None)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lifetime, "refuse_if_unusable", lambda _: None)
    return Noting()


def test_each_feed_runs_twice_and_then_the_shapes_take_turns(session: Any) -> None:
    told: list[tuple[int, int]] = []
    feeds: Any = iter([{"x": (3,)}, {"x": np.ones(5, np.float32)}])
    found = warming.warm(session, feeds, lambda *progress: told.append(progress))
    assert session.prepared == [(3,), (5,)]
    assert session.ran == [3, 3, 5, 5, 3, 5]
    assert told == [(1, 2), (2, 2)]
    assert session.widened == (2, 1)
    assert len(found.kept) == 2


def test_only_two_feeds_are_needed_to_make_the_plans(session: Any) -> None:
    session.most_shapes = 8
    warming.warm(session, [{"x": (size,)} for size in (1, 2, 3)], None)
    assert session.prepared == [(1,), (2,)]


def test_more_feeds_than_plans_are_warned_of(session: Any) -> None:
    with pytest.warns(PerformanceWarning, match=r"3 feeds were passed to warm\(\), and plans are kept for 2 shapes"):
        warming.warm(session, [{"x": (size,)} for size in (1, 2, 3)], None)


@pytest.mark.parametrize(("most", "ran"), [(0, []), (1, [1, 1, 1])])
def test_sizes_are_as_many_as_are_kept(session: Any, most: int, ran: list[int]) -> None:
    session.most_shapes = most
    warming.warm_sizes(session, [{"x": (1,)}, {"x": (2,)}])
    assert session.ran == ran
    assert session.widened == ((most, 2) if most else None), "a service runs in two threads"


def test_a_session_that_cannot_run_says_so_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise KeyError("closed")

    monkeypatch.setattr(lifetime, "refuse_if_unusable", refuse)
    with pytest.raises(KeyError, match="closed"):
        warming.warm(Noting(), "no feeds", None)  # type: ignore[arg-type]  # neither is looked at


def test_a_single_feed_is_no_list() -> None:
    with pytest.raises(TypeError, match=r"pass a list of feeds, \[feed\]"):
        warming.listed({"x": (3,)})  # type: ignore[dict-item]  # the usual mistake


def test_the_types_are_those_of_inputs_and_of_initialisers_that_a_feed_may_replace(session: Any) -> None:
    assert warming.types_of(session) == {"x": "tensor(float)", "w": "tensor(int8)"}


def test_a_shape_becomes_zeros_and_an_array_stays() -> None:
    array = np.ones(3)
    made = warming.arrays_of({"x": (2, 3), "ids": [4], "text": (2,), "given": array}, TYPES)
    assert (made["x"].dtype, made["x"].shape, made["x"].any()) == (np.float32, (2, 3), False)
    assert (made["ids"].dtype.itemsize, made["ids"].tolist()) == (8, [0] * 4)
    assert made["text"].tolist() == ["", ""]
    assert made["given"] is array


@pytest.mark.parametrize("value", [[1.5], ["a"], [True], None, 3])
def test_what_is_no_shape_is_left_to_the_run(value: Any) -> None:
    assert warming.arrays_of({"x": value}, TYPES)["x"] is value


@pytest.mark.parametrize("name", ["s", "unknown"])
def test_a_shape_of_something_that_is_no_tensor(name: str) -> None:
    with pytest.raises(ValueError, match=f"input '{name}' cannot be made from a shape"):
        warming.arrays_of({name: (1,)}, TYPES)


def test_a_feed_is_a_mapping() -> None:
    with pytest.raises(TypeError, match="a feed is a mapping of input names to arrays or shapes, not list"):
        warming.arrays_of([1], TYPES)
