"""Facts about NCCL: its copies, the one that would be loaded, and what each reports. No GPU is needed.

nccl4py and torch open the library of NVIDIA's wheel first. A program that is linked against NCCL gets the loader's. So
two parts of one job may use two copies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ...environment.child import run_python
from ...environment.files.elf import find_section
from ...environment.files.loader_cache import read_loader_cache
from ...environment.libraries.places import SearchPlaces, Source, absolute, conda_prefixes
from ...environment.libraries.places_linux import DEFAULT_FOLDERS
from ...environment.libraries.search import places_of_this_process

_SONAME: Final = "libnccl.so.2"
_ASK_VERSION: Final = """
import ctypes
number = ctypes.c_int()
status = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print(number.value if status == 0 else f"ncclGetVersion: {status}")
"""


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """One copy of libnccl.so.2. None means unknown."""

    path: str
    source: Source
    version: tuple[int, int, int] | None  # ncclGetVersion
    cuda_version: tuple[int, int] | None  # the CUDA that it was compiled with
    error: str | None = None  # why it cannot be loaded

    def __str__(self) -> str:
        version = ".".join(map(str, self.version)) if self.version else self.error or "of unknown version"
        cuda = f", for CUDA {'.'.join(map(str, self.cuda_version))}" if self.cuda_version else ""
        return f"{version}{cuda}: {self.path} ({self.source})"


@dataclass(frozen=True, slots=True)
class Nccl:
    """The copies of NCCL. The first is the one that would be loaded."""

    libraries: tuple[NcclLibrary, ...]

    @property
    def chosen(self) -> NcclLibrary | None:
        return self.libraries[0] if self.libraries else None


def read_nccl(places: SearchPlaces | None = None, *, timeout: float = 20.0) -> Nccl:
    """Find the copies of NCCL, and load each in a child process to ask for its version. Nothing raises."""
    found = find_nccl(places_of_this_process() if places is None else places)
    return Nccl(tuple(_read(path, source, timeout) for source, path in found))


def find_nccl(places: SearchPlaces) -> tuple[tuple[Source, str], ...]:
    """Return each copy once, in the order of cuda-pathfinder, with which nccl4py loads it.

    That order is: already loaded, NVIDIA's wheels, conda, the system loader.
    """
    found: dict[str, tuple[Source, str]] = {}
    for source, path in _candidates(places):
        if os.path.isfile(path):
            found.setdefault(os.path.realpath(path), (source, path))
    return tuple(found.values())


def _candidates(places: SearchPlaces) -> Iterator[tuple[Source, str]]:
    for path in places.mapped:
        if os.path.basename(path).startswith(_SONAME):
            yield "already loaded", path
    for entry in map(absolute, places.sys_path):
        yield "nvidia wheels", os.path.join(entry, "nvidia", "nccl", "lib", _SONAME)
    for prefix in conda_prefixes(places):
        yield "conda", os.path.join(prefix, "lib", _SONAME)
    for folder in map(absolute, filter(None, places.start_library_path.split(":"))):
        yield "system loader", os.path.join(folder, _SONAME)
    yield "system loader", read_loader_cache(places.filesystem / "etc/ld.so.cache").get(_SONAME, "")
    for name in DEFAULT_FOLDERS:
        yield "system loader", str(places.filesystem / name / _SONAME)


def parse_version_number(number: int) -> tuple[int, int, int]:
    """Return 2.28.9 for 22809. Before 2.9 it had one digit less: 2708 is 2.7.8 (NCCL_VERSION in nccl.h)."""
    major = 10_000 if number >= 10_000 else 1_000
    return number // major, number % major // 100, number % 100


def parse_compiled_cuda(data: bytes) -> tuple[int, int] | None:
    """Return the CUDA in the text "NCCL version 2.28.9+cuda13.0", which NCCL prints when NCCL_DEBUG=VERSION."""
    at = -1
    while (at := data.find(b"NCCL version ", at + 1)) >= 0:
        if match := re.compile(rb"NCCL version [0-9.]+\+cuda([0-9]{1,3})\.([0-9]{1,3})\0").match(data, at):
            return int(match[1]), int(match[2])
    return None


def _read(path: str, source: Source, timeout: float) -> NcclLibrary:
    ended = run_python(_ASK_VERSION, path, timeout=timeout)
    said = ended.output.strip()
    if ended.ok and said.isdigit():
        return NcclLibrary(path, source, parse_version_number(int(said)), _read_compiled_cuda(path))
    lines = [said, *ended.errors.strip().splitlines()[-1:], f"ended with {ended.returncode}"]
    error = f"no answer within {timeout:g} s" if ended.timed_out else next(filter(None, lines))
    return NcclLibrary(path, source, None, _read_compiled_cuda(path), error)


def _read_compiled_cuda(path: str) -> tuple[int, int] | None:
    section = find_section(path, ".rodata")  # a few MB of a file of hundreds
    if section is None:
        return None
    try:
        with open(path, "rb") as file:
            file.seek(section[0])
            return parse_compiled_cuda(file.read(section[1]))
    except OSError:
        return None
