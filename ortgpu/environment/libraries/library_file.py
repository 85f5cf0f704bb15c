"""Read library files, ELF and PE (DLLs of Windows): name, needs, machine, sections, and whether they are complete.

These readers know a few structures of the System V ABI and of Microsoft's "PE Format". A library must be judged before
it is opened (the loader dies of SIGBUS on a truncated file), in well under a millisecond, without a dependency. The
readers accept any file, and run on every system.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, BinaryIO

from ...process.late import late

if TYPE_CHECKING:
    import sysconfig
else:
    sysconfig = late("sysconfig")

# Both tables use the same names for the same processors.
_ELF_MACHINES = {3: "i386", 21: "ppc64", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_DLL_MACHINES = {0x014C: "i386", 0x01C4: "arm", 0x8664: "x86_64", 0xAA64: "aarch64"}
_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}

_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 14, 15, 29
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_MAX_TABLE = 64 << 20  # bytes; the longest string table seen has 7 MB (libcudnn_cnn_infer.so.8)

_IS_DLL = 0x2000  # IMAGE_FILE_DLL
_EXPORTS, _IMPORTS, _DELAYED_IMPORTS = 0, 1, 13  # indices of data directories
_MAX_ENTRIES = 4096  # libraries of one table; some twenty are usual
_MAX_NAMES = 1 << 20  # functions of one library
_MAX_NAME = 4096  # bytes


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """An ELF file or a DLL. ``problem`` is a short reason why it cannot be opened as a library, or None."""

    path: str
    problem: str | None = None
    machine: str | None = None
    soname: str | None = None  # SONAME of an ELF file
    needed: tuple[str, ...] = ()  # DT_NEEDED, or the DLLs that it needs to be opened
    search_path: tuple[str, ...] = ()  # DT_RPATH and DT_RUNPATH entries
    executable_stack: bool | None = None
    name: str | None = None  # name that the linker wrote into a DLL; a renamed file keeps it
    delayed: tuple[str, ...] = ()  # DLLs that are opened at the first call


class _DamagedError(Exception):
    """The bytes are no complete library."""


_UNREADABLE = (OSError, _DamagedError, ValueError, struct.error, OverflowError, MemoryError)


def _kind_of(path: str | os.PathLike[str]) -> type[_Elf | _Dll]:
    return _Dll if os.fspath(path)[-4:].lower() in (".dll", ".pyd") else _Elf


def read_library(path: str | os.PathLike[str]) -> LibraryFile:
    """Read one file. Never raises for its content or its absence: see ``problem`` of the result."""
    name, kind = os.fspath(path), _kind_of(path)
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISFIFO(mode):
            return LibraryFile(name, "is a pipe")  # Opening it would wait for a writer.
        if stat.S_ISDIR(mode):
            return LibraryFile(name, "is a directory")  # Windows would answer with "permission denied".
        with open(name, "rb") as file:
            return kind(file).describe(name)
    except _DamagedError as damage:
        return LibraryFile(name, str(damage))
    except OSError as error:
        return LibraryFile(name, (error.strerror or str(error)).lower())
    except _UNREADABLE:
        return LibraryFile(name, kind.DAMAGED)


def this_machine() -> str:
    """Return the machine of code in this process. On Windows it is Python's machine, and may be emulated."""
    if hasattr(os, "uname"):
        return os.uname().machine
    built_for = {"win-amd64": "x86_64", "win-arm64": "aarch64", "win32": "i386"}
    return built_for.get(sysconfig.get_platform()) or platform.machine()


def wrong_machine(machine: str | None, here: str) -> str | None:
    """Return why code for ``machine`` does not run on ``here`` (``os.uname``), or None if it does or is unknown."""
    here = _MACHINE_ALIASES.get(here.lower(), here)
    if machine in (None, here) or here not in _ELF_MACHINES.values():
        return None
    return f"built for {machine}, this is {here}"


def find_section(path: str | os.PathLike[str], wanted: str) -> tuple[int, int] | None:
    """Return offset and size in bytes of a section, or None if the file has no such section, or is damaged."""
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        return _kind_of(path)(file).find_section(wanted)
    return None


