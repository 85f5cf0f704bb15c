"""Read ELF files: the libraries that they need, their name, their sections, and whether they are complete.

A reader of a few structures of the System V ABI, not a general one: a library must be judged before it is opened
(the loader dies of SIGBUS on a truncated file), in well under a millisecond, and any file at all may be offered.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO

MACHINES = {3: "i386", 21: "ppc64", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}

_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}

_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 14, 15, 29
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_MAX_TABLE = 64 << 20  # bytes; the longest string table seen is that of libcudnn_cnn_infer.so.8, with 7 MB


@dataclass(frozen=True, slots=True)
class ElfFile:
    """An ELF file. ``problem`` is why it cannot be opened as a library, in a few words, or None."""

    path: str
    problem: str | None = None
    machine: str | None = None
    soname: str | None = None
    needed: tuple[str, ...] = ()
    search_path: tuple[str, ...] = ()  # DT_RPATH and DT_RUNPATH entries
    executable_stack: bool | None = None


class _DamagedError(Exception):
    """The bytes are not those of a complete 64-bit little-endian ELF file."""


def read_elf(path: str | os.PathLike[str]) -> ElfFile:
    """Read one file. Never raises for what the file holds or for its absence: see ``ElfFile.problem``."""
    name = os.fspath(path)
    try:
        if stat.S_ISFIFO(os.stat(name).st_mode):
            return ElfFile(name, problem="is a pipe")  # which would be waited for
        with open(name, "rb") as file:
            return _parse(name, file, os.fstat(file.fileno()).st_size)
    except _DamagedError as damage:
        return ElfFile(name, problem=str(damage))
    except OSError as error:
        return ElfFile(name, problem=(error.strerror or str(error)).lower())
    except (ValueError, struct.error, OverflowError, MemoryError):
        return ElfFile(name, problem="damaged ELF file")


def this_machine() -> str:
    """Return the machine that code in this process is for: on Windows that of Python, which may be emulated."""
    if hasattr(os, "uname"):
        return os.uname().machine
    import sysconfig  # a millisecond, of which Linux has no need

    built_for = {"win-amd64": "x86_64", "win-arm64": "aarch64", "win32": "i386"}
    return built_for.get(sysconfig.get_platform()) or platform.machine()


def wrong_machine(machine: str | None, here: str) -> str | None:
    """Return why code for ``machine`` does not run on ``here`` (``os.uname``), or None if it does or is unknown."""
    here = _MACHINE_ALIASES.get(here.lower(), here)
    if machine in (None, here) or here not in MACHINES.values():
        return None
    return f"built for {machine}, this is {here}"


def find_section(path: str | os.PathLike[str], wanted: str) -> tuple[int, int] | None:
    """Return offset and size in bytes of a section, or None if the file has no such section or table."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _header(file, size)
            table = _read(file, header.section_offset, header.section_size * header.section_count, size)
            names_at, names_size = _section(table, header, header.names_index)
            names = _read(file, names_at, names_size, size)
            for index in range(header.section_count):
                (name_at,) = struct.unpack_from("<I", table, index * header.section_size)
                if _string(names, name_at) == wanted:
                    offset, length = _section(table, header, index)
                    return (offset, length) if offset + length <= size else None
    except (OSError, _DamagedError, ValueError, struct.error, OverflowError, MemoryError):
        return None
    return None


def defines(path: str | os.PathLike[str], names: Collection[str]) -> bool:
    """Return True if a library exports one of these functions of its own. False if that cannot be read."""
    symbols, strings = find_section(path, ".dynsym"), find_section(path, ".dynstr")
    if symbols is None or strings is None or max(symbols[1], strings[1]) > _MAX_TABLE:
        return False
    try:
        with open(path, "rb") as file:
            file.seek(symbols[0])
            entries = file.read(symbols[1] - symbols[1] % _SYMBOL.size)
            file.seek(strings[0])
            table = file.read(strings[1])
        defined = (at for at, _, _, section, _, _ in _SYMBOL.iter_unpack(entries) if section)
        return any(_string(table, at) in names for at in defined)
    except (OSError, _DamagedError, ValueError, struct.error, MemoryError):
        return False


