"""Measurements of layouts.py inside one process, in turns. Started by workers.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.throughput_workers import ours, relative_error, resident, take_turns
from benchmarks.workers import feed_of
from tests.support.children import report
from tests.support.plain_session import plain_session


def layouts(model: str, batch: int, batches: int, rounds: int, device: str) -> None:
    """Report the mean seconds of a batch of ``batches``, from and to device memory."""
    from ortgpu.provider.requests import CHOSEN_OPTIONS
    from ortgpu.session.chosen.layouts import LAYOUTS

    search = {name: value for name, (value, _) in CHOSEN_OPTIONS.items()}
    session = ours(model, device)
    report("chosen", sorted(session.options_chosen))
    sessions: dict[str, Any] = {"ours": session, "plain": plain_session(model, device)}
    if device == "cuda":
        for name, options in LAYOUTS.items():
            sessions[name] = plain_session(model, device, options={**search, **options})
    feed = feed_of(session, batch, 1)
    expected = sessions["plain"].run(None, feed)
    others = {name: each for name, each in sessions.items() if name != "plain"}
    errors = {name: f"{relative_error(each.run(None, feed), expected):.1e}" for name, each in others.items()}
    report("largest errors", errors)

    def repeated(each: Any) -> Callable[[], None]:
        binding = resident(each, feed, device)

        def action() -> None:
            for _ in range(batches):
                each.run_with_iobinding(binding)

        return action

    take_turns({name: repeated(each) for name, each in sessions.items()}, batches, rounds)


WORKERS: dict[str, Callable[..., None]] = {"layouts": layouts}
