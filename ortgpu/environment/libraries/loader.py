"""The loader of libraries of this process: what opening, listing and asking them takes on each operating system."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from typing import Any, Protocol

from ...process.untranslated import untranslated
from ..files.mapped import read_mapped_libraries


class Loader(Protocol):
    """``handles`` are kept for the life of the process: libraries that registered with the driver cannot be closed."""

    driver: str  # the name of the driver's library
    handles: dict[str, Any]

    def open(self, path: str, mode: int = 0) -> str | None:
        """Open a library by path, or by a name that the system looks for; None, or why it is refused."""
        ...

    def loaded(self) -> tuple[str, ...]:
        """Paths of the libraries of this process."""
        ...

    def ask(self, path: str, function: str) -> int | None:
        """What a function without arguments of an opened library returns; None: it has no such function."""
        ...

    def lacking(self, words: str) -> str | None:
        """The library that, by these words of ``open``, has not what another one takes from it."""
        ...


class PosixLoader:
    """dlopen and dlerror."""

    driver = "libcuda.so.1"

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}

    def open(self, path: str, mode: int = 0) -> str | None:
        with untranslated():
            error = _load_without_interpreter_lock(path, mode)
        if error is not None:
            return error
        try:
            self.handles[path] = ctypes.CDLL(path, mode=mode)
        except OSError as refusal:
            return str(refusal)
        return None

    def loaded(self) -> tuple[str, ...]:
        return read_mapped_libraries()

    def ask(self, path: str, function: str) -> int | None:
        try:
            return int(getattr(ctypes.CDLL(path), function)())
        except (OSError, AttributeError):
            return None

    def lacking(self, words: str) -> str | None:
        match = re.search(r"undefined symbol: \w+, version (lib\S+)|,? version (lib\S+) not defined in file", words)
        return (match[1] or match[2]) if match is not None else None


def _load_without_interpreter_lock(path: str, mode: int) -> str | None:
    """Let the C library load it first: ctypes.CDLL holds the interpreter lock for as long as loading takes."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    libc.dlerror.restype = ctypes.c_char_p
    if libc.dlopen(os.fsencode(path), mode | os.RTLD_NOW) is not None:
        return None
    words = libc.dlerror()  # of this thread
    return os.fsdecode(words) if words else f"{path}: the loader refuses it without a word"


@functools.cache
def loader_of_this_process() -> Loader:
    if sys.platform == "win32":
        from .loader_windows import WindowsLoader
        from .windows_kernel import Kernel32

        return WindowsLoader(Kernel32())
    return PosixLoader()
