"""Facts about how packages are installed into this environment, for advice that can be pasted."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Installer:
    """``install`` and ``uninstall`` are shell words to put requirements behind; they name this very interpreter."""

    name: str  # "pip" or "uv"
    install: str
    uninstall: str


def read_installer() -> Installer:
    python = shlex.quote(sys.executable or "python3")
    has_pip = importlib.util.find_spec("pip") is not None
    if not has_pip and shutil.which("uv"):
        return Installer("uv", f"uv pip install --python {python}", f"uv pip uninstall --python {python}")
    pip = f"{python} -m pip"
    if not has_pip and importlib.util.find_spec("ensurepip") is not None:
        pip = f"{python} -m ensurepip && {pip}"  # a virtual environment without pip, and no uv to fill it
    return Installer("pip", f"{pip} install", f"{pip} uninstall -y")
