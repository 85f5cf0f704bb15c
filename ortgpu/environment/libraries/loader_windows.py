"""Open libraries on Windows, and explain its error codes in words that name the file at fault.

LoadLibrary returns a number if a dependency is missing or of another version, and never its name: the files themselves
tell that. :class:`WindowsLoader` calls functions that only Windows has. The rest runs on every system.
"""

from __future__ import annotations

import ctypes
import ntpath
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from .catalogue import spec_for
from .library_file import exported_names, imported_names, read_library

DRIVER = "nvcuda.dll"

# winerror.h
_FILE_NOT_FOUND, _ACCESS_DENIED, _NOT_ENOUGH_MEMORY, _OUT_OF_MEMORY = 2, 5, 8, 14
_MODULE_NOT_FOUND, _PROCEDURE_NOT_FOUND, _BAD_FORMAT = 126, 127, 193
_INITIALISATION_FAILED, _COMMITMENT_LIMIT = 1114, 1455
_VIRUS_INFECTED, _DISABLED_BY_POLICY, _INTEGRITY_POLICY_VIOLATION = 225, 1260, 4551
_PATH_TOO_LONG = 206

# LOAD_LIBRARY_SEARCH_DEFAULT_DIRS and LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR, passed by ctypes.CDLL for a path. Windows then
# looks for linked DLLs beside the file, in System32, beside the interpreter, and in folders of os.add_dll_directory.
_DEFAULT_FOLDERS, _ITS_OWN_FOLDER = 0x1000, 0x0100
_ALONG_PATH = 0x0008  # LOAD_WITH_ALTERED_SEARCH_PATH: beside the file, in the folders of Windows, along PATH
_NO_MESSAGE_BOX = 0x0001  # SEM_FAILCRITICALERRORS: no message box stops the program at a file that is no DLL
_MAX_PATH, _LONGEST_PATH = 260, 32768
_ANY_LENGTH, _SHARE = "\\\\?\\", "\\\\?\\UNC\\"  # see Microsoft's "Naming Files, Paths, and Namespaces"


