"""Runners of sessions that bound how many runs are at work, or that notice when no run is."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ..errors import GPUError
from ..process.reminders import Reminder
from ..process.threads import Turns
from .memory import holdings_of, trim
from .plain_runs import PlainRunner

if TYPE_CHECKING:
    from .onnxruntimes import Results
    from .plain_runs import RunningSession


logger = logging.getLogger("ortgpu")


class _InTurns(PlainRunner):
    turns: Turns
    _run_in_turn: Callable[..., Results]  # ``run`` of the class behind this one

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        """Run the model in a turn. A free turn is taken here, because each further call costs a microsecond."""
        turns, thread = self.turns, get_ident()
        turn = iter(turns.lock.acquire, False)  # Since Python 3.14 a signal may come amid the step of `with`.
        if turns.owner or turns.first:
            results: Results = turns.run(self._run_in_turn, session, output_names, feed, run_options)
            return results
        for _ in turn:
            turns.owner = thread
            try:
                return self._run_in_turn(session, output_names, feed, run_options)
            finally:
                turns.owner = 0
                turns.lock.release()
        raise AssertionError("the loop ends by its return")

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self.turns.run, super().around(method))


class _Watched(PlainRunner):
    _run_watched: Callable[..., Results]  # ``run`` of the class behind this one
    last_run: float  # the end of the last run, by time.monotonic()
    at_work: list[None]  # an item for each run at work
    reminder: Reminder

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        self.at_work.append(None)
        try:
            return self._run_watched(session, output_names, feed, run_options)
        finally:
            self.at_work.pop()
            self.last_run = time.monotonic()
            if self.reminder.thread is None:
                self.reminder.start()

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._watch, super().around(method))

    def note_end(self) -> None:
        self.last_run = time.monotonic()
        if self.reminder.thread is None:
            self.reminder.start()

    def _watch(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.at_work.append(None)
        try:
            return method(*arguments, **named)
        finally:
            self.at_work.pop()
            self.note_end()

    def close(self, error: GPUError) -> None:
        self.reminder.stop()
        super().close(error)


_classes: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def combined(first: type[Any], second: type[Any], name: str) -> type[Any]:
    """Return a class with the ``run`` of ``first`` around the ``run`` of ``second``, which it calls by ``name``.

    ``super().run`` would make two objects for each run.
    """
    return _classes.setdefault((first, second), type(second.__name__, (first, second), {name: second.run}))


def trim_when_idle(session: RunningSession, runner: PlainRunner, seconds: float) -> None:
    """Have a session trim itself once it made no run for so many seconds. A thread waits for that meanwhile."""
    runner.__class__ = combined(_Watched, type(runner), "_run_watched")
    reminder = Reminder(session, functools.partial(_trim_idle, seconds), "ortgpu-trim")
    vars(runner).update(reminder=reminder, at_work=[], last_run=time.monotonic(), binds_directly=False)


def _trim_idle(seconds: float, session: RunningSession) -> float | None:
    """Trim the session if it is idle. Return the seconds to wait, or None if only another run is to be waited for."""
    runner = session._gpu_runner
    if not isinstance(runner, _Watched):  # it is closed
        return None
    remaining = seconds if runner.at_work else runner.last_run + seconds - time.monotonic()
    if remaining > 0:
        return remaining
    holdings = holdings_of(session)
    try:
        if holdings.turns is not None:  # The reminder's lock keeps no run waiting.
            holdings.turns.run_in_turn(trim, session)
        else:
            trim(session)
    except Exception as error:  # noqa: BLE001 - it was closed or lost the GPU; its next use says so
        logger.debug("an idle session was not trimmed: %s", str(error))
    return seconds if time.monotonic() - runner.last_run < seconds else None


def take_turns(runner: PlainRunner, turns: Turns) -> None:
    """Limit a runner to one run at a time, in turns."""
    runner.__class__ = combined(_InTurns, type(runner), "_run_in_turn")
    vars(runner).update(turns=turns, binds_directly=False)
