"""Read the metadata of installed distributions from disk: metadata folders, RECORD. Never raises."""

from __future__ import annotations

import csv
import io
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

# Linux describes itself in files below this folder. Windows has none: /etc and /proc of MSYS2 or Wine do not count.
LINUX_ROOT: Final[Path | None] = None if sys.platform == "win32" else Path("/")

# The loader searches these folders below the root by default: ld.so(8), and Debian's additions.
DEFAULT_FOLDERS: Final = (
    *(f"{above}/{name}-linux-gnu" for name in ("x86_64", "aarch64") for above in ("lib", "usr/lib")),
    *("lib64", "usr/lib64", "lib", "usr/lib"),
)


@dataclass(frozen=True, slots=True)
class Place:
    folder: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class MetadataFolder:
    """The dist-info or egg-info folder of a distribution."""

    name: str
    version: str | None
    location: str
    folder: str  # name of the folder below location

    def read(self, file: str) -> bytes | None:
        return read_file(os.path.join(self.location, self.folder, file))

    def read_version(self) -> str | None:
        return self.version or parse_metadata_version(self.read("METADATA") or self.read("PKG-INFO") or b"")


class RecordEntry(NamedTuple):
    path: str  # relative to the folder that holds the dist-info, written with forward slashes
    digest: str  # "sha256=..." or ""
    size: int | None


def search_path(entries: Iterable[object] | None = None) -> list[str]:
    """Return the strings of ``sys.path``, or of ``entries``. The import system ignores other entries, too."""
    return [entry for entry in (sys.path if entries is None else entries) if isinstance(entry, str)]


def list_places(entries: Iterable[object] | None = None) -> list[Place]:
    """Return the readable folders of :func:`search_path`, each once, in order. Never raises."""
    places: dict[str, Place] = {}
    for entry in search_path(entries):
        try:
            folder = os.path.abspath(entry)
            names = frozenset(os.listdir(folder))
        except (OSError, ValueError):  # It is absent, a file, a zip, unreadable, or no path at all.
            continue
        # lib64 is a link to lib in many environments. Both are one place with one owner.
        places.setdefault(os.path.realpath(folder), Place(folder, names))
    return list(places.values())


def list_distributions(place: Place) -> Iterator[MetadataFolder]:
    for name in sorted(place.names):
        parsed = parse_metadata_name(name)
        if parsed is not None:
            yield MetadataFolder(*parsed, place.folder, name)


def parse_metadata_name(folder: str) -> tuple[str, str | None] | None:
    """Return the normalised name and version in the name of a metadata folder; None for any other name."""
    stem, ending = os.path.splitext(folder)
    if ending not in (".dist-info", ".egg-info") or not stem[:1].isalnum():
        return None  # An interrupted pip leaves "~nnxruntime-1.dist-info", and ignores it later.
    name, _, version = stem.partition("-")
    if ending == ".egg-info":
        version = re.sub(r"-py[0-9].*$", "", version)
    return re.sub(r"[-_.]+", "-", name).lower(), version or None


def parse_metadata_version(data: bytes) -> str | None:
    head = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[0]
    match = re.search(rb"^Version:[ \t]*([!-~]{1,100})[ \t\r]*$", head, re.MULTILINE | re.IGNORECASE)
    return match[1].decode("ascii") if match else None


def parse_record(data: bytes) -> tuple[RecordEntry, ...] | None:
    """Return the entries of a RECORD, or None if any part of it is malformed."""
    if b"\0" in data:
        return None
    entries = []
    try:
        for row in csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
            if not row:
                continue
            path, digest, size = row
            if not path or (digest and "=" not in digest):
                return None
            if size and not (size.isascii() and size.isdigit() and len(size) < 20):
                return None
            entries.append(RecordEntry(path.replace("\\", "/"), digest, int(size) if size else None))
    except (csv.Error, ValueError):
        return None
    return tuple(entries) or None  # A RECORD lists at least itself.


def parse_assignments(text: str) -> dict[str, str]:
    """Return strings that a Python file assigns at its top level: ``name = 'value'``, annotated or not."""
    pattern = r"""^(\w+)[ \t]*(?::[^=\n]*)?=[ \t]*(["'])([^"'\n]*)\2"""
    return {match[1]: match[3] for match in re.finditer(pattern, text, re.MULTILINE)}


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers in a version, or in a name that ends in one: 12 and 8 of "12.8" and of "cuda-12.8"."""
    return tuple(map(int, re.findall(r"[0-9]+", version)))


def parse_cuda_version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", text or "")
    return (int(match[1]), int(match[2])) if match else None


def absolute(path: str) -> str:
    """Return an absolute path, since the working directory may change; empty if that directory is gone."""
    path = path.replace("/", os.sep)
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except OSError:
        return ""


def list_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder; none if it is absent, unreadable, not a folder, or not a path at all."""
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text, with invalid UTF-8 replaced; empty if it cannot be read."""
    return (read_file(path) or b"").decode("utf-8", "replace")


def read_below(root: Path | None, name: str) -> str:
    """Return the text of a file of :data:`LINUX_ROOT`, or of another root; empty if it cannot be read."""
    return read_text(root / name) if root is not None else ""


def read_file(path: str | os.PathLike[str]) -> bytes | None:
    """Return a file's content. None if it cannot be read, or is a pipe or device: reading one may never end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def read_maps() -> str:
    return (read_file("/proc/self/maps") or b"").decode("utf-8", "surrogateescape")


def mapped_libraries(maps: str, address: int | None = None) -> tuple[str, ...]:
    """Return the paths of the shared objects in the text of a maps file, each once, or only the one at ``address``."""
    paths: dict[str, None] = {}
    for line in maps.splitlines():
        if "/" in line and ".so" in line:
            extent, _, _, _, _, path = line.split(None, 5)
            start, end = extent.split("-")
            if address is None or int(start, 16) <= address < int(end, 16):
                paths[path.strip().removesuffix(" (deleted)")] = None
    return tuple(paths)
