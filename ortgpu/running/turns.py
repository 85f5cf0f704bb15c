"""Runners of sessions that bound how many runs are at work, or that notice when no run is.

A run that is made while others are at work takes a stream of its own, with a handle and a workspace of cuBLAS: 80 MiB
on an H200, which lie outside of the arena and stay until the session is closed. A session with a budget bounds them.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from .plain_runs import PlainRunner

if TYPE_CHECKING:
    from ..process.reminders import Reminder
    from .onnxruntimes import Results
    from .plain_runs import RunningSession


class Turns:
    """The turns of the runs of one session."""

    def __init__(self, count: int) -> None:
        self._turns: SimpleQueue[bool] = SimpleQueue()
        for _ in range(count):
            self._turns.put(True)

    def run(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """Return the result of ``call``, made when fewer than so many others are at work."""
        # An interrupt before `try` would lose a turn. The step of this loop is in C, and signals are seen after calls.
        for turn in iter(self._turns.get, None):
            try:
                return call(*arguments, **named)
            finally:
                self._turns.put(turn)
        return None


class _InTurns(PlainRunner):
    turns: Turns

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        results: Results = self.turns.run(super().run, session, output_names, feed, run_options)
        return results


class _Watched(PlainRunner):
    last_run: float  # time.monotonic()
    reminder: Reminder

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        self.last_run = time.monotonic()
        if not self.reminder.is_at_work:
            self.reminder.start()
        return super().run(session, output_names, feed, run_options)


_classes: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def _combined(first: type[Any], second: type[Any]) -> type[Any]:
    """Return a class whose ``run`` is that of ``first`` around that of ``second``."""
    return _classes.setdefault((first, second), type(second.__name__, (first, second), {}))


def take_turns(runner: PlainRunner, turns: Turns) -> None:
    """Have a runner make only so many runs at a time as there are ``turns``."""
    runner.__class__ = _combined(_InTurns, type(runner))
    vars(runner)["turns"] = turns
