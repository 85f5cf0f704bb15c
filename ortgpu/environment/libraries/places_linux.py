"""The places of the CUDA libraries on Linux, and the check of their files.

The search order, first to last:

1. already loaded in this process;
2. the directory that the caller gave;
3. every folder ``nvidia`` along sys.path (wheels of both layouts: ``nvidia/cublas/lib``, ``nvidia/cu13/lib``);
4. the libraries inside an installed torch of the same CUDA major;
5. conda: CONDA_PREFIX and the interpreter's own prefix;
6. CUDA_HOME, CUDA_PATH, CUDNN_HOME, CUDNN_PATH, then the toolkits under /usr/local;
7. the system loader: the provider's own search path, LD_LIBRARY_PATH as it was at the start, its cache, the defaults;
8. the folders of CUDA libraries that this process has loaded from none of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ..files.elf import read_elf, wrong_machine
from ..files.loader_cache import read_loader_cache
from .catalogue import spec_for
from .places import (
    VARIABLES,
    Root,
    SearchPlaces,
    System,
    already_loaded,
    beside_loaded,
    conda_prefixes,
    distinct,
    listed,
    newest_first,
    nvidia_wheels,
    root,
    torch_folder,
)

_CUDA_FILE = re.compile(r"lib(cu|nv)\w+\.so(\.|$)")
DEFAULT_FOLDERS = ("lib64", "usr/lib64", "lib", "usr/lib")  # of ld.so(8)


def is_library(name: str) -> bool:
    return _CUDA_FILE.match(name) is not None and spec_for(name) is not None


def judge_file(path: str, soname: str, machine: str) -> str | None:
    """Return why this file must not be opened as ``soname``, or None. Reads headers only."""
    elf = read_elf(path)
    if elf.problem:
        return elf.problem
    if problem := wrong_machine(elf.machine, machine):
        return problem
    if elf.soname is not None and elf.soname != soname:
        return f"its SONAME is {elf.soname}, {soname} is needed"
    return None


def _explicit_directory(places: SearchPlaces, _: int) -> Iterator[Root]:
    if places.directory is not None:
        yield root(places.system, "directory", places.directory, _toolkit_folders(places.directory))


def _nvidia_wheels(places: SearchPlaces, _: int) -> Iterator[Root]:
    return nvidia_wheels(places, ("lib",))


def _conda(places: SearchPlaces, _: int) -> Iterator[Root]:
    for prefix in conda_prefixes(places):
        yield root(places.system, "conda", prefix, _toolkit_folders(prefix))


def _variables(places: SearchPlaces, _: int) -> Iterator[Root]:
    for prefix in distinct(places.variables.get(name, "") for name in VARIABLES):
        yield root(places.system, "environment variable", prefix, _toolkit_folders(prefix))


def _default_toolkits(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    folder = str(places.filesystem / "usr/local")
    names = ["cuda", *newest_first(folder, rf"cuda-{cuda_major}(\.\d+)?")]
    for prefix in distinct(os.path.join(folder, name) for name in names):
        yield root(places.system, "toolkit", prefix, _toolkit_folders(prefix))


def _system_loader(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in distinct(places.provider_search_path):
        yield root(places.system, "system loader", folder, [folder])
    for folder in distinct(places.start_library_path.split(":")):
        yield root(places.system, "system loader", folder, [folder])
    cache = places.filesystem / "etc/ld.so.cache"
    cached = {name: path for name, path in read_loader_cache(cache).items() if is_library(name)}
    yield Root("system loader", str(cache), cached)
    for default in DEFAULT_FOLDERS:
        folder = str(places.filesystem / default)
        yield root(places.system, "system loader", folder, [folder])


def _toolkit_folders(prefix: str) -> list[str]:
    inner = ("", "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib/x86_64-linux-gnu")
    folders = [os.path.join(prefix, name) if name else prefix for name in inner]
    wheel_layout = [os.path.join(prefix, name, "lib") for name in sorted(listed(prefix))]
    return folders + [folder for folder in wheel_layout if os.path.isdir(folder)]


LINUX = System(
    names=lambda spec: spec.sonames,
    stem=lambda spec: f"{spec.stem}.so.",
    suffix="",
    is_library=is_library,
    own_name=lambda path: read_elf(path).soname,
    judge=judge_file,
    steps=(
        already_loaded,
        _explicit_directory,
        _nvidia_wheels,
        torch_folder,
        _conda,
        _variables,
        _default_toolkits,
        _system_loader,
        beside_loaded,
    ),
)
