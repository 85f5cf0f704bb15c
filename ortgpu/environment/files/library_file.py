"""What a library's file says of itself, whichever system it is for."""

from __future__ import annotations

import os

from ..libraries.catalogue import is_dll
from .elf import ElfFile, read_elf
from .pe import PeFile, read_pe

LibraryFile = ElfFile | PeFile


def read_library(path: str | os.PathLike[str]) -> LibraryFile:
    """Never raises: see ``problem`` of either."""
    name = os.fspath(path)
    return read_pe(name) if is_dll(name) or name[-4:].lower() == ".pyd" else read_elf(name)


def needed_by(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The libraries without which the loader opens this one not."""
    return read_library(path).needed
