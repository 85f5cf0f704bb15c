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
from functools import partial
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

_of_sysconfig = fork_safe_lock()  # Before Python 3.13 sysconfig has no lock, and fails in a second thread.


@dataclass(frozen=True, slots=True)
class Manager:
    """A program with a lock file that undoes changes made by pip. ``add``: shell words before requirements."""

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

    These words name this very interpreter. An installer has folders of its own. It leaves packages elsewhere alone, and
    still ends with success. Examples are packages in a folder of PYTHONPATH, and packages that a virtual environment
    shares with its base interpreter. The folders here are absolute, and their links are followed.
    """

    name: str  # "pip" or "uv"
    install: str
    uninstall: str
    folder: str = ""  # destination of the installed packages
    own: tuple[str, ...] = (os.sep,)  # It removes and replaces packages below these folders only.
    hidden: tuple[str, ...] = ()  # folders of the search path behind ``folder``: installed packages hide their modules
    obstacle: str | None = None  # the reason why this user cannot run these commands here, and the way out
    for_one_run: bool = False  # This environment is gone when its program has ended.
    manager: Manager | None = None  # It has a lock file for this environment, and would undo these commands.
    hold: str = "ortgpu hold"  # shell words that hold the GPU build of this environment

    def owns(self, folder: str) -> bool:
        return _is_below(os.path.realpath(folder), self.own)

    def hides(self, folder: str) -> bool:
        return os.path.realpath(folder) in self.hidden


def quoted(word: str, *, windows: bool) -> str:
    """Quote an argument for sh, or on Windows for both cmd.exe and PowerShell. PowerShell splits words at commas."""
    if not windows:
        return shlex.quote(word)
    return word if re.fullmatch(r"[\w.:\\/=~+-]+", word) else f'"{word}"'


def quote_program(path: str, *, windows: bool) -> str:
    r"""Quote a program to start.

    PowerShell takes a line that begins with a quote for a text. It starts C:\"My Python"\python.exe, as cmd.exe does.
    """
    return "\\".join(quoted(part, windows=True) for part in path.split("\\")) if windows else shlex.quote(path)


def install_extra(extra: str) -> str:
    words = (quoted(word, windows=os.name == "nt") for word in origin.words_for_extra(extra))
    return " ".join([read_installer().install, *words])


def read_installer() -> Installer:
    python = this_interpreter() or "python3"
    # importlib.util.find_spec would not do: setuptools takes a search for pip as the sign that this process is pip's.
    # It then removes its own distutils from the process (_distutils_hack.DistutilsMetaFinder.spec_for_pip).
    spec = PathFinder.find_spec("pip")
    has_pip = spec is not None and spec.origin is not None  # A spec without origin is any folder of that name.
    installer = _uv(python) if not has_pip and shutil.which("uv") else _pip(python, has_pip)
    windows = os.name == "nt"
    hold = f"{quote_program(interpreter.lender or python, windows=windows)} -m ortgpu hold"
    if interpreter.lender is not None:
        hold += f" --python {quoted(python, windows=windows)}"
    configuration = read_text(os.path.join(sys.prefix, "pyvenv.cfg"))
    return replace(
        installer,
        hidden=_hidden_by(installer.folder),
        obstacle=_why_not_written(installer.folder) or installer.obstacle,
        # `uv run --with` makes a temporary environment: docs.astral.sh/uv, "Running commands".
        for_one_run=re.search("^extends-environment", configuration, re.MULTILINE) is not None,
        manager=_read_manager(),
        hold=hold,
    )


def _read_manager() -> Manager | None:
    """Return the manager if this is the .venv of the project of the working directory, and the manager is installed."""
    project, name = os.path.split(os.path.realpath(sys.prefix))
    try:
        is_here = _is_below(os.getcwd(), (project,))
    except OSError:  # The working directory is gone.
        return None
    if name != ".venv" or not is_here:
        return None
    managers = [
        replace(manager, lock=lock)
        for manager in _MANAGERS
        if os.path.isfile(lock := os.path.join(project, manager.lock)) and shutil.which(manager.name)
    ]
    return managers[0] if len(managers) == 1 else None


def _uv(interpreter: str) -> Installer:
    python, packages = quoted(interpreter, windows=os.name == "nt"), _package_folders()
    words = f"--python {python}{_all_the_same()}"
    return Installer("uv", f"uv pip install {words}", f"uv pip uninstall {words}", folder=packages[0], own=packages)


def _what_brings_pip(folder: str) -> str:
    if sys.platform != "win32":
        return "its system has brought it (apt-get install python3-pip)"
    script = "you have run https://bootstrap.pypa.io/get-pip.py with it"
    # python.org's embeddable distribution lists its search path in this file. The folder of pip is missing there.
    listed = os.path.join(sys.prefix, "python{}{}._pth".format(*sys.version_info))
    is_searched = folder in _resolved(*search_path()) or not os.path.isfile(listed)
    return script if is_searched else f"{listed} has the line {folder}, and {script}"


def _pip(interpreter: str, is_there: bool) -> Installer:
    python = quote_program(interpreter, windows=os.name == "nt")
    managed, packages = _all_the_same(), _package_folders()
    if sys.flags.no_user_site and (sys.flags.ignore_environment or "PYTHONNOUSERSITE" not in os.environ):
        python += " -s"  # ComfyUI runs Python so. Without it pip would count the packages of the user's folder.
    folder, pip, obstacle = packages[0], f"{python} -m pip", None
    if not is_there and not managed and PathFinder.find_spec("ensurepip") is not None:
        then = "\n" if os.name == "nt" else " && "
        pip = f"{python} -m ensurepip{then}{pip}"  # This virtual environment has no pip, and there is no uv.
    elif not is_there:  # Debian's Python has no ensurepip, or one that refuses. Portable ones of Windows have none.
        obstacle = f"{python} has no pip: once {_what_brings_pip(folder)}"
    if not _is_virtual() and site.ENABLE_USER_SITE and not os.access(folder, os.W_OK):
        folder = os.path.realpath(site.getusersitepackages())  # pip does and reports the same.
    # pip sees the packages that a new process of this interpreter would import. In a virtual environment it removes
    # only packages below its prefix, elsewhere all of them: is_local in pip/_internal/utils/misc.py.
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    folders = _resolved(*site.getsitepackages(), *users, folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = folders if folder in packages else (folder,)
    if _is_virtual() and folder in packages:
        own = tuple(filter(partial(_is_below, folders=_resolved(sys.prefix)), folders))
    return Installer(
        "pip", f"{pip} install{managed}", f"{pip} uninstall -y{managed}", folder=folder, own=own, obstacle=obstacle
    )


def _all_the_same() -> str:
    """Return the option that lets pip and uv install into a system's own interpreter (PEP 668)."""
    marker = os.path.join(_folder_of("stdlib"), "EXTERNALLY-MANAGED")
    return " --break-system-packages" if not _is_virtual() and os.path.exists(marker) else ""


def _package_folders() -> tuple[str, ...]:
    return _resolved(_folder_of("purelib"), _folder_of("platlib"))


def _folder_of(kind: str) -> str:
    with this_thread.holds, _of_sysconfig:
        try:
            return sysconfig.get_path(kind)
        except TypeError:  # This is Windows, and a program has removed sys.executable.
            return sysconfig.get_path(kind, expand=False).format(base=sys.prefix, installed_base=sys.base_prefix)


def _hidden_by(folder: str) -> tuple[str, ...]:
    path = _resolved(*search_path())
    # Python puts the user's folder ahead of the others once it exists.
    return path[path.index(folder) + 1 :] if folder in path else _resolved(*site.getsitepackages())


def _why_not_written(folder: str) -> str | None:
    nearest = folder
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if os.access(nearest, os.W_OK):
        return None
    return f"{folder} is not this user's to write: as its owner, or where its image is built"


def _resolved(*folders: str) -> tuple[str, ...]:
    paths = filter(None, map(absolute, filter(None, folders)))
    return tuple(dict.fromkeys(map(os.path.realpath, paths)))


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return path in folders or path.startswith(tuple(os.path.join(folder, "") for folder in folders))


def _is_virtual() -> bool:
    return sys.prefix != sys.base_prefix
