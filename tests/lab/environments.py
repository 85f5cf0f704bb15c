"""Virtual environments with packages of the index, made on demand, kept and shared by the tests of the matrix."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.lab.overlay import LabError

#: What a child needs of the variables of this process to reach a package index.
_NETWORK = re.compile(r"PIP_|UV_|SSL_|CURL_CA|REQUESTS_CA|XDG_CONFIG_HOME|(https?|all|no)_proxy", re.IGNORECASE)


def install(name: str, requirements: Iterable[str]) -> Path:
    """The site-packages of an environment with these packages; made, if it is not there or not complete.

    Environments are kept in ORTGPU_MATRIX_FOLDER, or in the user's cache folder.
    """
    import fcntl

    chosen = os.environ.get("ORTGPU_MATRIX_FOLDER")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else cache / "ortgpu-matrix"
    root = folder / f"{name}-{sys.implementation.cache_tag}"
    content = root / "content.txt"  # written last
    wanted = "\n".join(requirements)
    folder.mkdir(parents=True, exist_ok=True)
    with Path(f"{root}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not content.exists() or content.read_text(encoding="utf-8") != wanted:
            _call([sys.executable, "-m", "venv", "--clear", str(root)])
            command = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
            _call([*command, *wanted.splitlines()])
            content.write_text(wanted, encoding="utf-8")
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(root), "platbase": str(root)}))


def network_variables(cache: Path) -> Mapping[str, str]:
    """What a child needs to install something; pip keeps what it downloads in ``cache``."""
    found = {name: value for name, value in os.environ.items() if _NETWORK.match(name)}
    found.setdefault("XDG_CONFIG_HOME", os.path.expanduser("~/.config"))  # where pip may have its index from
    found.setdefault("PIP_CACHE_DIR", str(cache))
    return found


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
