"""The turns of ``run_async`` within a budget, with a run that is made up."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.process.threads import Turns
from ortgpu.session import async_runs


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_turn_of_a_run_ends_before_its_callback_or_with_its_refusal(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a session with a budget would run no more, once as many runs as it has turns were made."""
    seen: list[str] = []
    turns = Turns()
    session: Any = SimpleNamespace(_gpu_runner=SimpleNamespace(note_end=lambda: None))
    monkeypatch.setattr(async_runs, "_queue", SimpleQueue)
    monkeypatch.setattr(async_runs, "_under_way", {})

    def run(names: Any, feed: Any, called: Any, *_: object) -> None:
        if is_refused:
            raise ValueError("wrong input")
        seen.append("run")
        called([], None, "")

    def callback(*_: object) -> None:
        seen.append(f"callback, turn of {turns.owner}")

    arguments: Any = (session, run, None, {}, callback, None, None, turns)
    if is_refused:
        with pytest.raises(ValueError, match="wrong input"):
            async_runs.run_async(*arguments)
    else:
        async_runs.run_async(*arguments)
    assert seen == ([] if is_refused else ["run", "callback, turn of 0"])
    assert turns.owner == 0


@pytest.mark.parametrize("text", ["", "CUDA failure 700: an illegal memory access"], ids=["succeeds", "fails"])
@pytest.mark.parametrize("has_turns", [False, True], ids=["without a budget", "within a budget"])
def test_the_callback_gets_what_onnxruntime_says_and_the_data_of_its_caller(
    text: str, has_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is noted before: the callback may ask the session for it."""
    seen: list[Any] = []
    data, results = object(), ["y"]
    session: Any = SimpleNamespace(_gpu_runner=SimpleNamespace(note_end=lambda: seen.append("end")))
    monkeypatch.setattr(async_runs, "_queue", SimpleQueue)
    monkeypatch.setattr(async_runs, "_under_way", {})
    monkeypatch.setattr("ortgpu.session.failures.note_text", lambda session, text: seen.append(text))
    asked: list[Any] = []

    def run(names: Any, feed: Any, called: Any, theirs: Any, options: Any) -> None:
        asked.extend((names, feed, theirs, options))
        called(results, None, text)

    def callback(*given: Any) -> None:
        seen.append(given)

    turns = Turns() if has_turns else None
    async_runs.run_async(session, run, ["y"], {"x": 1}, callback, data, "options", turns)
    assert asked == [["y"], {"x": 1}, None, "options"]
    assert seen == ["end", *([text] if text else []), (results, data, text)]
