"""The calls that only Windows has, and nothing else: their users are in :mod:`.loader_windows`.

Documented in Microsoft's "Win32 API": libloaderapi.h and psapi.h. It was never run on Windows.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

# LOAD_LIBRARY_SEARCH_DEFAULT_DIRS and LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR, as ctypes.CDLL passes them for a path: what a
# DLL links is looked for beside it, in System32, beside the interpreter, and in the folders of os.add_dll_directory.
_DEFAULT_FOLDERS, _ITS_OWN_FOLDER = 0x1000, 0x0100
_LONGEST_PATH = 32768


class Kernel32:
    """Calls of kernel32.dll. ``kernel``: ``ctypes.WinDLL("kernel32", use_last_error=True)``, which keeps its errors."""

    def __init__(self, kernel: Any = None, last_error: Callable[[], int] | None = None) -> None:
        if sys.platform == "win32":
            kernel = kernel or ctypes.WinDLL("kernel32", use_last_error=True)
            last_error = last_error or ctypes.get_last_error
        self._kernel, self._last_error = kernel, last_error or (lambda: 0)
        self._folders: dict[str, Any] = {}  # by folder, what os.add_dll_directory gave: closing it takes it back
        kernel.LoadLibraryExW.argtypes = (ctypes.c_wchar_p, ctypes.c_void_p, ctypes.c_uint32)
        kernel.LoadLibraryExW.restype = ctypes.c_void_p
        kernel.GetModuleFileNameW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32)
        kernel.GetModuleFileNameW.restype = ctypes.c_uint32
        kernel.GetCurrentProcess.argtypes, kernel.GetCurrentProcess.restype = (), ctypes.c_void_p
        kernel.K32EnumProcessModules.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
        kernel.K32EnumProcessModules.restype = ctypes.c_int

    def load(self, path: str) -> int:
        """Load a DLL for good. Return 0, or the code of the error. Other threads run meanwhile."""
        flags = _DEFAULT_FOLDERS | (_ITS_OWN_FOLDER if os.path.isabs(path) else 0)
        if self._kernel.LoadLibraryExW(path, None, flags):
            return 0
        return self._last_error() or -1

    def modules(self) -> tuple[str, ...]:
        """Return the paths of all modules that are loaded in this process."""
        process, size = self._kernel.GetCurrentProcess(), ctypes.c_uint32(0)
        if not self._kernel.K32EnumProcessModules(process, None, 0, ctypes.byref(size)):
            return ()
        room = size.value // ctypes.sizeof(ctypes.c_void_p) + 64  # another thread may be loading
        handles = (ctypes.c_void_p * room)()
        if not self._kernel.K32EnumProcessModules(process, handles, ctypes.sizeof(handles), ctypes.byref(size)):
            return ()
        number = min(room, size.value // ctypes.sizeof(ctypes.c_void_p))
        paths = (self._path(handle) for handle in handles[:number])
        return tuple(path for path in paths if path)

    def _path(self, module: int | None) -> str:
        text = ctypes.create_unicode_buffer(_LONGEST_PATH)
        return text.value if self._kernel.GetModuleFileNameW(module, text, _LONGEST_PATH) else ""

    def search_also(self, folder: str) -> None:
        """Search a folder, too, for DLLs that are opened by name: cuDNN and NVRTC open their parts so."""
        add = getattr(os, "add_dll_directory", None)  # of Windows alone
        if add is None or folder in self._folders:
            return
        try:
            self._folders[folder] = add(folder)
        except OSError:  # it was there when it was searched
            pass

    def ask(self, path: str, function: str) -> int | None:
        try:
            return int(getattr(ctypes.CDLL(path), function)())
        except (OSError, AttributeError):
            return None
