"""Comparable times, measured alternately, with their spread. Imports only the standard library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence


def alternate(
    actions: Mapping[str, Callable[[], float]],
    rounds: int,
    after_round: Callable[[Mapping[str, Sequence[float]]], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Call every action once in each round, and return the seconds that each call returned.

    Each round starts with another action. Clocks, caches and neighbours change between rounds, so the figures of a
    round are comparable. ``after_round`` is called with the figures so far.
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
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
