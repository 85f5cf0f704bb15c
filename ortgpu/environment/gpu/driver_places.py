"""Find libcuda.so.1 where the loader does not look, and libraries that answer in its place."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..files.elf import defines
from ..variables import entries_of

# Where drivers are that the loader is told of by LD_LIBRARY_PATH alone: Kubernetes Engine and nvidia-docker 1, WSL,
# NixOS, Debian, Jetson.
_FOLDERS_OF_DRIVERS: Final = (
    "usr/local/nvidia/lib64",
    "usr/lib64-nvidia",  # Google Colab, by LD_LIBRARY_PATH, which a notebook may set to something else
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia",
    "usr/lib/aarch64-linux-gnu/tegra",
)

# Where the loader looks by itself: ld.so(8), and what Debian adds
_FOLDERS_OF_THE_LOADER: Final = (
    *(f"{above}/{name}-linux-gnu" for name in ("x86_64", "aarch64") for above in ("lib", "usr/lib")),
    *("lib64", "usr/lib64", "lib", "usr/lib"),
)

_OF_A_DRIVER: Final = re.compile(r"libcuda\.so\.\d{3,}(\.\d+)+")


@dataclass(frozen=True, slots=True)
class UnlinkedFile:
    """A libcuda.so.580.65.06 in a folder that the loader searches, without the link libcuda.so.1 to it.

    ldconfig makes the link after an installation, and as a hook of container engines, which fails if the root is
    read-only.
    """

    path: str
    writable: bool  # its folder is, by this user


def find_elsewhere(root: Path, name: str) -> tuple[str, ...]:
    return tuple(f"/{folder}/{name}" for folder in _FOLDERS_OF_DRIVERS if (root / folder / name).is_file())


def find_unlinked(root: Path, name: str) -> tuple[UnlinkedFile, ...]:
    """Return at most one file for each folder, also if its link is broken.

    Empty files do not count: container engines mount files over them.
    """
    entries = [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if os.path.isabs(entry)]
    found: dict[str, UnlinkedFile] = {}
    for folder in (*map(Path, entries), *(root / each for each in _FOLDERS_OF_THE_LOADER)):
        try:
            files = [file for file in sorted(folder.glob("libcuda.so.*")) if _OF_A_DRIVER.fullmatch(file.name)]
            whole = [file for file in files if file.is_file() and file.stat().st_size]
            if whole and not (folder / name).exists():
                path = os.path.realpath(whole[-1])
                found.setdefault(path, UnlinkedFile(path, os.access(os.path.dirname(path), os.W_OK)))
        except (OSError, ValueError):
            continue
    return tuple(found.values())


def find_interposed(root: Path) -> tuple[str, ...]:
    """Return the libraries that are loaded before the program and replace functions of the driver.

    Libraries that share out a GPU do so, such as HAMi's libvgpu.so.
    """
    try:
        text = (root / "etc/ld.so.preload").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        text = ""
    entries = [*entries_of("LD_PRELOAD", os.environ.get("LD_PRELOAD", "")), *re.split(r"[:\s]+", text)]
    found = (entry for entry in entries if os.path.isabs(entry) and not _is_the_driver(entry))
    return tuple(dict.fromkeys(entry for entry in found if defines(entry, ("cuInit", "dlsym"))))


def _is_the_driver(path: str) -> bool:
    return os.path.basename(path).startswith("libcuda.so")
