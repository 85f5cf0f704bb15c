"""Facts about how packages are installed into this environment, for advice that can be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import PathFinder

from .metadata import search_path


@dataclass(frozen=True, slots=True)
class Installer:
    """``install`` and ``uninstall`` are shell words to put requirements behind; they name this very interpreter.

    An installer has folders of its own. What lies elsewhere it leaves as it is, and ends with success all the same:
    in a folder of PYTHONPATH, and in the packages that a virtual environment shares with the interpreter that it was
    made from. The folders here are absolute, and their links are followed.
    """

    name: str  # "pip" or "uv"
    install: str
    uninstall: str
    folder: str = ""  # that it installs into
    own: tuple[str, ...] = (os.sep,)  # below which it removes and replaces
    hidden: tuple[str, ...] = ()  # of the search path, behind ``folder``: what it installs is imported instead
    writable: bool = True  # whether this user may write into ``folder``

    def owns(self, folder: str) -> bool:
        return _is_below(os.path.realpath(folder), self.own)

    def hides(self, folder: str) -> bool:
        return os.path.realpath(folder) in self.hidden


def read_installer() -> Installer:
    python = shlex.quote(sys.executable or "python3")
    # Not importlib.util.find_spec: setuptools takes a search for pip as the sign that this process is pip's, and takes
    # its own distutils out of the process (_distutils_hack.DistutilsMetaFinder.spec_for_pip).
    managed = " --break-system-packages" if _is_managed_by_the_system() else ""
    has_pip = PathFinder.find_spec("pip") is not None
    packages = _resolved(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    if not has_pip and shutil.which("uv"):
        return Installer(
            "uv",
            f"uv pip install --python {python}{managed}",
            f"uv pip uninstall --python {python}{managed}",
            *_reach(packages[0], packages),
        )
    pip = f"{python} -m pip"
    if not has_pip and PathFinder.find_spec("ensurepip") is not None:
        pip = f"{python} -m ensurepip && {pip}"  # a virtual environment without pip, and no uv to fill it
    folder = packages[0]
    if not _is_virtual() and site.ENABLE_USER_SITE and not os.access(folder, os.W_OK):
        folder = os.path.realpath(site.getusersitepackages())  # as pip does then, and says
    # pip sees what a new process of this interpreter would import, and takes it for its own below its prefix, or
    # outside of a virtual environment everywhere: is_local in pip/_internal/utils/misc.py.
    seen = _resolved(*site.getsitepackages(), folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    prefix = _resolved(sys.prefix) if _is_virtual() else (os.sep,)
    own = (folder,) if folder not in packages else tuple(one for one in seen if _is_below(one, prefix))
    return Installer("pip", f"{pip} install{managed}", f"{pip} uninstall -y{managed}", *_reach(folder, own))


def _reach(folder: str, own: tuple[str, ...]) -> tuple[str, tuple[str, ...], tuple[str, ...], bool]:
    path = _resolved(*search_path())
    # The user's folder is put on the path, ahead of the others, once it is there.
    hidden = path[path.index(folder) + 1 :] if folder in path else _resolved(*site.getsitepackages())
    return folder, own, hidden, os.access(_nearest_that_exists(folder), os.W_OK)


def _nearest_that_exists(folder: str) -> str:
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def _resolved(*folders: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders if folder))


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def _is_virtual() -> bool:
    return sys.prefix != sys.base_prefix


def _is_managed_by_the_system() -> bool:
    """PEP 668: a distribution's own interpreter, into which pip and uv install only when told to all the same."""
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return not _is_virtual() and os.path.exists(marker)