class WindowsLoader:
    """The loader of Windows, by calls of kernel32.dll: Microsoft's libloaderapi.h, errhandlingapi.h and psapi.h."""

    driver = DRIVER

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}
        self._folders: dict[str, Any] = {}  # results of os.add_dll_directory by folder; closing one removes its folder
        self._kernel: Any = None
        self._last_error: Callable[[], int] = lambda: 0
        if sys.platform == "win32":
            kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # ctypes then keeps its error codes.
            kernel.LoadLibraryExW.argtypes = (ctypes.c_wchar_p, ctypes.c_void_p, ctypes.c_uint32)
            kernel.LoadLibraryExW.restype = ctypes.c_void_p
            kernel.GetModuleHandleW.argtypes, kernel.GetModuleHandleW.restype = (ctypes.c_wchar_p,), ctypes.c_void_p
            kernel.GetModuleFileNameW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32)
            kernel.GetModuleFileNameW.restype = ctypes.c_uint32
            kernel.GetCurrentProcess.argtypes, kernel.GetCurrentProcess.restype = (), ctypes.c_void_p
            kernel.K32EnumProcessModules.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
            self._kernel, self._last_error = kernel, ctypes.get_last_error

    def open(self, path: str, mode: int = 0) -> str | None:
        folder = os.path.dirname(spelt_for_windows(path))
        add = getattr(os, "add_dll_directory", None)  # Only Windows has it.
        if add is not None and os.path.isabs(path) and folder not in self._folders:
            with suppress(OSError):  # The folder may have been removed since the search.
                # cuDNN and NVRTC open their parts by name.
                self._folders[folder] = add(folder)
        code = self.load(path)
        if code != 0:
            return words_of(code, path, self.loaded(), self.folders(along_path=True))
        self.handles[path] = True
        return None

    def load(self, path: str) -> int:
        """Load a DLL for good. Return 0, or the code of the error. Other threads run meanwhile.

        Windows looks for linked DLLs as for ctypes, and then as ONNX Runtime lets it do for providers.
        """
        before = self._kernel.GetThreadErrorMode()
        self._kernel.SetThreadErrorMode(before | _NO_MESSAGE_BOX, None)
        try:
            if not os.path.isabs(path):
                return self._load(path, _DEFAULT_FOLDERS)
            code = self._load(spelt_for_windows(path), _DEFAULT_FOLDERS | _ITS_OWN_FOLDER)
            return code if code != _MODULE_NOT_FOUND else self._load(spelt_for_windows(path), _ALONG_PATH)
        finally:
            self._kernel.SetThreadErrorMode(before, None)

    def _load(self, path: str, flags: int) -> int:
        return 0 if self._kernel.LoadLibraryExW(path, None, flags) else self._last_error() or -1

    def folders(self, *, along_path: bool) -> tuple[str, ...]:
        """Return the folders that the loader searches for linked DLLs, apart from the DLL's own.

        Folders that others passed to ``os.add_dll_directory`` are missing: nothing lists them.
        """
        program, (system, windows) = os.path.dirname(self._path(None)), folders_of_windows(os.environ)
        of_path = (windows, *path_of(os.environ)) if along_path else ()
        return (program, system, *self._folders, *of_path)

    def loaded(self) -> tuple[str, ...]:
        process, size = self._kernel.GetCurrentProcess(), ctypes.c_uint32(0)
        if not self._kernel.K32EnumProcessModules(process, None, 0, ctypes.byref(size)):
            return ()
        room = size.value // ctypes.sizeof(ctypes.c_void_p) + 64  # Another thread may be loading more.
        handles = (ctypes.c_void_p * room)()
        if not self._kernel.K32EnumProcessModules(process, handles, ctypes.sizeof(handles), ctypes.byref(size)):
            return ()
        number = min(room, size.value // ctypes.sizeof(ctypes.c_void_p))
        paths = (self._path(handle) for handle in handles[:number])
        return tuple(path for path in paths if path)

    def _path(self, module: int | None) -> str:
        text = ctypes.create_unicode_buffer(_LONGEST_PATH)
        return strip_long_path_mark(text.value) if self._kernel.GetModuleFileNameW(module, text, _LONGEST_PATH) else ""

    def ask(self, path: str, function: str) -> int | None:
        try:
            handle = self._kernel.GetModuleHandleW(spelt_for_windows(path))
            return int(getattr(ctypes.CDLL(path, handle=handle), function)()) if handle else None
        except AttributeError:
            return None

    def taken_from_another(self, symbol: str, path: str) -> str | None:
        with suppress(OSError):
            for first in (file for file in self.loaded() if _name(file) == _name(path)):
                return None if os.path.samefile(first, path) else f"{symbol} is taken from {first}, not from {path}"
        return None


def folders_of_windows(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders of Windows that its loader searches before PATH."""
    windows = variables.get("SYSTEMROOT") or variables.get("WINDIR") or r"C:\Windows"
    return os.path.join(windows, "System32"), windows


def path_of(variables: Mapping[str, str]) -> list[str]:
    """Return the folders of PATH, without the quotes that some programs write around them."""
    return [folder for entry in variables.get("PATH", "").split(";") if (folder := entry.strip().strip('"'))]


def spelt_for_windows(path: str) -> str:
    """Return a path that LoadLibrary accepts: with backslashes, and with a prefix if it is long.

    If long paths are enabled, Windows opens files with long paths, but still no DLLs (CPython issue 126929).
    """
    full = ntpath.normpath(path)
    if len(full) < _MAX_PATH or full.startswith(_ANY_LENGTH):
        return full
    return _SHARE + full[2:] if full.startswith("\\\\") else _ANY_LENGTH + full


def strip_long_path_mark(path: str) -> str:
    return "\\\\" + path.removeprefix(_SHARE) if path.startswith(_SHARE) else path.removeprefix(_ANY_LENGTH)


def words_of(code: int, path: str, loaded: Iterable[str], folders: Iterable[str]) -> str:
    number = f"(error {code})"
    if code in (_MODULE_NOT_FOUND, _FILE_NOT_FOUND):
        if not os.path.exists(path):
            return f"no such file {number}" if os.path.isabs(path) else f"{path} was not found {number}"
        absent = missing_dependency(path, loaded, folders)
        return f"{absent or 'a library'}, which it links, was not found {number}"
    if code == _PROCEDURE_NOT_FOUND:
        lacked = next(iter(lacking_functions(path, loaded)), None)
        if lacked is None:
            return f"a function that it takes from another library is not there: that is of another version {number}"
        function, library, where = lacked
        return f"it takes {function} from {library}, and {where} of this process does not have that {number}"
    if code == _BAD_FORMAT:
        why = read_library(path).problem or "damaged, or built for another kind of processor than this Python"
        return f"{why} {number}"
    return {
        _ACCESS_DENIED: f"permission denied {number}",
        _INITIALISATION_FAILED: f"its initialisation failed {number}",
        **dict.fromkeys((_NOT_ENOUGH_MEMORY, _OUT_OF_MEMORY), f"not enough memory {number}"),
        _PATH_TOO_LONG: f"its path is longer than Windows opens {number}",
        _COMMITMENT_LIMIT: f"the paging file of Windows is too small {number}",
        _VIRUS_INFECTED: f"the virus scanner has blocked it {number}",
        **dict.fromkeys(
            (_DISABLED_BY_POLICY, _INTEGRITY_POLICY_VIOLATION), f"a policy of Windows has blocked it {number}"
        ),
    }.get(code, f"Windows refuses to load it {number}")


def missing_dependency(path: str, loaded: Iterable[str], folders: Iterable[str]) -> str | None:
    """Return the first DLL that this file links, directly or not, and the loader does not find."""
    names = {_name(file) for file in loaded}
    waiting, everywhere = [path], (os.path.dirname(path), *folders)
    while waiting:
        for name in read_library(waiting.pop()).needed:
            if name.lower() in names or is_of_the_system(name):
                continue
            names.add(name.lower())
            dependency = find_beside(name, everywhere)
            if dependency is None:
                return name
            waiting.append(dependency)
    return None


def lacking_functions(path: str, loaded: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield a missing function, the DLL that this file imports it from, and the loaded file of that name."""
    by_name = {_name(file): file for file in loaded}
    for library in read_library(path).needed:
        where = by_name.get(library.lower())
        had = exported_names(where) if where is not None else None
        taken = imported_names(path, library)
        if where is not None and had and taken and (absent := taken - had):
            yield min(absent), library, where


def is_of_the_system(name: str) -> bool:
    """Return True for API sets: Windows resolves these names itself, without a file."""
    return name.lower().startswith(("api-ms-", "ext-ms-"))


def find_beside(name: str, folders: Iterable[str]) -> str | None:
    paths = (os.path.join(folder, name) for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)


def _name(path: str) -> str:
    return re.split(r"[\\/]", path)[-1].lower()


def missing_from_the_system(
    path: str, needed: Iterable[str], loaded: Iterable[str], folders: Iterable[str]
) -> list[str]:
    """Return the DLLs that a file links and the loader does not find beside the file or in ``folders``.

    The result is empty, too, if Windows' own folder is not among them: then nothing is known. Other modules look for
    CUDA's libraries and ONNX Runtime's own.
    """
    everywhere = (os.path.dirname(path), *folders)
    if find_beside("KERNEL32.dll", everywhere) is None:
        return []
    names = {_name(file) for file in loaded}

    def is_another_matter(name: str) -> bool:
        ours = name.lower().startswith("onnxruntime") or name.lower() == DRIVER or spec_for(name) is not None
        return ours or name.lower() in names or is_of_the_system(name)

    return [name for name in needed if not is_another_matter(name) and find_beside(name, everywhere) is None]
