"""Times that are compared: taken in turns, and told with their spread. Imports only the standard library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence


def in_turns(
    actions: Mapping[str, Callable[[], float]],
    rounds: int,
    after_round: Callable[[Mapping[str, Sequence[float]]], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Call every action once a round, starting with another one each round, and gather the seconds each returns.

    Figures that are compared meet the same machine: clocks, caches and neighbours change between rounds. What was
    gathered so far is handed to ``after_round``.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(actions[name]())
        after_round(seconds)
    return seconds


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