def read_section(path: str | os.PathLike[str], wanted: str) -> bytes | None:
    """Return the content of a section, or None if the file has no such section, or is damaged."""
    # The file is not mapped, because the process dies if another one truncates a mapped file.
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        section = _kind_of(path)(file).find_section(wanted)
        if section is not None:
            file.seek(section[0])
            return file.read(section[1])
    return None


_PIECE = 1 << 20  # bytes


def absent_strings(path: str | None, wanted: Sequence[str]) -> list[str]:
    """Return the strings that are not in the read-only data of a library. An unreadable file lacks none."""
    section = find_section(path, ".rodata") if path and wanted else None
    if section is None or path is None:
        return []
    offset, size = section
    missing, end = list(wanted), offset + size
    try:
        overlap = max(len(name.encode()) for name in wanted)
        with open(path, "rb") as file:  # It is not mapped, as in read_section.
            # The options of 1.31.1's provider stand in the last hundredth, so a search from the end saves 10 ms.
            while missing and end > offset:
                start = max(offset, end - _PIECE)
                file.seek(start)
                piece = file.read(min(end + overlap, offset + size) - start)
                missing = [name for name in missing if name.encode() + b"\0" not in piece]
                end = start
    except (OSError, ValueError):
        return []
    return missing


def defines(path: str | os.PathLike[str], names: Collection[str]) -> bool:
    """Return True if an ELF file defines and exports one of these functions. False if that cannot be read."""
    return _has_symbol(path, names, defined=True)


def borrows(path: str | os.PathLike[str], names: Collection[str]) -> bool:
    """Return True if a library takes one of these functions from another file. False if that cannot be read."""
    if _kind_of(path) is _Elf:
        return _has_symbol(path, names, defined=False)
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        image = _Dll(file)
        return any(name in names for _, table in image.imports() for name in image.names_in(table))
    return False


def _has_symbol(path: str | os.PathLike[str], names: Collection[str], *, defined: bool) -> bool:
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        elf = _Elf(file)
        symbols, strings = elf.find_section(".dynsym"), elf.find_section(".dynstr")
        if symbols is not None and strings is not None:
            entries, table = elf.read(*symbols), elf.read(*strings)
            whole = entries[: len(entries) - len(entries) % _SYMBOL.size]
            fitting = (at for at, _, _, section, _, _ in _SYMBOL.iter_unpack(whole) if bool(section) is defined)
            return any(_string(table, at) in names for at in fitting)
    return False


def imported_names(path: str | os.PathLike[str], library: str) -> frozenset[str] | None:
    """Return the functions that a DLL imports by name from ``library``; None if that cannot be read."""
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        image = _Dll(file)
        tables = [table for name, table in image.imports() if name.lower() == library.lower()]
        return frozenset(name for table in tables for name in image.names_in(table))
    return None


def exported_names(path: str | os.PathLike[str]) -> frozenset[str] | None:
    """Return the functions that a DLL exports by name; None if that cannot be read."""
    with suppress(*_UNREADABLE), open(path, "rb") as file:
        return frozenset(_Dll(file).exports())
    return None


class _Image:
    """An open file with the first bytes of a library."""

    def __init__(self, file: BinaryIO, magic: bytes, kind: str) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._start = file.read(64)
        if not self._start:
            raise _DamagedError("empty file")
        if not self._start.startswith(magic):
            raise _DamagedError(f"not {kind}")
        if len(self._start) < 64:
            raise _DamagedError("truncated: the header is cut")

    def read(self, offset: int, length: int) -> bytes:
        if length > _MAX_TABLE:
            raise _DamagedError("damaged: absurd table size")
        if offset + length > self._size:
            raise _DamagedError(f"truncated: {self._size} bytes, tables reach to {offset + length}")
        self._file.seek(offset)
        return self._file.read(length)


