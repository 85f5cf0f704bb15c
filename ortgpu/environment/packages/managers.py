"""Find the program that makes this environment agree with its project's lock file, and undoes pip's changes."""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Manager:
    """A manager of environments. ``add``: shell words before requirements, to add them to lock and environment."""

    name: str
    lock: str
    add: str


def read_manager() -> Manager | None:
    """Return the manager of this environment; None if there is none, it cannot be started, or several may be meant."""
    if sys.prefix == sys.base_prefix:
        return None
    prefix, here = os.path.realpath(sys.prefix), _working_folder()
    folders = (os.path.dirname(prefix), _read(prefix, ".project"), *map(str, (here, *here.parents)))
    for folder in filter(None, folders):
        found = [
            Manager(name, os.path.join(folder, lock), words)
            for name, lock, words, is_elsewhere in _KNOWN
            if os.path.isfile(os.path.join(folder, lock))
            and (prefix == os.path.join(os.path.realpath(folder), ".venv") or is_elsewhere(folder, prefix))
        ]
        if found:
            return _as_started_here(found[0], here) if len(found) == 1 and shutil.which(found[0].name) else None
    return None


def is_for_one_run() -> bool:
    """Return True in the temporary environment that `uv run --with` makes: docs.astral.sh/uv, "Running commands"."""
    return any(line.startswith("extends-environment") for line in _read(sys.prefix, "pyvenv.cfg").splitlines())


def _as_started_here(manager: Manager, here: Path) -> Manager:
    project = Path(manager.lock).parent
    if here.is_relative_to(project.resolve()):
        return manager
    return Manager(manager.name, manager.lock, f"cd {shlex.quote(str(project))} && {manager.add}")


def _is_of_uv(project: str, prefix: str) -> bool:
    named = os.environ.get("UV_PROJECT_ENVIRONMENT")
    return bool(named) and os.path.realpath(os.path.join(project, named or "")) == prefix


def _is_of_poetry(project: str, prefix: str) -> bool:
    """Return True if the name is that of EnvManager.generate_env_name in poetry/utils/env/env_manager.py."""
    digest = hashlib.sha256(os.path.normcase(os.path.realpath(project)).encode()).digest()
    return f"-{base64.urlsafe_b64encode(digest).decode()[:8]}-py" in os.path.basename(prefix)


def _is_of_pdm(project: str, prefix: str) -> bool:
    return os.path.realpath(os.path.dirname(os.path.dirname(_read(project, ".pdm-python") or os.sep))) == prefix


def _is_of_pipenv(project: str, prefix: str) -> bool:
    return os.path.realpath(_read(prefix, ".project") or os.sep) == os.path.realpath(project)


# All of them take .venv beside the lock file. For an environment elsewhere: docs.astral.sh/uv, "Project environment
# path"; python-poetry.org/docs/managing-environments; pdm-project.org, "Working with virtual environments";
# pipenv.pypa.io, "Virtual environment": .project in it has the project's path.
_KNOWN: tuple[tuple[str, str, str, Callable[[str, str], bool]], ...] = (
    ("uv", "uv.lock", "uv add", _is_of_uv),
    ("poetry", "poetry.lock", "poetry add", _is_of_poetry),
    ("pdm", "pdm.lock", "pdm add", _is_of_pdm),
    ("pipenv", "Pipfile.lock", "pipenv install", _is_of_pipenv),
)


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it is gone
        return Path(os.sep)


def _read(folder: str, name: str) -> str:
    try:
        return Path(folder, name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""
