"""A meeting of all ranks in one folder: each writes a token into it, and reads those of all others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = ".ortgpu-shared-folder"
_GONE = (errno.ENOENT, errno.ESTALE)  # ESTALE is NFS's, for a file that was replaced meanwhile
_NO_FILE = (errno.ELOOP, errno.EISDIR)  # a link, or a folder
_LONGEST = 1 << 26  # bytes of a file: a rank writes some 50 for each rank
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


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[tuple[int, Callable[[str, int], int]]]:
    """Open the folder. Give its descriptor, and an opener for files in it.

    Neither follows a link, which another user may have left there. The folder is opened for each look, because NFS then
    asks its server for changes. Otherwise it relies for half a minute on what it knows (nfs(5)).
    """
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    flags_of_all = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # without O_NONBLOCK, a FIFO would block
    try:
        yield folder, lambda name, flags: os.open(name, flags | flags_of_all, 0o666, dir_fd=folder)
    finally:
        os.close(folder)


def _write(place: Path, rank: int, state: Mapping[str, Any]) -> None:
    with _opened(place) as (folder, opener):
        name = f"{rank}.{os.urandom(8).hex()}.partial"  # nobody can create it before
        with open(name, "x", encoding="utf-8", opener=opener) as file:
            file.write(json.dumps(state))
        os.replace(name, f"{rank}.json", src_dir_fd=folder, dst_dir_fd=folder)


def _read(place: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the content of each of these ranks' files.

    The folder is listed first, because NFS keeps taking a name for absent that was asked for before it was there.
    """
    try:
        with _opened(place) as (folder, opener):
            names = frozenset(os.listdir(folder))
            found = {rank: _parse(f"{rank}.json", opener) for rank in ranks if f"{rank}.json" in names}
    except OSError as error:
        if error.errno in _GONE:
            return {}
        raise
    return {rank: content for rank, content in found.items() if content is not None}


def _parse(name: str, opener: Callable[[str, int], int]) -> dict[str, Any] | None:
    """Return the content of a file, or None if no rank has written it."""
    try:
        with open(name, "rb", buffering=0, opener=opener) as file:
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
    with contextlib.suppress(FileNotFoundError), _opened(place) as (folder, _):
        for name in os.listdir(folder):
            rank, _, ending = name.partition(".")
            if rank.isdecimal() and int(rank) in ranks and (ending == "json" or ending.endswith("partial")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
    with contextlib.suppress(OSError):  # other ranks are still there
        place.rmdir()
