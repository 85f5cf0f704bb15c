"""Facts about how packages are installed into this environment, for advice that can be pasted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from ...process.background import fork_safe_lock, this_thread
from ...process.late import late
from . import interpreter
from .interpreter import this_interpreter
from .metadata import absolute, read_text, search_path

if TYPE_CHECKING:
    from . import origin
else:
    origin = late("ortgpu.environment.packages.origin")

_of_sysconfig = fork_safe_lock()  # sysconfig has no lock before Python 3.13, and fails in a second thread


@dataclass(frozen=True, slots=True)
class Manager:
    """A program that undoes what pip changes, by a lock file. ``add``: shell words before requirements."""

    name: str
    lock: str
    add: str


# All of them can keep the environment of a project in .venv beside the lock file.
_MANAGERS = (
    Manager("uv", "uv.lock", "uv add"),
    Manager("poetry", "poetry.lock", "poetry add"),
    Manager("pdm", "pdm.lock", "pdm add"),
    Manager("pipenv", "Pipfile.lock", "pipenv install"),
)


@dataclass(frozen=True, slots=True)
class Installer:
    """The installer of this environment. ``install`` and ``uninstall``: shell words before requirements.

    They name this very interpreter. An installer has folders of its own; it leaves packages elsewhere alone, and ends
    with success all the same. Elsewhere is a folder of PYTHONPATH, for example, or the packages that a virtual
    environment shares with its base interpreter. The folders here are absolute, and their links are followed.
    """

    name: str  # "pip" or "uv"
    install: str
    uninstall: str
    folder: str = ""  # that it installs into
    own: tuple[str, ...] = (os.sep,)  # below which it removes and replaces
    hidden: tuple[str, ...] = ()  # of the search path, behind ``folder``: what it installs is imported instead
    obstacle: str | None = None  # what keeps this user from running these words here, and how to get past it
    for_one_run: bool = False  # this environment is gone when its program has ended
    manager: Manager | None = None  # what takes these words back: it has a lock file that this environment agrees with
    hold: str = "ortgpu hold"  # shell words that hold the GPU build of this environment

    def owns(self, folder: str) -> bool:
        return _is_below(os.path.realpath(folder), self.own)

    def hides(self, folder: str) -> bool:
        return os.path.realpath(folder) in self.hidden


def quoted(word: str, *, windows: bool) -> str:
    """Quote an argument for sh, or on Windows for both cmd.exe and PowerShell, to which a comma means a list."""
    if not windows:
        return shlex.quote(word)
    return word if re.fullmatch(r"[\w.:\\/=~+-]+", word) else f'"{word}"'


def quote_program(path: str, *, windows: bool) -> str:
    r"""Quote a program to start.

    PowerShell takes a line that begins with a quote for a text. It starts C:\"My Python"\python.exe, as cmd.exe does.
    """
    return "\\".join(quoted(part, windows=True) for part in path.split("\\")) if windows else shlex.quote(path)


def install_extra(extra: str) -> str:
    """Return the command that adds an extra of ortgpu to this environment."""
    windows = os.name == "nt"
    return " ".join(
        [read_installer().install, *(quoted(word, windows=windows) for word in origin.words_for_extra(extra))]
    )


def read_installer() -> Installer:
    python = this_interpreter() or "python3"
    # Not importlib.util.find_spec: setuptools takes a search for pip as the sign that this process is pip's, and takes
    # its own distutils out of the process (_distutils_hack.DistutilsMetaFinder.spec_for_pip).
    spec = PathFinder.find_spec("pip")
    has_pip = spec is not None and spec.origin is not None  # else it is any folder of that name
    found = _uv(python) if not has_pip and shutil.which("uv") else _pip(python, has_pip)
    return replace(
        found,
        hidden=_hidden_by(found.folder),
        obstacle=_why_not_written(found.folder) or found.obstacle,
        for_one_run=_is_for_one_run(),
        manager=_read_manager(),
        hold=_words_to_hold(python),
    )


def _words_to_hold(python: str) -> str:
    windows, lender = os.name == "nt", interpreter.lender
    if lender is None:
        return f"{quote_program(python, windows=windows)} -m ortgpu hold"
    return f"{quote_program(lender, windows=windows)} -m ortgpu hold --python {quoted(python, windows=windows)}"


def _is_for_one_run() -> bool:
    """Return True in the temporary environment that `uv run --with` makes: docs.astral.sh/uv, "Running commands"."""
    lines = read_text(os.path.join(sys.prefix, "pyvenv.cfg")).splitlines()
    return any(line.startswith("extends-environment") for line in lines)


def _read_manager() -> Manager | None:
    """Return the manager if this is the .venv of the project of the working directory, and the manager is installed."""
    project, name = os.path.split(os.path.realpath(sys.prefix))
    try:
        is_here = _is_below(os.getcwd(), (project,))
    except OSError:  # the working directory is gone
        return None
    found = [replace(each, lock=os.path.join(project, each.lock)) for each in _MANAGERS if shutil.which(each.name)]
    found = [each for each in found if os.path.isfile(each.lock)]
    return found[0] if name == ".venv" and is_here and len(found) == 1 else None


def _uv(interpreter: str) -> Installer:
    python, packages = quoted(interpreter, windows=os.name == "nt"), _package_folders()
    words = f"--python {python}{_all_the_same()}"
    return Installer("uv", f"uv pip install {words}", f"uv pip uninstall {words}", folder=packages[0], own=packages)


def _what_brings_pip(folder: str) -> str:
    if sys.platform != "win32":
        return "its system has brought it (apt-get install python3-pip)"
    script = "you have run https://bootstrap.pypa.io/get-pip.py with it"
    # python.org's embeddable distribution lists its search path in this file, without the folder that pip goes into.
    listed = os.path.join(sys.prefix, "python{}{}._pth".format(*sys.version_info))
    is_searched = folder in _resolved(*search_path()) or not os.path.isfile(listed)
    return script if is_searched else f"{listed} has the line {folder}, and {script}"


def _pip(interpreter: str, is_there: bool) -> Installer:
    python = quote_program(interpreter, windows=os.name == "nt")
    managed, packages = _all_the_same(), _package_folders()
    if sys.flags.no_user_site and (sys.flags.ignore_environment or "PYTHONNOUSERSITE" not in os.environ):
        python += " -s"  # as ComfyUI starts its own: else pip would count the packages of the user's folder
    folder, pip, obstacle = packages[0], f"{python} -m pip", None
    if not is_there and not managed and PathFinder.find_spec("ensurepip") is not None:
        then = "\n" if os.name == "nt" else " && "
        pip = f"{python} -m ensurepip{then}{pip}"  # a virtual environment without pip, and no uv to fill it
    elif not is_there:  # a Python of Debian has no ensurepip, or one that refuses; a portable one of Windows has none
        obstacle = f"{python} has no pip: once {_what_brings_pip(folder)}"
    if not _is_virtual() and site.ENABLE_USER_SITE and not os.access(folder, os.W_OK):
        folder = os.path.realpath(site.getusersitepackages())  # as pip does then, and says
    # pip sees what a new process of this interpreter would import, and takes it for its own below its prefix, or
    # outside of a virtual environment everywhere: is_local in pip/_internal/utils/misc.py.
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    seen = _resolved(*site.getsitepackages(), *users, folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    within = tuple(one for one in seen if _is_below(one, _resolved(sys.prefix))) if _is_virtual() else seen
    own = within if folder in packages else (folder,)
    return Installer(
        "pip", f"{pip} install{managed}", f"{pip} uninstall -y{managed}", folder=folder, own=own, obstacle=obstacle
    )


def _all_the_same() -> str:
    """Return the option with which pip and uv install into a system's own interpreter (PEP 668)."""
    marker = os.path.join(_folder_of("stdlib"), "EXTERNALLY-MANAGED")
    return " --break-system-packages" if not _is_virtual() and os.path.exists(marker) else ""


def _package_folders() -> tuple[str, ...]:
    return _resolved(_folder_of("purelib"), _folder_of("platlib"))


def _folder_of(kind: str) -> str:
    with this_thread.holds, _of_sysconfig:
        try:
            return sysconfig.get_path(kind)
        except TypeError:  # on Windows, where a program has taken sys.executable away
            return sysconfig.get_path(kind, expand=False).format(base=sys.prefix, installed_base=sys.base_prefix)


def _hidden_by(folder: str) -> tuple[str, ...]:
    """Return the folders of the search path behind this one."""
    path = _resolved(*search_path())
    # The user's folder is put on the path, ahead of the others, once it is there.
    return path[path.index(folder) + 1 :] if folder in path else _resolved(*site.getsitepackages())


def _why_not_written(folder: str) -> str | None:
    nearest = folder  # that exists
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if os.access(nearest, os.W_OK):
        return None
    return f"{folder} is not this user's to write: as its owner, or where its image is built"


def _resolved(*folders: str) -> tuple[str, ...]:
    known = filter(None, map(absolute, filter(None, folders)))
    return tuple(dict.fromkeys(map(os.path.realpath, known)))


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def _is_virtual() -> bool:
    return sys.prefix != sys.base_prefix
