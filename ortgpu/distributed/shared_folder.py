"""Do all ranks see one folder? Each writes a token into it, and reads those of all others."""

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
_GONE = (errno.ENOENT, errno.ESTALE)  # the second where NFS had it replaced meanwhile
_NO_FILE = (errno.ELOOP, errno.EISDIR)  # a link, or a folder
_LONGEST = 1 << 26  # bytes of a file: a rank writes some 50 for each rank
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
        with contextlib.suppress(FileExistsError):  # whatever it is: opening it tells
            place.mkdir()
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
        found = _read(place, others)
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


class _Opened:
    """The folder, open: neither it nor a file in it is reached by a link, which another user may have left there.

    Opened for each look: NFS then asks its server what is new, where it else believes what it has known for half a
    minute and more (nfs(5)).
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._folder: int | None = None  # Windows opens none, and only administrators make links there

    def __enter__(self) -> _Opened:
        if os.name != "nt":
            try:
                self._folder = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise OSError(error.errno, "it is no folder, or a link to one", str(self._place)) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            os.close(self._folder)

    def names(self) -> list[str]:
        return os.listdir(self._place if self._folder is None else self._folder)

    def open(self, name: str, flags: int) -> int:
        flags |= 0 if os.name == "nt" else os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would be waited for
        return os.open(self._at(name), flags, 0o666, dir_fd=self._folder)

    def replace(self, name: str, by: str) -> None:
        os.replace(self._at(by), self._at(name), src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._folder)

    def _at(self, name: str) -> str:
        return name if self._folder is not None else str(self._place / name)


def _write(place: Path, rank: int, state: Mapping[str, Any]) -> None:
    with _Opened(place) as folder:
        name = f"{rank}.{os.urandom(8).hex()}.partial"  # one that nobody can make before
        with open(name, "x", encoding="utf-8", opener=folder.open) as file:
            file.write(json.dumps(state))
        folder.replace(f"{rank}.json", by=name)


def _read(place: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return what these ranks have written, by rank.

    The folder is listed first: NFS goes on to take a name for absent that was looked for before it was there.
    """
    try:
        with _Opened(place) as folder:
            names = frozenset(folder.names())
            found = {rank: _parse(folder, f"{rank}.json") for rank in ranks if f"{rank}.json" in names}
    except OSError as error:
        if error.errno in _GONE:
            return {}
        raise
    return {rank: content for rank, content in found.items() if content is not None}


def _parse(folder: _Opened, name: str) -> dict[str, Any] | None:
    """Return the content of a file, or None if no rank has written it."""
    try:
        with open(name, "rb", buffering=0, opener=folder.open) as file:
            content = json.loads(file.read(_LONGEST) or b"") if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        if error.errno in (*_GONE, *_NO_FILE):
            return None
        raise
    if not isinstance(content, dict) or "done" not in content:
        return None
    return content if isinstance(content.get("token"), str) and isinstance(content.get("seen"), dict) else None


def _remove(place: Path, ranks: Container[int]) -> None:
    with contextlib.suppress(FileNotFoundError), _Opened(place) as folder:
        for name in folder.names():
            rank, _, ending = name.partition(".")
            if rank.isdecimal() and int(rank) in ranks and (ending == "json" or ending.endswith("partial")):
                with contextlib.suppress(FileNotFoundError):
                    folder.remove(name)
    with contextlib.suppress(OSError):  # other ranks are still there
        place.rmdir()
