"""Facts about how packages are installed into this environment, for advice that can be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import PathFinder


@dataclass(frozen=True, slots=True)
class Installer:
    """``install`` and ``uninstall`` are shell words to put requirements behind; they name this very interpreter."""

    name: str  # "pip" or "uv"
    install: str
    uninstall: str


def read_installer() -> Installer:
    python = shlex.quote(sys.executable or "python3")
    # Not importlib.util.find_spec: setuptools takes a search for pip as the sign that this process is pip's, and takes
    # its own distutils out of the process (_distutils_hack.DistutilsMetaFinder.spec_for_pip).
    managed = " --break-system-packages" if _is_managed_by_the_system() else ""
    has_pip = PathFinder.find_spec("pip") is not None
    if not has_pip and shutil.which("uv"):
        return Installer(
            "uv", f"uv pip install --python {python}{managed}", f"uv pip uninstall --python {python}{managed}"
        )
    pip = f"{python} -m pip"
    if not has_pip and PathFinder.find_spec("ensurepip") is not None:
        pip = f"{python} -m ensurepip && {pip}"  # a virtual environment without pip, and no uv to fill it
    return Installer("pip", f"{pip} install{managed}", f"{pip} uninstall -y{managed}")


def _is_managed_by_the_system() -> bool:
    """PEP 668: a distribution's own interpreter, into which pip and uv install only when told to all the same."""
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return sys.prefix == sys.base_prefix and os.path.exists(marker)
