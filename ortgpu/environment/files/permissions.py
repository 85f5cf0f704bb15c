"""Find installed files that this user may not read: root installed them under a strict umask, say. Never raises.

To the import system, and to a search, a folder that cannot be listed is an empty one: without these facts a package
that is whole looks absent, or like what an uninstall left behind.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RefusedPath:
    """A file or folder that this user may not read."""

    path: str
    mode: str  # as ls writes it: "drwx------"
    own: bool  # it belongs to this user, who can change its mode


def read_refused(places: Iterable[str], package: str | None) -> tuple[RefusedPath, ...]:
    """Return the unreadable paths among the search path, its NVIDIA wheels, and one package with its ``capi``."""
    return tuple(found for path in dict.fromkeys(_looked_at(places, package)) if (found := _refused(path)) is not None)


def _looked_at(places: Iterable[str], package: str | None) -> Iterator[str]:
    for place in map(_absolute, places):
        wheels = os.path.join(place, "nvidia")
        yield from (place, wheels)
        for component in _paths_in(wheels):
            libraries = os.path.join(component, "lib")
            yield from (component, libraries, *_paths_in(libraries))
    if package is not None:
        capi = os.path.join(package, "capi")
        yield from (package, *_paths_in(package), *_paths_in(capi))


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except (OSError, ValueError):  # the working directory is gone
        return path


def _paths_in(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except (OSError, ValueError):
        return []


def _refused(path: str) -> RefusedPath | None:
    if not hasattr(os, "geteuid"):  # Windows has other permissions than a mode
        return None
    try:
        info = os.stat(path)
        wanted = os.R_OK | os.X_OK if stat.S_ISDIR(info.st_mode) else os.R_OK
        readable = os.access(path, wanted)
    except (OSError, ValueError):  # absent, or below a folder that is refused itself
        return None
    return None if readable else RefusedPath(path, stat.filemode(info.st_mode), info.st_uid == os.geteuid())
