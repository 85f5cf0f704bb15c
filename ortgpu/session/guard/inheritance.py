"""Environment variables that put the guard in force in child processes of a guarded Python process."""

from __future__ import annotations

import os
import site
from collections.abc import Collection, MutableMapping

from .exemptions import VARIABLE as EXEMPTIONS
from .exemptions import variable_text
from .startup._ortgpu_hook import is_wanted

VARIABLE = "ORTGPU_ENFORCE"
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_START_FILES = ("ortgpu_enforce.pth", "_ortgpu_waiting.py")

_before: dict[str, str | None] = {}  # the values of variables before this process changed them
_now: dict[str, str] = {}


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the variables that put the guard in force in a new process of any Python."""
    environment[VARIABLE] = "1"
    environment["PYTHONPATH"] = _add_startup(environment.get("PYTHONPATH", ""))


def hand_on(exemptions: Collection[str]) -> None:
    """Put the guard in force in the Python processes that this one starts from now on.

    PYTHONPATH changes only if no file of the environment loads the guard at the start of Python.
    """
    values = {} if is_wanted() else {VARIABLE: "1"}
    if exemptions:
        values[EXEMPTIONS] = variable_text(exemptions)
    path = os.environ.get("PYTHONPATH", "")
    if STARTUP not in path.split(os.pathsep) and not _is_loaded_at_start():
        values["PYTHONPATH"] = _add_startup(path)
    for name, value in values.items():
        if os.environ.get(name) != value:
            _before.setdefault(name, os.environ.get(name))
            _now[name] = os.environ[name] = value


def take_back() -> None:
    """Undo :func:`hand_on`. If other code has changed a variable meanwhile, it stays as it is."""
    for name, value in _now.items():
        if os.environ.get(name) != value:
            continue
        before = _before[name]
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _before.clear()
    _now.clear()


def _is_loaded_at_start() -> bool:
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return any(all(os.path.isfile(os.path.join(folder, file)) for file in _START_FILES) for folder in folders)


def _add_startup(path: str) -> str:
    # Keep empty entries. They mean the working directory, and PYTHONPATH=$PYTHONPATH:lib may contain one.
    others = [entry for entry in path.split(os.pathsep) if entry != STARTUP] if path else []
    return os.pathsep.join([STARTUP, *others])
