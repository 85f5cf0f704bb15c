"""Whether shapes come back, whether their runs plan again, and when that is worth plans for several shapes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ..process.background import this_thread
from .kept_shapes import MOST

Shape = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """When plans are made, and when they are given up.

    Attributes:
        most: the number of shapes that are kept.
        returns: plans are made after so many slow runs of shapes that came back.
        slow: the run of a shape that came back is slow if it takes this part of the shortest first run of a shape.
        worth: the part of the time of a slow run that a planned one may take.
        judged: the planned runs that are compared with slow ones.
        window: :class:`Replanning` judges after so many changes of shape.
        waits: further lanes serve a shape after so many of its runs waited for others within ``waited`` seconds.
        lanes: the greatest number of lanes.
    """

    most: int = MOST
    returns: int = 3
    slow: float = 0.5
    worth: float = 0.9
    judged: int = 8
    window: int = 60
    waits: int = 4
    waited: float = 2.0
    lanes: int = 8


_KNOWN = 64  # the number of shapes that are remembered


class Returns:
    """Counts the shapes that come back after other shapes ran, but soon enough to have kept their plans."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._first: dict[Shape, float] = {}  # seconds of the first run; the shape that ran last is the last
        self._count = 0.0
        self._lock = threading.RLock()
        self.slow: dict[Shape, float] = {}  # seconds of the last slow run of a shape that came back

    def note(self, shape: Shape, seconds: float) -> bool:
        """Note the first run of a shape after another one. Return True if it came back, as slow as a first run."""
        with this_thread.holds, self._lock:
            is_recent = shape in list(self._first)[-self._policy.most :]
            first = self._first.pop(shape, None)
            self._first[shape] = seconds if first is None else first
            if len(self._first) > _KNOWN:
                oldest = next(iter(self._first))
                del self._first[oldest]
                self.slow.pop(oldest, None)
            if not is_recent:
                # Shapes that never come back must not add up to a reason over a long time.
                self._count = max(0.0, self._count - 1 / self._policy.most)
            is_slow = first is not None and seconds >= self._policy.slow * min(self._first.values())
            if is_recent:
                self._count = max(0.0, self._count + (1 if is_slow else -1))
            if is_recent and is_slow:
                self.slow[shape] = seconds
            return is_slow

    @property
    def suffice(self) -> bool:
        return self._count >= self._policy.returns


PATIENCE = 4  # times as many shapes have to come back until plans are made again


class Replanning:
    """Warns once if most changes of shape make ONNX Runtime plan again."""

    def __init__(self, window: int) -> None:
        self.quick = 0  # changes of shape in this window that needed no plan
        self._window = window
        self._slow: list[float] = []  # seconds of the runs of this window that planned
        self._usual: float | None = None  # seconds of a run without planning
        self._has_warned = False

    def note(self, seconds: float, *, planned: bool) -> bool:
        """Note a change of shape. Return True if it is time to warn."""
        if self._has_warned:
            return False
        if planned:
            self._slow.append(seconds)
        else:
            self.quick += 1
            self._usual = seconds
        if len(self._slow) + self.quick < self._window:
            return False
        self._has_warned = len(self._slow) > self.quick
        if not self._has_warned:
            self._slow, self.quick = [], 0
        return self._has_warned

    def __str__(self) -> str:
        instead = f" instead of {1e3 * self._usual:.3g}" if self._usual is not None else ""
        return (
            f"{len(self._slow)} of the last {len(self._slow) + self.quick} changes of shape planned the convolutions "
            f"again, {1e3 * median(self._slow):.3g} ms{instead} a run"
        )


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
