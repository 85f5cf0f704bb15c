"""The program that runs Python in this environment. ``sys.executable`` need not be it."""

from __future__ import annotations

import os
import sys
from typing import Final

#: In the place of what an import would have raised, had it returned.
IN_SUB_INTERPRETER: Final = "ImportError: not tried: this is a sub-interpreter of Python"

#: The interpreter that has ortgpu, where another one lends it a copy to look at its environment; else None.
lender: str | None = None


def this_interpreter() -> str:
    """Return the path of the interpreter; empty if it is not known.

    A program that holds Python in it, such as uWSGI, QGIS or Apache, may say that it is the interpreter itself: started
    as one it would do something else. And with a virtual environment of uWSGI's option ``--home`` or of
    activate_this.py, sys.executable may be the interpreter that the environment was made from, whose packages are
    others.
    """
    said = sys.executable or ""
    is_virtual = sys.prefix != sys.base_prefix
    folder, ending = os.path.join(sys.prefix, "bin"), ""
    if os.name == "nt":
        folder, ending = os.path.join(sys.prefix, "Scripts") if is_virtual else sys.prefix, ".exe"
    if not said:
        return said
    is_there = not is_virtual or os.path.realpath(os.path.dirname(said)) == os.path.realpath(folder)
    if is_there and "py" in os.path.basename(said).lower():
        return said
    names = ("python{}.{}".format(*sys.version_info), "python3", "python")
    candidates = (os.path.join(folder, name + ending) for name in names)
    return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), said)


def is_frozen() -> bool:
    """Return True if a program stands in the place of the interpreter.

    PyInstaller and others set sys.frozen; Nuitka gives a name to each module that it compiles. A program that Nuitka
    compiled without ``--standalone`` runs in an environment.
    """
    compiled = globals().get("__compiled__")
    return bool(getattr(sys, "frozen", False) or getattr(compiled, "standalone", False))


def is_pex() -> bool:
    """Return True if packages come from a pex, which sees none that pip installs: docs.pex-tool.org, "PEX-INFO"."""
    folders = (each for each in (sys.prefix, *sys.path) if each and isinstance(each, str))
    return any(os.path.isfile(os.path.join(folder, "PEX-INFO")) for folder in folders)


def is_sub_interpreter() -> bool:
    """Return True if this is not the main interpreter of the process, as by default in mod_wsgi. False if unknown."""
    try:
        import ctypes

        api = ctypes.pythonapi
        main, this = api.PyInterpreterState_Main, api.PyInterpreterState_Get
    except (AttributeError, ImportError):  # no CPython; or a sub-interpreter so isolated that it has no ctypes
        return False
    main.restype = this.restype = ctypes.c_void_p
    return bool(main() != this())
