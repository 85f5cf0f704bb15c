"""Do all ranks see one folder? Each writes a token into it, and reads those of all others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = ".ortgpu-shared-folder"
_GONE = (errno.ENOENT, errno.ESTALE)  # the second where NFS had it replaced meanwhile
_PAUSE = 0.05  # seconds between looks: a network file system tells nobody of a change


@dataclass(frozen=True, slots=True)
class FolderMeeting:
    """How a meeting ended. ``missing``: ranks whose token never came, or that never saw this one's."""

    folder: str
    rank: int
    world_size: int
    missing: tuple[int, ...]
    error: str | None  # why the folder cannot be written or read
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None and not self.missing


def meet_in_folder(folder: str | os.PathLike[str], rank: int, world_size: int, *, timeout: float) -> FolderMeeting:
    """Meet the other ranks in ``folder``, for at most ``timeout`` seconds. Every rank has to call this.

    Each rank has one file there, with a token made up for this call and the tokens of the others that it has read. A
    rank has met another when that one's file repeats its token: a file left by an earlier run cannot. The files are
    removed at the end, by rank 0 those of all. A world of one only writes and reads its own.

    Nothing is raised for what is wrong with the folder. A network file system may show what another host wrote with a
    delay, for which ``timeout`` has to leave room.
    """
    started = time.monotonic()
    place = Path(folder) / _FOLDER
    missing = tuple(other for other in range(world_size) if other != rank)
    error = None
    try:
        place.mkdir(exist_ok=True)
        try:
            missing = _meet(place, rank, world_size, started + timeout)
        finally:
            if rank == 0:
                _remove(place, range(world_size))
            elif missing:  # else rank 0 still reads this rank's file
                _remove(place, [rank])
    except (OSError, ValueError) as caught:  # ValueError: a NUL in the path
        error = str(caught)
    return FolderMeeting(os.fspath(folder), rank, world_size, missing, error, time.monotonic() - started)


def _meet(place: Path, rank: int, world_size: int, deadline: float) -> tuple[int, ...]:
    """The ranks that were not met."""
    token = os.urandom(16).hex()
    others = [other for other in range(world_size) if other != rank]
    met: set[int] = set()  # once is for good: who gives up first takes its file along
    written: dict[str, Any] = {}
    while True:
        names = _names(place)
        there = [other for other in others if f"{other}.json" in names]
        found = {other: content for other in there if (content := _read(place, other)) is not None}
        met |= {other for other, content in found.items() if content["seen"].get(str(rank)) == token}
        # Written before this rank is content, so that the others find their tokens repeated after it has left.
        state = {
            "token": token,
            "seen": {str(other): content["token"] for other, content in found.items()},
            "done": len(met) == len(others),
        }
        if state != written:
            try:
                _write(place, rank, state)
            except FileNotFoundError:
                if not written:
                    raise
                return tuple(other for other in others if other not in met)  # rank 0 gave up, and cleaned up
            if not written and _read(place, rank) != state:
                raise OSError(f"what was written to {place / f'{rank}.json'} is not what is read from it")
            written = state
        others_done = all(other in found and found[other]["done"] for other in others)
        if state["done"] and (rank != 0 or others_done):  # rank 0 cleans up
            return ()
        if time.monotonic() > deadline:
            return tuple(other for other in others if other not in met)
        time.sleep(_PAUSE)


def _write(place: Path, rank: int, state: Mapping[str, Any]) -> None:
    temporary = place / f"{rank}.partial"
    temporary.write_text(json.dumps(state), encoding="utf-8")
    temporary.replace(place / f"{rank}.json")


def _names(place: Path) -> frozenset[str]:
    """What is there, by listing it: a name that was looked for in vain NFS takes for absent until what it knows of the
    folder expires, after half a minute and more; but it asks anew when the folder is opened (nfs(5))."""
    try:
        return frozenset(os.listdir(place))
    except OSError as error:
        if error.errno in _GONE:
            return frozenset()
        raise


def _read(place: Path, rank: int) -> dict[str, Any] | None:
    try:
        content = json.loads((place / f"{rank}.json").read_text(encoding="utf-8"))
        return content if {"token", "seen", "done"} <= content.keys() else None
    except (ValueError, AttributeError):
        return None
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _remove(place: Path, ranks: Iterable[int]) -> None:
    for rank in ranks:
        for name in (f"{rank}.json", f"{rank}.partial"):
            with contextlib.suppress(FileNotFoundError):
                (place / name).unlink()
    with contextlib.suppress(OSError):  # other ranks are still there
        place.rmdir()
