"""The meeting in a folder that other users may write to, too. How ranks meet: test_training_attempts.py."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ortgpu.distributed.environment.shared_folder import FolderMeeting, meet_in_folder

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