class _Elf(_Image):
    DAMAGED = "damaged ELF file"

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, b"\x7fELF", "an ELF file")
        start = self._start
        if start[4:6] != b"\x02\x01":
            raise _DamagedError("not a 64-bit little-endian ELF file")
        kind, self._machine, _, _, self._programs_at, self._sections_at = struct.unpack_from("<HHIQQQ", start, 16)
        self._program_size, self._program_count = struct.unpack_from("<HH", start, 54)
        self._section_size, self._section_count, self._names_index = struct.unpack_from("<HHH", start, 58)
        if kind != 3:  # ET_DYN
            raise _DamagedError("not a shared library")

    def find_section(self, wanted: str) -> tuple[int, int] | None:
        table = self.read(self._sections_at, self._section_size * self._section_count)
        names = self.read(*self._section(table, self._names_index))
        for index in range(self._section_count):
            (name_at,) = struct.unpack_from("<I", table, index * self._section_size)
            if _string(names, name_at) == wanted:
                offset, length = self._section(table, index)
                return (offset, length) if offset + length <= self._size else None
        return None

    def _section(self, table: bytes, index: int) -> tuple[int, int]:
        offset, length = struct.unpack_from("<QQ", table, index * self._section_size + 24)
        return offset, length

    def describe(self, path: str) -> LibraryFile:
        if self._program_count == 0 or self._program_size < 56:
            raise _DamagedError(f"{self.DAMAGED}: no program headers")
        table = self.read(self._programs_at, self._program_size * self._program_count)
        loads: list[tuple[int, int, int]] = []
        dynamic: tuple[int, int] | None = None
        stack: bool | None = None
        end = self._sections_at + self._section_size * self._section_count
        for index in range(self._program_count):
            kind, flags, offset, address, _, length = struct.unpack_from("<IIQQQQ", table, index * self._program_size)
            if kind == _PT_LOAD:
                loads.append((address, offset, length))
                end = max(end, offset + length)
            elif kind == _PT_DYNAMIC:
                dynamic = (offset, length)
            elif kind == _PT_GNU_STACK:
                stack = bool(flags & 1)
        if end > self._size:
            raise _DamagedError(f"truncated: {self._size} of {end} bytes")
        if dynamic is None:
            raise _DamagedError(f"{self.DAMAGED}: no dynamic section")
        table = self.read(*dynamic)
        entries = list(takewhile(itemgetter(0), struct.iter_unpack("<QQ", table[: len(table) & ~15])))
        strings = self._string_table(dict(entries), loads)
        names: dict[int, list[str]] = {_DT_NEEDED: [], _DT_SONAME: [], _DT_RPATH: [], _DT_RUNPATH: []}
        for tag, value in entries:
            if tag in names:
                names[tag].append(_string(strings, value))
        paths = ":".join(names[_DT_RPATH] + names[_DT_RUNPATH])
        return LibraryFile(
            path,
            machine=_ELF_MACHINES.get(self._machine, f"machine {self._machine}"),
            soname=next(iter(names[_DT_SONAME]), None),
            needed=tuple(names[_DT_NEEDED]),
            search_path=tuple(filter(None, paths.split(":"))),
            executable_stack=stack,
        )

    def _string_table(self, values: dict[int, int], loads: list[tuple[int, int, int]]) -> bytes:
        address, length = values.get(_DT_STRTAB), values.get(_DT_STRSZ)
        if address is None or length is None:
            raise _DamagedError(f"{self.DAMAGED}: no string table")
        for start, offset, span in loads:
            if start <= address < start + span:
                return self.read(offset + address - start, length)
        raise _DamagedError(f"{self.DAMAGED}: string table outside every segment")


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at)
    if at >= len(table) or end < 0:
        raise _DamagedError(f"{_Elf.DAMAGED}: string outside its table")
    return table[at:end].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    address: int  # All addresses here are relative to the image.
    in_memory: int
    offset: int
    size: int  # bytes in the file


