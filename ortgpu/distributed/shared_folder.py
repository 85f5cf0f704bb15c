"""A meeting of all ranks in one folder: each writes a token into it, and reads those of all others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = ".ortgpu-shared-folder"
_GONE = (errno.ENOENT, errno.ESTALE)  # ESTALE is NFS's, for a file that was replaced meanwhile
_PAUSE = 0.05  # seconds between looks: a network file system does not report changes


@dataclass(frozen=True, slots=True)
class FolderMeeting:
    """The result of a meeting. ``missing``: ranks whose token never came, or that never saw this one's."""

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

    Each rank has one file there, with a token made for this call and the tokens that it has read from the others. A
    rank has met another when that one's file repeats its token, which a file of an earlier run cannot do. At the end
    rank 0 removes the files of all. A world of one only writes and reads its own.

    Nothing is raised for a fault of the folder. A network file system may show the files of another host with a delay,
    for which ``timeout`` must leave time.
    """
    started = time.monotonic()
    place = Path(folder) / _FOLDER
    missing = tuple(other for other in range(world_size) if other != rank)
    error = None
    try:
        with contextlib.suppress(FileExistsError):
            place.mkdir()
        if place.is_symlink():  # which another user may have left there
            raise OSError(f"{place} is a link")
        try:
            missing = _meet(place, rank, world_size, started + timeout)
        finally:
            if rank == 0:
                _remove(place, range(world_size))
            elif missing:  # otherwise rank 0 still reads this rank's file
                _remove(place, [rank])
    except (OSError, ValueError) as caught:  # ValueError: a NUL in the path
        error = str(caught)
    return FolderMeeting(os.fspath(folder), rank, world_size, missing, error, time.monotonic() - started)


def _meet(place: Path, rank: int, world_size: int, deadline: float) -> tuple[int, ...]:
    """Return the ranks that were not met."""
    token = os.urandom(16).hex()
    others = [other for other in range(world_size) if other != rank]
    met: set[int] = set()  # never taken back, because a rank that gives up removes its file
    written: dict[str, Any] = {}
    while True:
        found = _read(place, others)
        met |= {other for other, content in found.items() if content["seen"].get(str(rank)) == token}
        # Written before this rank returns, so that the others still find their tokens repeated
        state = {
            "token": token,
            "seen": {str(other): content["token"] for other, content in found.items()},
            "done": len(met) == len(others),
        }
        if state != written:
            try:
                _write(place, rank, state)
            except OSError as error:
                if not written or error.errno not in _GONE:
                    raise
                return tuple(other for other in others if other not in met)  # rank 0 gave up, and cleaned up
            if not written and _read(place, [rank]) != {rank: state}:
                raise OSError(f"what was written to {place / f'{rank}.json'} is not what is read from it")
            written = state
        others_done = all(other in found and found[other]["done"] for other in others)
        if state["done"] and (rank != 0 or others_done):  # rank 0 cleans up
            return ()
        if time.monotonic() > deadline:
            return tuple(other for other in others if other not in met)
        time.sleep(_PAUSE)


def _write(place: Path, rank: int, state: Mapping[str, Any]) -> None:
    partial = place / f"{rank}.{os.urandom(8).hex()}.partial"  # nobody can create it before
    partial.write_text(json.dumps(state), encoding="utf-8")
    partial.replace(place / f"{rank}.json")


def _read(place: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the content of each of these ranks' files.

    The folder is listed for each look. NFS then asks its server for changes, and it keeps taking a name for absent that
    was asked for before it was there (nfs(5)).
    """
    try:
        names = frozenset(os.listdir(place))
    except FileNotFoundError:
        return {}
    found = {rank: _parse(place / f"{rank}.json") for rank in ranks if f"{rank}.json" in names}
    return {rank: content for rank, content in found.items() if content is not None}


def _parse(path: Path) -> dict[str, Any] | None:
    """Return the content of a file, or None if no rank has written it: another user may have left a link or a FIFO."""
    try:
        content = json.loads(path.read_bytes()) if stat.S_ISREG(path.lstat().st_mode) else None
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    if not isinstance(content, dict) or "done" not in content:
        return None
    return content if isinstance(content.get("token"), str) and isinstance(content.get("seen"), dict) else None


def _remove(place: Path, ranks: Container[int]) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in place.iterdir():
            rank, _, ending = path.name.partition(".")
            if rank.isdecimal() and int(rank) in ranks and (ending == "json" or ending.endswith("partial")):
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other ranks are still there
        place.rmdir()