@dataclass(frozen=True, slots=True)
class _Header:
    machine: int
    program_offset: int
    program_size: int
    program_count: int
    section_offset: int
    section_size: int
    section_count: int
    names_index: int


def _header(file: BinaryIO, size: int) -> _Header:
    if size == 0:
        raise _DamagedError("empty file")
    start = file.read(64)
    if start[:4] != b"\x7fELF":
        raise _DamagedError("not an ELF file")
    if len(start) < 64:
        raise _DamagedError("truncated: the ELF header is cut")
    if start[4:6] != b"\x02\x01":
        raise _DamagedError("not a 64-bit little-endian ELF file")
    (kind, machine, _, _, program_offset, section_offset, _, _, program_size, program_count, section_size,
     section_count, names_index) = struct.unpack_from("<HHIQQQIHHHHHH", start, 16)  # fmt: skip
    if kind != 3:  # ET_DYN
        raise _DamagedError("not a shared library")
    return _Header(
        machine, program_offset, program_size, program_count, section_offset, section_size, section_count, names_index
    )


def _parse(name: str, file: BinaryIO, size: int) -> ElfFile:
    header = _header(file, size)
    if header.program_count == 0 or header.program_size < 56:
        raise _DamagedError("damaged ELF file: no program headers")
    table = _read(file, header.program_offset, header.program_size * header.program_count, size)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    stack: bool | None = None
    end = header.section_offset + header.section_size * header.section_count
    for index in range(header.program_count):
        kind, flags, offset, address, _, length = struct.unpack_from("<IIQQQQ", table, index * header.program_size)
        if kind == _PT_LOAD:
            loads.append((address, offset, length))
            end = max(end, offset + length)
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, length)
        elif kind == _PT_GNU_STACK:
            stack = bool(flags & 1)
    if end > size:
        raise _DamagedError(f"truncated: {size} of {end} bytes")
    machine = MACHINES.get(header.machine, f"machine {header.machine}")
    if dynamic is None:
        raise _DamagedError("damaged ELF file: no dynamic section")
    entries = _dynamic_entries(_read(file, *dynamic, size))
    strings = _string_table(file, entries, loads, size)

    def all_of(tag: int) -> tuple[str, ...]:
        return tuple(_string(strings, value) for found, value in entries if found == tag)

    paths = all_of(_DT_RPATH) + all_of(_DT_RUNPATH)
    return ElfFile(
        name,
        machine=machine,
        soname=next(iter(all_of(_DT_SONAME)), None),
        needed=all_of(_DT_NEEDED),
        search_path=tuple(part for path in paths for part in path.split(":") if part),
        executable_stack=stack,
    )


def _dynamic_entries(data: bytes) -> list[tuple[int, int]]:
    entries = []
    for at in range(0, len(data) - 15, 16):
        tag, value = struct.unpack_from("<QQ", data, at)
        if tag == 0:
            break
        entries.append((tag, value))
    return entries


def _string_table(
    file: BinaryIO, entries: list[tuple[int, int]], loads: list[tuple[int, int, int]], size: int
) -> bytes:
    values = dict(entries)
    address, length = values.get(_DT_STRTAB), values.get(_DT_STRSZ)
    if address is None or length is None:
        raise _DamagedError("damaged ELF file: no string table")
    for start, offset, span in loads:
        if start <= address < start + span:
            return _read(file, offset + address - start, length, size)
    raise _DamagedError("damaged ELF file: string table outside every segment")


def _section(table: bytes, header: _Header, index: int) -> tuple[int, int]:
    offset, length = struct.unpack_from("<QQ", table, index * header.section_size + 24)
    return offset, length


def _read(file: BinaryIO, offset: int, length: int, size: int) -> bytes:
    if length > _MAX_TABLE:
        raise _DamagedError("damaged ELF file: absurd table size")
    if offset + length > size:
        raise _DamagedError(f"truncated: {size} bytes, tables reach to {offset + length}")
    file.seek(offset)
    return file.read(length)


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at)
    if at >= len(table) or end < 0:
        raise _DamagedError("damaged ELF file: string outside its table")
    return table[at:end].decode("utf-8", "replace")
