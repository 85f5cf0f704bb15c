"""What a change of shape costs: which runs are timed, and how they are shown."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ortgpu.cli import shape_times
from ortgpu.cli.shape_times import ShapeTimes, measure, show
from ortgpu.running.made_inputs import UnknownInputError


class Session:
    """Stands for a session whose clock it moves: seconds of a plain run, and of one with plans, by size."""

    def __init__(self, kept: bool, clock: list[float], shape: tuple[Any, ...] = ("n",)) -> None:
        self.kept, self.clock, self.ran = kept, clock, list[tuple[str, int]]()
        self.shape = shape
        self._gpu_runner = SimpleNamespace(own=SimpleNamespace(run=self.run_plainly))
        self.last = 0

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x", type="tensor(float)", shape=self.shape)]

    def run_plainly(self, session: Any, names: Any, feed: Any, options: Any) -> None:
        assert session is self
        assert names is options is None
        size = len(feed["x"])
        self.ran.append(("plain", size))
        self.clock[0] += 0.001 if size == self.last else 0.01 * size
        self.last = size

    def run(self, names: Any, feed: Any, options: Any) -> None:
        assert names is options is None
        self.ran.append(("planned", len(feed["x"])))
        self.clock[0] += 0.002

    def warm(self, feeds: list[Any]) -> Any:
        self.ran.append(("warm", len(feeds)))
        return SimpleNamespace(kept=(1,) * self.kept)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(shape_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_repeated_alternating_and_planned_runs_are_timed(clock: list[float]) -> None:
    session: Any = Session(True, clock)
    found = measure(session, [1, 4])
    assert found == [ShapeTimes(1, 1.0, 10.0, 2.0), ShapeTimes(4, 1.0, 40.0, 2.0)]
    repeated = [("plain", 1)] * 4 + [("plain", 4)] * 4
    assert session.ran == [
        *repeated,
        *[("plain", 1), ("plain", 4)] * 3,
        ("warm", 2),
        *[("planned", 1), ("planned", 4)] * 3,
    ]


def test_a_session_without_plans_has_no_time_with_them(clock: list[float]) -> None:
    session: Any = Session(False, clock)
    assert [each.planned for each in measure(session, [1, 4])] == [None, None]
    assert ("planned", 1) not in session.ran


def test_a_model_with_a_batch_of_its_own_is_not_timed(clock: list[float]) -> None:
    session: Any = Session(True, clock, shape=(3,))
    with pytest.raises(UnknownInputError, match="no free batch dimension"):
        measure(session, [1, 4])
    assert session.ran == []


def test_the_table() -> None:
    written = io.StringIO()
    show(Console(file=written, width=100), [ShapeTimes(1, 1.0, 10.0, 2.0), ShapeTimes(4, 1.25, 40.0, None)])
    lines = [line.split() for line in written.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["Milliseconds", "a", "run,", "by", "batch"]
    assert ["1", "1.000", "10.000", "2.000"] in lines
    assert ["4", "1.250", "40.000", "-"] in lines
