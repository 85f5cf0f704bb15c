"""Virtual environments that are kept from run to run, for what is too large for the environment of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.lab.overlay import LabError, site_of

#: What a child needs of the variables of this process to reach a package index.
_NETWORK = re.compile(r"PIP_|UV_|SSL_|CURL_CA|REQUESTS_CA|XDG_CONFIG_HOME|(https?|all|no)_proxy", re.IGNORECASE)


def install(name: str, requirements: Iterable[str]) -> Path:
    """The site-packages of a kept environment with these packages, all of them wheels."""
    wanted = list(requirements)

    def fill(python: Path) -> None:
        call([str(python), "-m", "pip", "install", "--quiet", "--only-binary=:all:", *wanted])

    return packages_of(kept_environment(name, "\n".join(wanted), fill))


def kept_environment(name: str, wanted: str, fill: Callable[[Path], None]) -> Path:
    """The interpreter of an environment, in ORTGPU_MATRIX_FOLDER or the user's cache folder.

    It is made anew, and filled by a function that is given the interpreter, unless one of this name was filled whole
    for the same ``wanted``.
    """
    import fcntl

    folder = kept_folder()
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
    return site_of(python.parent.parent)


def network_variables(cache: Path) -> Mapping[str, str]:
    """What a child needs to install something; pip keeps what it downloads in ``cache``."""
    found = {name: value for name, value in os.environ.items() if _NETWORK.match(name)}
    found.setdefault("XDG_CONFIG_HOME", os.path.expanduser("~/.config"))  # where pip may have its index from
    found.setdefault("PIP_CACHE_DIR", str(cache))
    return found


def call(command: Sequence[str]) -> str:
    """Its standard output. Raises LabError, with all that it printed, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def kept_folder() -> Path:
    """The folder of what is kept from run to run: ORTGPU_MATRIX_FOLDER, or one in the user's cache folder."""
    chosen = os.environ.get("ORTGPU_MATRIX_FOLDER")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "ortgpu-matrix"
