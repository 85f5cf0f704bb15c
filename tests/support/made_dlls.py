"""DLLs of a few kilobytes, as Microsoft's "PE Format" has them: names, imports, exports and sections, and no code."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

X86_64, I386, ARM64 = 0x8664, 0x014C, 0xAA64
EXECUTABLE, LARGE, IS_DLL = 0x0002, 0x0020, 0x2000

_BASE = 0x180000000
_PAGE, _BLOCK, _HEADERS = 0x1000, 0x200, 0x400
_PE_AT = 0x80


class _Data:
    """The contents of one section, which lies at an address; what is put into it is found again by address."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.bytes = bytearray()

    def put(self, data: bytes) -> int:
        self.bytes += bytes(-len(self.bytes) % 8)
        at = self.address + len(self.bytes)
        self.bytes += data
        return at

    def text(self, text: str, before: bytes = b"") -> int:
        return self.put(before + text.encode() + b"\0")


def dll(
    name: str | None = "made.dll",
    needs: Mapping[str, Sequence[str]] | Sequence[str] = (),
    *,
    delayed: Sequence[str] = (),
    exports: Sequence[str] = (),
    machine: int = X86_64,
    flags: int = EXECUTABLE | LARGE | IS_DLL,
    sections: Mapping[str, bytes] | None = None,
) -> bytes:
    """``needs``: the DLLs that it links, each with the functions that it takes by name."""
    wide = machine != I386
    data = _Data(_PAGE)
    taken = dict(needs) if isinstance(needs, Mapping) else {each: ["call"] for each in needs}
    directories = {
        0: _exports(data, name, sorted(exports)),
        1: _imports(data, taken, wide),
        13: _delayed(data, delayed),
    }
    contents = {".rdata": bytes(data.bytes), **(sections or {})}
    table, bodies, address, offset = b"", b"", _PAGE, _HEADERS
    for title, body in contents.items():
        padded = body + bytes(-len(body) % _BLOCK)
        table += struct.pack(
            "<8sIIIIIIHHI", title.encode(), len(body), address, len(padded), offset, 0, 0, 0, 0, 0x40000040
        )
        bodies, offset = bodies + padded, offset + len(padded)
        address += len(body) + -len(body) % _PAGE
    optional = _optional(wide, address, directories)
    head = struct.pack("<4sHHIIIHH", b"PE\0\0", machine, len(contents), 0, 0, 0, len(optional), flags)
    start = b"MZ".ljust(60, b"\0") + struct.pack("<I", _PE_AT)
    return (start.ljust(_PE_AT, b"\0") + head + optional + table).ljust(_HEADERS, b"\0") + bodies


def _optional(wide: bool, size: int, directories: Mapping[int, tuple[int, int]]) -> bytes:
    base = struct.pack("<Q", _BASE) if wide else struct.pack("<II", 0, _BASE & 0x7FFFFFFF)
    head = struct.pack("<HBBIIIII", 0x20B if wide else 0x10B, 14, 0, 0, 0, 0, 0, _PAGE) + base
    head += struct.pack("<IIHHHHHHIIIIHH", _PAGE, _BLOCK, 6, 0, 0, 0, 6, 0, 0, size, _HEADERS, 0, 2, 0x0160)
    head += struct.pack("<QQQQ" if wide else "<IIII", 1 << 20, 1 << 12, 1 << 20, 1 << 12) + struct.pack("<II", 0, 16)
    return head + b"".join(struct.pack("<II", *directories.get(number, (0, 0))) for number in range(16))


def _exports(data: _Data, name: str | None, functions: Sequence[str]) -> tuple[int, int]:
    if name is None:
        return 0, 0
    called = data.text(name)
    names = [data.text(each) for each in functions]
    addresses = data.put(struct.pack(f"<{len(names)}I", *[_PAGE] * len(names)))
    pointers = data.put(struct.pack(f"<{len(names)}I", *names))
    numbers = data.put(struct.pack(f"<{len(names)}H", *range(len(names))))
    count = len(names)
    table = struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, called, 1, count, count, addresses, pointers, numbers)
    return data.put(table), len(table)


def _imports(data: _Data, needs: Mapping[str, Sequence[str]], wide: bool) -> tuple[int, int]:
    if not needs:
        return 0, 0
    table = b""
    for library, functions in needs.items():
        called = data.text(library)
        names = [data.text(each, b"\0\0") for each in functions]
        entries = struct.pack(f"<{len(names) + 1}{'Q' if wide else 'I'}", *names, 0)
        table += struct.pack("<IIIII", data.put(entries), 0, 0, called, data.put(entries))
    table += bytes(20)
    return data.put(table), len(table)


def _delayed(data: _Data, libraries: Sequence[str]) -> tuple[int, int]:
    if not libraries:
        return 0, 0
    table = b"".join(struct.pack("<IIIIIIII", 1, data.text(each), 0, 0, 0, 0, 0, 0) for each in libraries) + bytes(32)
    return data.put(table), len(table)


def put(folder: Path, *names: str, **options: object) -> Path:
    """DLLs of these names, and with no more in them, in a folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(dll(name, **options))  # type: ignore[arg-type]  # those of ``dll``
    return folder
