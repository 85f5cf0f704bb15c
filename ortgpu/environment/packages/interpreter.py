"""The program that runs Python in this environment. ``sys.executable`` need not be it."""

from __future__ import annotations

import os
import sys
from typing import Final

from .metadata import search_path

#: This text stands in for the error of an import that would not have returned.
IN_SUB_INTERPRETER: Final = "ImportError: not tried: this is a sub-interpreter of Python"

#: The interpreter that has ortgpu, where another one lends it a copy to look at its environment; else None.
lender: str | None = None


def this_interpreter() -> str:
    """Return the path of the interpreter; empty if it is not known.

    A program that embeds Python, such as uWSGI, QGIS or Apache, may set sys.executable to itself. Started as an
    interpreter it would do something else. With uWSGI's option ``--home``, and with activate_this.py, sys.executable
    may be the base interpreter of the virtual environment: its packages are others.
    """
    executable = sys.executable or ""
    is_virtual = sys.prefix != sys.base_prefix
    folder, ending = os.path.join(sys.prefix, "bin"), ""
    if os.name == "nt":
        folder, ending = os.path.join(sys.prefix, "Scripts") if is_virtual else sys.prefix, ".exe"
    if not executable:
        return executable
    is_there = not is_virtual or os.path.realpath(os.path.dirname(executable)) == os.path.realpath(folder)
    if is_there and "py" in os.path.basename(executable).lower():
        return executable
    names = ("python{}.{}".format(*sys.version_info), "python3", "python")
    candidates = (os.path.join(folder, name + ending) for name in names)
    return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), executable)


def is_frozen() -> bool:
    """Return True if a bundled program replaces the interpreter.

    PyInstaller and others set sys.frozen. Nuitka defines ``__compiled__`` in each module that it compiles. A program
    that Nuitka compiled without ``--standalone`` runs in an environment.
    """
    compiled = globals().get("__compiled__")
    return bool(getattr(sys, "frozen", False) or getattr(compiled, "standalone", False))


def is_pex() -> bool:
    """Return True if packages come from a pex: it ignores packages of pip (docs.pex-tool.org, "PEX-INFO")."""
    for folder in search_path((sys.prefix, *sys.path)):
        if folder and os.path.isfile(os.path.join(folder, "PEX-INFO")):
            return True
    return False


def is_sub_interpreter() -> bool:
    """Return True if this is not the main interpreter of the process, as by default in mod_wsgi. False if unknown."""
    try:
        import ctypes

        api = ctypes.pythonapi
        main, this = api.PyInterpreterState_Main, api.PyInterpreterState_Get
    except (AttributeError, ImportError):  # This is no CPython, or a sub-interpreter too isolated for ctypes.
        return False
    main.restype = this.restype = ctypes.c_void_p
    return bool(main() != this())
