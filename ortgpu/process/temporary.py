"""Folders of this user alone, and temporary folders. Later processes remove the folders of a killed process."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .late import late

if TYPE_CHECKING:
    import shutil
    import tempfile
else:
    tempfile = late("tempfile")
    shutil = late("shutil")

_ABANDONED = 86_400.0  # After so many seconds no living process uses a folder.


def make_own_folder(folder: Path) -> None:
    """Make a folder, unless it exists. Raises OSError if it cannot be made, or is not this user's alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if sys.platform == "win32":  # A folder inherits the permissions of its parent folder.
        return
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{folder} is not this user's alone: owner {status.st_uid}, {stat.filemode(status.st_mode)}")


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[str]:
    """Yield a temporary folder that no other user can read, and remove it.

    A killed process leaves its folder behind. After a day, the next process of the same user removes it.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_own = sys.platform == "win32" or status.st_uid == os.getuid()
                    is_abandoned = status.st_mtime < time.time() - _ABANDONED
                    if is_own and is_abandoned and entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield folder
