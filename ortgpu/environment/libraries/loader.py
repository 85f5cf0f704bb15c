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
from .library_file import read_library
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
        if sys.platform == "linux":
            libc = _libc()
            with untranslated():
                if libc.dlopen(os.fsencode(path), mode | os.RTLD_NOW) is None:
                    words = libc.dlerror()  # This is the last error of this thread.
                    return os.fsdecode(words) if words else f"{path}: the loader refuses it without a word"
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
        """Return an explanation if other libraries get this function from another file than this one.

        The library is open with RTLD_GLOBAL. The loader takes a function from the first such library that has it. On
        Windows it takes the DLL that was loaded first by this name. None: they get it from this one, or unknown.
        """
        if sys.platform != "linux":
            return None
        everything = ctypes.CDLL(None)
        try:
            own_address = ctypes.cast(getattr(self.handles[path], symbol), ctypes.c_void_p)
            first_address = ctypes.cast(getattr(everything, symbol), ctypes.c_void_p)
        except AttributeError:
            return None
        if own_address.value == first_address.value:
            return None
        info = (ctypes.c_char_p * 4)()  # Dl_info: the first field is the path.
        everything.dladdr(first_address, info)
        return f"{symbol} is taken from {os.fsdecode(info[0] or b'')}, not from {path}"


Loader = Union[PosixLoader, "WindowsLoader"]


def _libc() -> ctypes.CDLL:
    """Return libc: its dlopen releases the interpreter lock. ctypes.CDLL(path) keeps the lock."""
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
    """Return the file of a CUDA plugin that this process has opened, or None. The plugin may list no GPU."""
    if "onnxruntime" not in sys.modules:
        return None
    plugins = (path for path in read_mapped_libraries() if CUDA_LIBRARY.fullmatch(os.path.basename(path)))
    return next(plugins, None)


def only_loaded(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that the loader has loaded. This loads nothing.

    A program may map a file just to read it, and glibc leaves the mappings of a library that it refused midway (out of
    memory, for example).
    """
    mode = getattr(os, "RTLD_NOLOAD", None)
    candidates = tuple(paths)
    if mode is None or not candidates:
        return candidates
    libc = _libc()

    def is_loaded(name: str | None) -> bool:
        return name is not None and libc.dlopen(os.fsencode(name), mode | os.RTLD_LAZY) is not None

    # The name is tried too, because the file may have been replaced on the disk since it was loaded.
    return tuple(
        path
        for path in candidates
        if not os.path.exists(path)
        or is_loaded(path)
        or is_loaded(os.path.basename(path))
        or is_loaded(read_library(path).soname)
    )
