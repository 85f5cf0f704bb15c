"""Read PE files (DLLs of Windows): machine, needed libraries, name, and whether they are complete.

A reader of a few structures of Microsoft's "PE Format", not a general one, as :mod:`.elf` is for Linux: in well under a
millisecond, without a dependency, and any file at all may be offered. It runs on every system.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

# By the names that elf.py has for the same processors.
MACHINES = {0x014C: "i386", 0x01C4: "arm", 0x8664: "x86_64", 0xAA64: "aarch64"}

_DLL = 0x2000  # IMAGE_FILE_DLL
_EXPORTS, _IMPORTS, _DELAYED_IMPORTS = 0, 1, 13  # of the data directories
_MAX_ENTRIES = 4096  # libraries of one table; some twenty are usual
_MAX_NAMES = 1 << 20  # functions of one library
_MAX_NAME = 4096  # bytes
_DAMAGED = "damaged PE file"


@dataclass(frozen=True, slots=True)
class PeFile:
    """A DLL. ``problem`` is why it cannot be opened as a library, in a few words, or None."""

    path: str
    problem: str | None = None
    machine: str | None = None
    name: str | None = None  # that the linker gave it; a file that was renamed keeps it
    needed: tuple[str, ...] = ()  # DLLs without which it is not opened
    delayed: tuple[str, ...] = ()  # DLLs that are opened at the first call


class _DamagedError(Exception):
    """The bytes are not those of a complete DLL."""


_UNREADABLE = (OSError, _DamagedError, ValueError, struct.error, OverflowError, MemoryError)


def read_pe(path: str | os.PathLike[str]) -> PeFile:
    """Read one file. Never raises for what the file holds or for its absence: see ``PeFile.problem``."""
    name = os.fspath(path)
    try:
        if stat.S_ISFIFO(os.stat(name).st_mode):
            return PeFile(name, problem="is a pipe")  # which would be waited for
        with open(name, "rb") as file:
            image = _Image(file)
            return PeFile(
                name,
                machine=MACHINES.get(image.machine, f"machine {image.machine:#x}"),
                name=image.own_name(),
                needed=tuple(each for each, _ in image.imports()),
                delayed=tuple(image.delayed_imports()),
            )
    except _DamagedError as damage:
        return PeFile(name, problem=str(damage))
    except OSError as error:
        return PeFile(name, problem=(error.strerror or str(error)).lower())
    except (ValueError, struct.error, OverflowError, MemoryError):
        return PeFile(name, problem=_DAMAGED)


def find_section(path: str | os.PathLike[str], wanted: str) -> tuple[int, int] | None:
    """Return offset and size in bytes of a section, or None if the file has no such section, or is damaged."""
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        for one in _Image(file).sections:
            if one.name == wanted:
                return one.offset, min(one.size, one.in_memory)
    return None


def imported_names(path: str | os.PathLike[str], library: str) -> frozenset[str] | None:
    """Return the functions that a DLL imports by name from ``library``; None if that cannot be read."""
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        image = _Image(file)
        tables = [table for name, table in image.imports() if name.lower() == library.lower()]
        return frozenset(name for table in tables for name in image.names_in(table))
    return None


def exported_names(path: str | os.PathLike[str]) -> frozenset[str] | None:
    """Return the functions that a DLL exports by name; None if that cannot be read."""
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        return frozenset(_Image(file).exports())
    return None


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    address: int  # relative to the image, as all addresses here
    in_memory: int
    offset: int
    size: int  # in the file


class _Image:
    """An open file whose headers are whole, and whose sections lie within it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        start = file.read(64)
        if not start:
            raise _DamagedError("empty file")
        if start[:2] != b"MZ":
            raise _DamagedError("not a DLL")
        if len(start) < 64:
            raise _DamagedError("truncated: the header is cut")
        (at,) = struct.unpack_from("<I", start, 60)
        head = self._read(at, 24)
        if head[:4] != b"PE\0\0":
            raise _DamagedError("not a DLL: a program for DOS or a damaged file")
        self.machine, count, _, _, _, optional_size, flags = struct.unpack_from("<HHIIIHH", head, 4)
        optional = self._read(at + 24, optional_size)
        self._wide = {0x10B: False, 0x20B: True}.get(struct.unpack_from("<H", optional)[0])
        if self._wide is None:
            raise _DamagedError(f"{_DAMAGED}: neither 32 nor 64 bits")
        if not flags & _DLL:
            raise _DamagedError("not a DLL: a program")
        first = 112 if self._wide else 96  # the data directories
        (self._base,) = struct.unpack_from("<Q" if self._wide else "<I", optional, 24 if self._wide else 28)
        (number,) = struct.unpack_from("<I", optional, first - 4)
        self._directories = list(struct.iter_unpack("<II", optional[first : first + 8 * min(number, 16)]))
        self.sections = tuple(self._sections(self._read(at + 24 + optional_size, 40 * count)))
        end = max((one.offset + one.size for one in self.sections), default=0)
        if not self.sections:
            raise _DamagedError(f"{_DAMAGED}: no sections")
        if end > self._size:
            raise _DamagedError(f"truncated: {self._size} of {end} bytes")

    @staticmethod
    def _sections(table: bytes) -> Iterator[_Section]:
        for at in range(0, len(table), 40):
            name, in_memory, address, size, offset = struct.unpack_from("<8sIIII", table, at)
            yield _Section(name.rstrip(b"\0").decode("utf-8", "replace"), address, in_memory, offset, size)

    def own_name(self) -> str | None:
        address, _ = self._directory(_EXPORTS)
        return self._string(struct.unpack_from("<I", self._at(address, 40), 12)[0]) if address else None

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each imported library, and the address of the table of its functions."""
        address, _ = self._directory(_IMPORTS)
        for at in range(address, address + 20 * _MAX_ENTRIES, 20) if address else ():
            lookup, _, _, name, bound = struct.unpack("<IIIII", self._at(at, 20))
            if name == 0:
                return
            yield self._string(name), lookup or bound

    def delayed_imports(self) -> Iterator[str]:
        address, _ = self._directory(_DELAYED_IMPORTS)
        for at in range(address, address + 32 * _MAX_ENTRIES, 32) if address else ():
            attributes, name = struct.unpack("<II", self._at(at, 8))
            if name == 0:
                return
            # Bit 0 says that addresses are relative; before Visual C++ 7 they were not.
            yield self._string(name if attributes & 1 else name - self._base)

    def names_in(self, table: int) -> Iterator[str]:
        width, form = (8, "<Q") if self._wide else (4, "<I")
        for at in range(table, table + width * _MAX_NAMES, width):
            (entry,) = struct.unpack(form, self._at(at, width))
            if entry == 0:
                return
            if not entry >> (8 * width - 1):  # else it is a number, not a name
                yield self._string(entry + 2)

    def exports(self) -> Iterator[str]:
        address, _ = self._directory(_EXPORTS)
        if not address:
            return
        number, _, table = struct.unpack_from("<III", self._at(address, 40), 24)
        if number > _MAX_NAMES:
            raise _DamagedError(f"{_DAMAGED}: absurd table size")
        for (name,) in struct.iter_unpack("<I", self._at(table, 4 * number) if number else b""):
            yield self._string(name)

    def _directory(self, number: int) -> tuple[int, int]:
        return self._directories[number] if number < len(self._directories) else (0, 0)

    def _at(self, address: int, length: int) -> bytes:
        data = self._mapped(address, length)
        if len(data) < length:
            raise _DamagedError(f"{_DAMAGED}: a table outside every section")
        return data

    def _mapped(self, address: int, length: int) -> bytes:
        """Return the bytes at an address; fewer than ``length`` if the section ends before."""
        for one in self.sections:
            if one.address <= address < one.address + one.size:
                within = address - one.address
                return self._read(one.offset + within, min(length, one.size - within))
        raise _DamagedError(f"{_DAMAGED}: a table outside every section")

    def _string(self, address: int) -> str:
        text, end, _ = self._mapped(address, _MAX_NAME).partition(b"\0")
        if not end or not text:
            raise _DamagedError(f"{_DAMAGED}: a name outside its table")
        return text.decode("utf-8", "replace")

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length > self._size:
            raise _DamagedError(f"truncated: {self._size} bytes, headers reach to {offset + length}")
        self._file.seek(offset)
        return self._file.read(length)
