"""Virtual environments that are kept from run to run, for what is too large for the environment of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.lab import LabError


def kept_environment(name: str, wanted: str, fill: Callable[[Path], None]) -> Path:
    """The interpreter of an environment, in ORTGPU_MATRIX_FOLDER or the user's cache folder.

    It is made anew, and filled by a function that is given the interpreter, unless one of this name was filled whole
    for the same ``wanted``.
    """
    import fcntl

    folder = _folder()
    root = folder / f"{name}-{sys.implementation.cache_tag}"
    python = root / "bin" / "python"
    content = root / "content.txt"  # written last
    folder.mkdir(parents=True, exist_ok=True)
    with Path(f"{root}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not content.exists() or content.read_text(encoding="utf-8") != wanted:
            call([sys.executable, "-m", "venv", "--clear", str(root)])
            fill(python)
            content.write_text(wanted, encoding="utf-8")
    return python


def packages_of(python: Path) -> Path:
    """The site-packages of such an environment."""
    root = str(python.parent.parent)
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": root, "platbase": root}))


def call(command: Sequence[str]) -> str:
    """Its standard output. Raises LabError, with all that it printed, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _folder() -> Path:
    chosen = os.environ.get("ORTGPU_MATRIX_FOLDER")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "ortgpu-matrix"
