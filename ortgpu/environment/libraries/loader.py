"""The libraries of this process, and its loader: open, list and query them on each operating system."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Union

from ...process.untranslated import untranslated
from ..packages.metadata import mapped_libraries, read_maps
from ..packages.plugins import CUDA_LIBRARY
from .library_file import read_elf
from .loader_windows import WindowsLoader

if TYPE_CHECKING:
    from .loader_windows import WindowsLoader


class PosixLoader:
    """The loader of POSIX systems: dlopen and dlerror.

    ``handles`` live as long as the process: libraries that registered with the driver cannot be closed.
    """

    driver = "libcuda.so.1"  # the name of the driver's library

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}

    def open(self, path: str, mode: int = 0) -> str | None:
        """Open a library by path, or by a name that the system looks for. Return None, or the reason of a refusal."""
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
        """Call a function without arguments of an opened library. Return its result; None if there is no function."""
        try:
            return int(getattr(ctypes.CDLL(path), function)())
        except (OSError, AttributeError):
            return None

    def taken_from_another(self, symbol: str, path: str) -> str | None:
        """Return words if others get this function not from this library, which is open for all (RTLD_GLOBAL).

        The loader takes a function from the first such library that has it; on Windows, from the DLL that was loaded
        first by this name. None: from this one, or unknown.
        """
        if sys.platform != "linux":
            return None
        everything = ctypes.CDLL(None)
        try:
            own, first = (
                ctypes.cast(getattr(place, symbol), ctypes.c_void_p) for place in (self.handles[path], everything)
            )
        except AttributeError:
            return None
        if own.value == first.value:
            return None
        found = (ctypes.c_char_p * 4)()  # Dl_info, whose first field is the path
        everything.dladdr(first, found)
        return f"{symbol} is taken from {os.fsdecode(found[0] or b'')}, not from {path}"


Loader = Union[PosixLoader, "WindowsLoader"]


def _load_without_interpreter_lock(path: str, mode: int) -> str | None:
    if sys.platform != "linux":
        return None
    libc = _libc()
    if libc.dlopen(os.fsencode(path), mode | os.RTLD_NOW) is not None:
        return None
    words = libc.dlerror()  # of this thread
    return os.fsdecode(words) if words else f"{path}: the loader refuses it without a word"


def _libc() -> ctypes.CDLL:
    """Return libc: its dlopen leaves the interpreter lock to others, which ctypes.CDLL(path) does not."""
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    libc.dlerror.restype = ctypes.c_char_p
    return libc


@functools.cache
def loader_of_this_process() -> Loader:
    if sys.platform == "win32":
        return WindowsLoader()
    return PosixLoader()


def read_mapped_libraries() -> tuple[str, ...]:
    if sys.platform == "win32":
        return loader_of_this_process().loaded()
    return mapped_libraries(read_maps())


def loaded_plugin() -> str | None:
    """Return the file of a CUDA plugin that this process has opened, which may list no GPU; None if there is none."""
    if "onnxruntime" not in sys.modules:
        return None
    found = (path for path in read_mapped_libraries() if CUDA_LIBRARY.fullmatch(os.path.basename(path)))
    return next(found, None)


def only_loaded(paths: Iterable[str]) -> tuple[str, ...]:
    """Return ``paths`` without those that the loader has not loaded. This loads nothing.

    A program may map a file just to read it, and glibc leaves the mappings of a library that it refused midway, for
    want of memory say.
    """
    mode = getattr(os, "RTLD_NOLOAD", None)
    found = tuple(paths)
    if mode is None or not found:
        return found
    libc = _libc()

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
