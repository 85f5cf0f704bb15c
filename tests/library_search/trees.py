"""Prepared trees to search: every place of the documented order, with libraries or without."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpu.environment.libraries.places import LINUX, SearchPlaces
from ortgpu.environment.libraries.search import Resolution, resolve

MACHINE = os.uname().machine
TOOLKIT = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13")
LAZY = ("libcufft.so.12", "libnvrtc.so.13", "libnvJitLink.so.13")
CUDNN = tuple(f"libcudnn{part}.so.9" for part in ("", "_graph", "_ops", "_cnn", "_adv"))
NEEDED = (*TOOLKIT, "libcuda.so.1", "libc.so.6")  # of 1.28 and newer
ALL = (*TOOLKIT, *LAZY, *CUDNN)

Put = Callable[..., Path]


def places(tmp_path: Path, **changes: Any) -> SearchPlaces:
    """Nothing anywhere, but for the changes."""
    nothing: dict[str, Any] = {
        "sys_path": (),
        "variables": {},
        "start_library_path": "",
        "python_prefix": str(tmp_path / "python"),
        "machine": MACHINE,
        "mapped": (),
        "system": LINUX,
        "filesystem": tmp_path / "filesystem",
    }
    return SearchPlaces(**{**nothing, **changes})


def search(where: SearchPlaces, needed: Sequence[str] = NEEDED, cuda_major: int = 13) -> dict[str, Resolution]:
    return {found.soname: found for found in resolve(where, needed, cuda_major)}


def chosen(found: Mapping[str, Resolution], soname: str) -> str:
    candidate = found[soname].chosen
    assert candidate is not None, found[soname]
    return candidate.path


def folders_chosen(found: Mapping[str, Resolution], sonames: Sequence[str] = TOOLKIT) -> set[str]:
    return {os.path.dirname(chosen(found, soname)) for soname in sonames}


def reasons(found: Resolution) -> dict[str, str | None]:
    return {candidate.path: candidate.problem for candidate in found.rejected}


# The documented order


@dataclass(frozen=True)
class Place:
    """One place of the documented order: its folder, and what makes the search look there."""

    source: str
    folder: str
    changes: Callable[[Path], dict[str, Any]]


def cache_naming(tmp_path: Path, folder: str) -> dict[str, Any]:
    cache = tmp_path / "filesystem/etc/ld.so.cache"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_bytes(loader_cache({name: str(tmp_path / folder / name) for name in ALL}))
    return {}


def variable(name: str, folder: str) -> Callable[[Path], dict[str, Any]]:
    return lambda tmp: {"variables": {name: str(tmp / folder)}}


def conda_environment(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "python/conda-meta").mkdir(parents=True)
    return {}


ORDER = (
    Place("already loaded", "loaded", lambda tmp: {"mapped": tuple(str(tmp / "loaded" / name) for name in ALL)}),
    Place("directory", "given", lambda tmp: {"directory": str(tmp / "given")}),
    Place("nvidia wheels", "site/nvidia/cu13/lib", lambda tmp: {"sys_path": (str(tmp / "site"),)}),
    Place("torch", "torch/lib", lambda tmp: {"torch_folder": str(tmp / "torch")}),
    Place("conda", "conda/lib", variable("CONDA_PREFIX", "conda")),
    Place("conda", "python/lib", conda_environment),
    Place("environment variable", "home/lib64", variable("CUDA_HOME", "home")),
    Place("environment variable", "path/targets/x86_64-linux/lib", variable("CUDA_PATH", "path")),
    Place("environment variable", "cudnn/lib", variable("CUDNN_HOME", "cudnn")),
    Place("environment variable", "cudnn_path", variable("CUDNN_PATH", "cudnn_path")),
    Place("toolkit", "filesystem/usr/local/cuda/lib64", lambda tmp: {}),
    Place("toolkit", "filesystem/usr/local/cuda-13.1/lib64", lambda tmp: {}),
    Place("toolkit", "filesystem/usr/local/cuda-13/targets/x86_64-linux/lib", lambda tmp: {}),
    Place("system loader", "rpath", lambda tmp: {"provider_search_path": (str(tmp / "rpath"),)}),
    Place("system loader", "start", lambda tmp: {"start_library_path": f"/absent::{tmp / 'start'}"}),
    Place("system loader", "cached", lambda tmp: cache_naming(tmp, "cached")),
    Place("system loader", "filesystem/usr/lib/aarch64-linux-gnu", lambda tmp: {}),
    Place("system loader", "filesystem/lib64", lambda tmp: {}),
    Place("system loader", "filesystem/usr/lib64", lambda tmp: {}),
    Place("system loader", "filesystem/lib", lambda tmp: {}),
    Place("system loader", "filesystem/usr/lib", lambda tmp: {}),
)


def prepare(tmp_path: Path, put: Put, *chosen_places: Place, sonames: Sequence[str] = ALL) -> SearchPlaces:
    changes: dict[str, Any] = {}
    for place in chosen_places:
        put(tmp_path / place.folder, *sonames)
        new = place.changes(tmp_path)
        if "variables" in new:
            new["variables"] = {**changes.get("variables", {}), **new["variables"]}
        changes |= new
    return places(tmp_path, **changes)


def loader_cache(
    entries: Mapping[str, str], *, flags: int = 0x0303, before: bytes = b"", count: int | None = None
) -> bytes:
    """What ldconfig writes: dl-cache.h, struct cache_file_new."""
    strings, table = b"", b""
    start = 48 + 24 * len(entries)
    for name, path in entries.items():
        key = start + len(strings)
        strings += os.fsencode(name) + b"\0"
        table += struct.pack("<IIIIQ", flags, key, start + len(strings), 0, 0)
        strings += os.fsencode(path) + b"\0"
    number = len(entries) if count is None else count
    header = b"glibc-ld.so.cache1.1" + struct.pack("<II", number, len(strings)).ljust(28, b"\0")
    return before + header + table + strings
