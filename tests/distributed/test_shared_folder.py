"""The meeting in a folder that other users may write to, too. How ranks meet: test_training_attempts.py."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.distributed.environment import shared_folder as shared_folder_module
from ortgpu.distributed.environment.shared_folder import FolderMeeting, meet_in_folder

shared_folder: Any = shared_folder_module
DEADLINE = 60.0


def test_a_link_that_takes_the_place_of_the_folder_while_the_ranks_wait(tmp_path: Path) -> None:
    """Whoever made the folder may rename it at any time. Nothing is written or removed where the link leads."""
    precious = tmp_path / "of the victim"
    precious.mkdir()
    names = ("0.json", "1.json", "1.best.partial")
    for name in names:
        (precious / name).write_text("precious", encoding="utf-8")
    place, meetings = tmp_path / ".ortgpu-shared-folder", list[FolderMeeting]()
    rank = threading.Thread(target=lambda: meetings.append(meet_in_folder(tmp_path, 0, 2, timeout=1.0)))
    rank.start()
    until = time.monotonic() + DEADLINE
    while not (place / "0.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    place.rename(tmp_path / "moved")
    place.symlink_to(precious)
    rank.join(DEADLINE)
    assert [(meeting.missing, meeting.error) for meeting in meetings] == [((1,), None)]
    assert {path.name: path.read_text("utf-8") for path in precious.iterdir()} == dict.fromkeys(names, "precious")
    assert list((tmp_path / "moved").iterdir()) == [], "its own file is gone"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".ortgpu-shared-folder").mkdir()
    os.chown(tmp_path / ".ortgpu-shared-folder", 65534, 65534)
    meeting = meet_in_folder(tmp_path, 0, 2, timeout=0.5)
    assert "belongs to another user" in (meeting.error or "")
    assert list((tmp_path / ".ortgpu-shared-folder").iterdir()) == []


class Told:
    """The folder, with what another rank writes to it from look to look."""

    def __init__(self, *looks: Callable[[str], dict[str, Any]]) -> None:
        self.looks, self.path = [*looks], Path("folder")
        self.written: list[dict[str, Any]] = []

    def read(self, ranks: Any) -> dict[int, Any]:
        if [*ranks] == [0]:
            return {0: self.written[-1]}
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        token = self.written[-1]["token"] if self.written else ""
        return {1: {"token": "of 1", **look(token)}}

    def write(self, rank: int, state: Any) -> None:
        self.written.append(dict(state))


def state(seen: str | None, *, done: bool) -> Callable[[str], dict[str, Any]]:
    """What rank 1 says that it has seen of rank 0: None for the token of now."""
    return lambda token: {"seen": {"0": token if seen is None else seen}, "done": done}


@pytest.mark.parametrize(
    ("looks", "missing"),
    [
        ([state("", done=False), state(None, done=True)], ()),
        ([state("of an earlier job", done=True)], (1,)),
        ([state("", done=False), state(None, done=False)], ()),  # its time is up, and both have met
    ],
    ids=["they meet", "a file of an earlier job", "the other is not done"],
)
def test_a_rank_is_met_once_it_repeats_the_token_of_now(
    monkeypatch: pytest.MonkeyPatch, looks: list[Any], missing: tuple[int, ...]
) -> None:
    place: Any = Told(*looks)
    slept: list[float] = []
    ticks = itertools.count()
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(shared_folder, "time", clock)
    assert shared_folder._meet(place, 0, 2, 5.0) == missing
    is_done = looks[-1]("x")["done"] and not missing
    assert (len(slept) < 3) is is_done, "rank 0 cleans up, so it waits for the others to be done"
