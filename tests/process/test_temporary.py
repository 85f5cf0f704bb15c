"""Temporary folders: private, and removed."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from ortgpu.process.temporary import make_own_folder, private_folder


def test_a_folder_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder("ortgpu-test-") as folder:
        assert Path(folder).parent == tmp_path
        if sys.platform != "win32":
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        Path(folder, "file").touch()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there a folder inherits the permissions of its parent folder")
def test_a_folder_of_ours_is_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    for _ in range(2):
        make_own_folder(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for mode in (0o740, 0o720, 0o710, 0o704, 0o702, 0o701):
        folder.chmod(mode)
        with pytest.raises(OSError, match="is not this user's alone"):
            make_own_folder(folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="is not this user's alone"):
        make_own_folder(folder)
