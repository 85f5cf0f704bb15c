"""The dynamic loader's cache, /etc/ld.so.cache: sonames to paths, without running ldconfig.

Layout: glibc, sysdeps/generic/dl-cache.h, ``struct cache_file_new`` and ``struct file_entry_new``.
"""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = 48
_ENTRY = 24
_ARCHITECTURE_MASK = 0xFF00
_FOREIGN = {0x0000, 0x0800}  # i386 and x32 libraries on an x86-64 system (FLAG_X8664_LIB64 is 0x0300)


def read_loader_cache(path: Path) -> dict[str, str]:
    """Return paths by base name; empty if the file is absent or of an unknown form."""
    try:
        return parse_loader_cache(path.read_bytes())
    except OSError:
        return {}


def parse_loader_cache(data: bytes) -> dict[str, str]:
    start = data.find(_MAGIC)
    if start < 0 or len(data) < start + _HEADER:
        return {}
    (count,) = struct.unpack_from("<I", data, start + len(_MAGIC))
    found: dict[str, str] = {}
    for index in range(count):
        at = start + _HEADER + index * _ENTRY
        if at + _ENTRY > len(data):
            break
        flags, key, value = struct.unpack_from("<III", data, at)
        name, target = _string(data, start + key), _string(data, start + value)
        if name and target and flags & _ARCHITECTURE_MASK not in _FOREIGN:
            found.setdefault(name, target)
    return found


def _string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return data[at:end].decode("utf-8", "surrogateescape") if at < len(data) and end >= 0 else ""
