"""Times that are measured in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ortgpu.process.timing import alternate, quartiles


def test_each_round_calls_all_and_begins_with_another() -> None:
    called: list[str] = []
    rounds: list[dict[str, list[float]]] = []

    def action(name: str) -> float:
        called.append(name)
        return float(len(called))

    def note(figures: Mapping[str, Sequence[float]]) -> None:
        rounds.append({name: list(values) for name, values in figures.items()})

    found = alternate({name: lambda name=name: action(name) for name in "abc"}, 4, note)  # type: ignore[misc]
    assert "".join(called) == "abcbcacababc"
    assert found == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}
    assert rounds[0] == {"a": [1], "b": [2], "c": [3]}
    assert rounds[-1] == found


def test_no_rounds_give_no_figures() -> None:
    assert alternate({"a": lambda: 1.0}, 0) == {"a": []}


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3, 3, 3)), ([1.0, 3.0], (1.5, 2, 2.5)), ([5.0, 1.0, 4.0, 2.0, 3.0], (2, 3, 4))],
)
def test_quartiles(values: list[float], expected: tuple[float, float, float]) -> None:
    assert quartiles(values) == expected
