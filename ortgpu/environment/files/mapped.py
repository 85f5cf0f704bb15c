"""The libraries that are in this process, as the kernel lists them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from .elf import read_elf


def mapped_libraries(maps: str) -> tuple[str, ...]:
    """Return the paths of the shared objects in the text of /proc/self/maps, in order, each once."""
    paths = (line.split(None, 5)[5].strip() for line in maps.splitlines() if line.count("/") and ".so" in line)
    return tuple(dict.fromkeys(path.removesuffix(" (deleted)") for path in paths))


def read_mapped_libraries() -> tuple[str, ...]:
    if sys.platform == "win32":
        from ..libraries.windows_kernel import Kernel32

        return Kernel32().modules()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            return mapped_libraries(file.read())
    except OSError:
        return ()


def only_loaded(paths: Iterable[str]) -> tuple[str, ...]:
    """Return ``paths`` without those that the loader has not loaded. This loads nothing.

    A program may map a file just to read it, and glibc leaves the mappings of a library that it refused midway, for
    want of memory say.
    """
    mode = getattr(os, "RTLD_NOLOAD", None)
    found = tuple(paths)
    if mode is None or not found:
        return found
    import ctypes

    libc = ctypes.CDLL(None)  # its function leaves the interpreter lock to others, which ctypes.CDLL(path) does not
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def is_loaded(name: str | None) -> bool:
        return name is not None and libc.dlopen(os.fsencode(name), mode | os.RTLD_LAZY) is not None

    # By its name too: the file may have been replaced on the disk since it was loaded.
    return tuple(
        path
        for path in found
        if not os.path.exists(path)
        or is_loaded(path)
        or is_loaded(os.path.basename(path))
        or is_loaded(read_elf(path).soname)
    )
