"""Folders of this user alone."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .late import late

if TYPE_CHECKING:
    import tempfile
else:
    tempfile = late("tempfile")


def make_own_folder(folder: Path) -> None:
    """Make a folder, unless it exists. Raises OSError if it cannot be made, or is not this user's alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if sys.platform == "win32":  # A folder inherits the permissions of its parent folder.
        return
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{folder} is not this user's alone: owner {status.st_uid}, {stat.filemode(status.st_mode)}")


def private_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder that no other user can read, for ``with``. A killed process leaves it behind."""
    return tempfile.TemporaryDirectory(prefix=prefix)
