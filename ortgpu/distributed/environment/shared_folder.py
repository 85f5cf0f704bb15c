"""A meeting of all ranks in one folder: each writes a token into it, and reads the tokens of all others."""

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
_LARGEST = 8 << 20  # bytes of a file: each rank repeats the tokens of all
_PAUSE = 0.05  # seconds between looks: a network file system does not report changes


@dataclass(frozen=True, slots=True)
class FolderMeeting:
    """The result of a meeting. ``missing``: ranks without a token, or ranks that never saw this one's."""

    folder: str
    rank: int
    world_size: int
    missing: tuple[int, ...]
    error: str | None  # why the folder cannot be written or read
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None and not self.missing


def meet_in_folder(folder: str | os.PathLike[str], rank: int, world_size: int, timeout: float) -> FolderMeeting:
    """Meet the other ranks in ``folder``, for at most ``timeout`` seconds. Every rank has to call this.

    Each rank has one file there, with a token made for this call and the tokens that it has read from the others. A
    rank has met another when that one's file repeats its token. A file of an earlier run cannot do that. At the end
    rank 0 removes the files of all. A world of one only writes and reads its own.

    Nothing is raised for a fault of the folder. A network file system may show the files of another host with a delay,
    for which ``timeout`` must leave time.
    """
    started = time.monotonic()
    missing = tuple(other for other in range(world_size) if other != rank)
    error = None
    try:
        with _Place(Path(folder, _FOLDER)) as place:
            try:
                missing = _meet(place, rank, world_size, started + timeout)
            finally:
                if rank == 0:
                    place.remove(range(world_size))
                elif missing:  # otherwise rank 0 still reads this rank's file
                    place.remove([rank])
    except (OSError, ValueError) as caught:  # ValueError: a NUL in the path
        error = str(caught)
    return FolderMeeting(os.fspath(folder), rank, world_size, missing, error, time.monotonic() - started)


def _meet(place: _Place, rank: int, world_size: int, deadline: float) -> tuple[int, ...]:
    """Return the ranks that were not met."""
    token = os.urandom(16).hex()
    others = [other for other in range(world_size) if other != rank]
    met: set[int] = set()  # never taken back, because a rank that gives up removes its file
    written: dict[str, Any] = {}
    while True:
        contents = place.read(others)
        met |= {other for other, content in contents.items() if content["seen"].get(str(rank)) == token}
        # Written before this rank returns, so that the others still find their tokens repeated
        state = {
            "token": token,
            "seen": {str(other): content["token"] for other, content in contents.items()},
            "done": len(met) == len(others),
        }
        if state != written:
            try:
                place.write(rank, state)
            except OSError as error:
                if not written or error.errno not in _GONE:
                    raise
                return tuple(other for other in others if other not in met)  # rank 0 gave up, and cleaned up
            if not written and place.read([rank]) != {rank: state}:
                raise OSError(f"what was written to {place.path / f'{rank}.json'} is not what is read from it")
            written = state
        others_done = all(other in contents and contents[other]["done"] for other in others)
        if state["done"] and (rank != 0 or others_done):  # rank 0 cleans up
            return ()
        if time.monotonic() > deadline:
            return tuple(other for other in others if other not in met)
        time.sleep(_PAUSE)


class _Place:
    """The folder of the tokens, held open: another user may put a link in its place at any time.

    Files are opened, renamed and removed in this very folder, and no link in it is followed. Raises OSError if the
    folder cannot be used, or belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if os.open not in os.supports_dir_fd:
            raise OSError(f"{path}: this system opens no files by a descriptor of their folder")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self._owner = os.fstat(self._folder).st_uid
            if self._owner != self._owner_of_new_files():  # a server may map the users of its clients
                raise OSError(f"{path} belongs to another user: remove it, or name a folder that only this user writes")
        except BaseException:
            os.close(self._folder)
            raise

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def _owner_of_new_files(self) -> int:
        name, descriptor = self._create("owner")
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
            os.unlink(name, dir_fd=self._folder)

    def _create(self, name: str) -> tuple[str, int]:
        """Return the name and a descriptor of a new file. Nobody can create it before."""
        partial = f"{name}.{os.urandom(8).hex()}.partial"
        return partial, os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=self._folder)

    def write(self, rank: int, state: Mapping[str, Any]) -> None:
        partial, descriptor = self._create(str(rank))
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(state))
        os.replace(partial, f"{rank}.json", src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the content of the file of each of these ranks."""
        try:
            names = self._names()
        except FileNotFoundError:
            return {}
        contents = {rank: self._parse(f"{rank}.json") for rank in ranks if f"{rank}.json" in names}
        return {rank: content for rank, content in contents.items() if content is not None}

    def _names(self) -> frozenset[str]:
        """List the folder. It is opened for each look.

        NFS then asks its server for changes, and it keeps taking a name for absent that was asked for before it was
        there (nfs(5)).
        """
        again = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._folder)
        try:
            return frozenset(os.listdir(again))
        finally:
            os.close(again)

    def _parse(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file, or None if no rank of this user has written it."""
        content = None
        try:  # a FIFO would be waited for without O_NONBLOCK
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_uid == self._owner:
                    with os.fdopen(descriptor, "rb", closefd=False) as file:
                        content = json.loads(file.read(_LARGEST))
            finally:
                os.close(descriptor)
        except (ValueError, RecursionError):
            return None
        except OSError as error:
            if error.errno in (*_GONE, errno.ELOOP, errno.ENXIO):  # The last two are errors of a link and of a socket.
                return None
            raise
        if not isinstance(content, dict) or "done" not in content:
            return None
        return content if isinstance(content.get("token"), str) and isinstance(content.get("seen"), dict) else None

    def remove(self, ranks: Container[int]) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in self._names():
                rank, _, ending = name.partition(".")
                if rank.isdecimal() and int(rank) in ranks and (ending == "json" or ending.endswith("partial")):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=self._folder)
        with contextlib.suppress(OSError):  # other ranks are still there
            self.path.rmdir()
