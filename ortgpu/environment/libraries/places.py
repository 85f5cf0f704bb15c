"""The parts of the search for the CUDA libraries: places, roots, and the rules of an operating system.

The places of Linux are in :mod:`.places_linux`, those of Windows in :mod:`.places_windows`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..packages.metadata import numbers_of
from .catalogue import LibrarySpec, canonical

Source = Literal[
    "already loaded", "directory", "nvidia wheels", "torch", "conda", "environment variable", "toolkit",
    "system loader", "beside a loaded one"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Root:
    """One place with libraries: the file names in it, by base name."""

    source: Source
    prefix: str  # names the root to a person: a site-packages/nvidia folder, a toolkit, "/etc/ld.so.cache"
    files: Mapping[str, str]  # base name, as the catalogue spells it, to path
    unfit: str | None = None  # why none of its files may be opened


# Of the folders of a toolkit and of cuDNN, in the order of the search
VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "CUDNN_PATH")

Step = Callable[["SearchPlaces", int], Iterator[Root]]  # the roots of one kind, for a CUDA major


@dataclass(frozen=True, slots=True)
class System:
    """The rules of an operating system for the search."""

    names: Callable[[LibrarySpec], Mapping[int, str]]  # of a library, by CUDA major
    stem: Callable[[LibrarySpec], str]  # what comes before the version in these names
    suffix: str  # what comes behind it
    is_library: Callable[[str], bool]  # whether a base name is that of a CUDA library, of any version
    own_name: Callable[[str], str | None]  # the name inside a file, which its file name may not be
    judge: Callable[[str, str, str], str | None]  # why a file must not be opened under a name on a machine; or None
    steps: tuple[Step, ...]  # in the documented order

    def name(self, spec: LibrarySpec, version: int) -> str:
        return f"{self.stem(spec)}{version}{self.suffix}"


@dataclass(frozen=True, slots=True)
class SearchPlaces:
    """The inputs of the search, which can also point at a prepared tree."""

    sys_path: tuple[str, ...]
    variables: Mapping[str, str]  # as they are now
    start_library_path: str  # LD_LIBRARY_PATH when the process started
    python_prefix: str
    machine: str
    mapped: tuple[str, ...]  # paths of the libraries of NVIDIA's in this process
    system: System
    directory: str | None = None
    torch_folder: str | None = None  # of a torch of the same CUDA major
    provider_search_path: tuple[str, ...] = ()
    filesystem: Path = Path("/")  # where etc/ld.so.cache, usr/local/cuda... are


def already_loaded(places: SearchPlaces, _: int) -> Iterator[Root]:
    # The kernel names the file behind the link (libnvrtc.so.11.8.89); what counts is its SONAME (libnvrtc.so.11.2).
    named = places.system.own_name
    yield Root("already loaded", "this process", {named(p) or canonical(os.path.basename(p)): p for p in _cuda(places)})


def _cuda(places: SearchPlaces) -> list[str]:
    return [path for path in places.mapped if places.system.is_library(os.path.basename(path))]


def nvidia_wheels(places: SearchPlaces, inner: tuple[str, ...]) -> Iterator[Root]:
    for entry in dict.fromkeys(map(absolute, places.sys_path)):
        prefix = os.path.join(entry, "nvidia")
        components = sorted(listed(prefix))
        if components:
            folders = [os.path.join(prefix, name, folder) for name in components for folder in inner]
            yield root(places.system, "nvidia wheels", prefix, folders)


def torch_folder(places: SearchPlaces, _: int) -> Iterator[Root]:
    if places.torch_folder is not None:
        folder = os.path.join(places.torch_folder, "lib")
        yield root(places.system, "torch", folder, [folder])


def conda_prefixes(places: SearchPlaces) -> Iterator[str]:
    prefixes = [places.variables.get("CONDA_PREFIX", "")]
    if os.path.isdir(os.path.join(places.python_prefix, "conda-meta")):
        prefixes.append(places.python_prefix)
    return distinct(prefixes)


def beside_loaded(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in distinct(map(os.path.dirname, _cuda(places))):
        yield root(places.system, "beside a loaded one", folder, [folder])


def root(system: System, source: Source, prefix: str, folders: Iterable[str], *, unfit: str | None = None) -> Root:
    files: dict[str, str] = {}
    for folder in distinct(folders):
        for name in sorted(listed(folder)):
            if system.is_library(name):
                files.setdefault(canonical(name), os.path.join(folder, name))
    return Root(source, prefix, files, unfit)


def listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):  # absent, unreadable, not a folder, or not a path at all
        return []


def newest_first(folder: str, pattern: str) -> list[str]:
    """Return the matching names in a folder, the highest version first."""
    return sorted((n for n in listed(folder) if re.fullmatch(pattern, n, re.IGNORECASE)), key=numbers_of, reverse=True)


def distinct(paths: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for path in paths:
        full = absolute(path) if path else ""
        if full and (real := os.path.realpath(full)) not in seen:
            seen.add(real)
            yield full


def absolute(path: str) -> str:
    """Return an absolute path, since the working directory may change; empty if that directory is gone."""
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except OSError:
        return ""