class _Dll(_Image):
    DAMAGED = "damaged PE file"

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, b"MZ", "a DLL")
        (at,) = struct.unpack_from("<I", self._start, 60)
        head = self.read(at, 24)
        if head[:4] != b"PE\0\0":
            raise _DamagedError("not a DLL: a program for DOS or a damaged file")
        self._machine, count, _, _, _, optional_size, flags = struct.unpack_from("<HHIIIHH", head, 4)
        optional = self.read(at + 24, optional_size)
        self._wide = {0x10B: False, 0x20B: True}.get(struct.unpack_from("<H", optional)[0])
        if self._wide is None:
            raise _DamagedError(f"{self.DAMAGED}: neither 32 nor 64 bits")
        if not flags & _IS_DLL:
            raise _DamagedError("not a DLL: a program")
        first = 112 if self._wide else 96  # the data directories
        (self._base,) = struct.unpack_from("<Q" if self._wide else "<I", optional, 24 if self._wide else 28)
        (number,) = struct.unpack_from("<I", optional, first - 4)
        self._directories = list(struct.iter_unpack("<II", optional[first : first + 8 * min(number, 16)]))
        self._sections = tuple(self._read_sections(self.read(at + 24 + optional_size, 40 * count)))
        end = max((section.offset + section.size for section in self._sections), default=0)
        if not self._sections:
            raise _DamagedError(f"{self.DAMAGED}: no sections")
        if end > self._size:
            raise _DamagedError(f"truncated: {self._size} of {end} bytes")

    @staticmethod
    def _read_sections(table: bytes) -> Iterator[_Section]:
        for at in range(0, len(table), 40):
            name, in_memory, address, size, offset = struct.unpack_from("<8sIIII", table, at)
            yield _Section(name.rstrip(b"\0").decode("utf-8", "replace"), address, in_memory, offset, size)

    def describe(self, path: str) -> LibraryFile:
        address, _ = self._directory(_EXPORTS)
        return LibraryFile(
            path,
            machine=_DLL_MACHINES.get(self._machine, f"machine {self._machine:#x}"),
            name=self._string(struct.unpack_from("<I", self._at(address, 40), 12)[0]) if address else None,
            needed=tuple(name for name, _ in self.imports()),
            delayed=tuple(self._delayed_imports()),
        )

    def find_section(self, wanted: str) -> tuple[int, int] | None:
        name = ".rdata" if wanted == ".rodata" else wanted
        sections = (section for section in self._sections if section.name == name)
        return next(((section.offset, min(section.size, section.in_memory)) for section in sections), None)

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each imported library, and the address of the table of its functions."""
        address, _ = self._directory(_IMPORTS)
        for at in range(address, address + 20 * _MAX_ENTRIES, 20) if address else ():
            lookup, _, _, name, bound = struct.unpack("<IIIII", self._at(at, 20))
            if name == 0:
                return
            yield self._string(name), lookup or bound

    def _delayed_imports(self) -> Iterator[str]:
        address, _ = self._directory(_DELAYED_IMPORTS)
        for at in range(address, address + 32 * _MAX_ENTRIES, 32) if address else ():
            attributes, name = struct.unpack("<II", self._at(at, 8))
            if name == 0:
                return
            # Bit 0 says that addresses are relative. Before Visual C++ 7 they were absolute.
            yield self._string(name if attributes & 1 else name - self._base)

    def names_in(self, table: int) -> Iterator[str]:
        width, form = (8, "<Q") if self._wide else (4, "<I")
        for at in range(table, table + width * _MAX_NAMES, width):
            (entry,) = struct.unpack(form, self._at(at, width))
            if entry == 0:
                return
            if not entry >> (8 * width - 1):  # A set bit marks a number instead of a name.
                yield self._string(entry + 2)

    def exports(self) -> Iterator[str]:
        address, _ = self._directory(_EXPORTS)
        if not address:
            return
        number, _, table = struct.unpack_from("<III", self._at(address, 40), 24)
        for (name,) in struct.iter_unpack("<I", self._at(table, 4 * number) if number else b""):
            yield self._string(name)

    def _directory(self, number: int) -> tuple[int, int]:
        return self._directories[number] if number < len(self._directories) else (0, 0)

    def _at(self, address: int, length: int) -> bytes:
        data = self._mapped(address, length)
        if len(data) < length:
            raise _DamagedError(f"{self.DAMAGED}: a table outside every section")
        return data

    def _mapped(self, address: int, length: int) -> bytes:
        """Return the bytes at an address; fewer than ``length`` if the section ends before."""
        for section in self._sections:
            if section.address <= address < section.address + section.size:
                within = address - section.address
                return self.read(section.offset + within, min(length, section.size - within))
        raise _DamagedError(f"{self.DAMAGED}: a table outside every section")

    def _string(self, address: int) -> str:
        text, end, _ = self._mapped(address, _MAX_NAME).partition(b"\0")
        if not end or not text:
            raise _DamagedError(f"{self.DAMAGED}: a name outside its table")
        return text.decode("utf-8", "replace")
