"""Temporary folders, which do not stay behind for ever after a process was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

_ABANDONED = 86_400.0  # seconds after which no living process uses a folder


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[str]:
    """Yield a temporary folder that no other user can read, and remove it.

    A process that is killed leaves its folder behind. A later process of the same user removes it, from a day on.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield folder


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    is_own = sys.platform == "win32" or status.st_uid == os.getuid()
    if is_own and entry.is_dir(follow_symlinks=False) and status.st_mtime < time.time() - _ABANDONED:
        shutil.rmtree(entry.path, ignore_errors=True)
