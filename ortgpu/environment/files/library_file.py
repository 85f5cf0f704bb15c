"""Read library files of any system."""

from __future__ import annotations

import os

from ..libraries.catalogue import is_dll
from .elf import ElfFile, read_elf
from .pe import PeFile, read_pe

LibraryFile = ElfFile | PeFile


def read_library(path: str | os.PathLike[str]) -> LibraryFile:
    """Read a library file. Never raises: see ``problem`` of the result."""
    name = os.fspath(path)
    return read_pe(name) if is_dll(name) or name[-4:].lower() == ".pyd" else read_elf(name)


def needed_by(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the libraries that the loader needs to open this one."""
    return read_library(path).needed
