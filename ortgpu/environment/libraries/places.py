"""The places of the CUDA libraries on each operating system, and the checks of their files.

The search order on Linux, first to last:

1. already loaded in this process;
2. the caller's directory;
3. every folder ``nvidia`` along sys.path (wheels of both layouts: ``nvidia/cublas/lib``, ``nvidia/cu13/lib``);
4. the libraries inside an installed torch of the same CUDA major;
5. conda: CONDA_PREFIX and the interpreter's own prefix;
6. CUDA_HOME, CUDA_PATH, CUDNN_HOME, CUDNN_PATH, then the toolkits under /usr/local;
7. the system loader: the provider's own search path, LD_LIBRARY_PATH as it was at the start, its cache, the defaults;
8. the folders of CUDA libraries that this process has loaded from elsewhere.

On Windows:

1. already loaded in this process;
2. the caller's directory;
3. the libraries inside an installed torch of the same CUDA major: torch always loads its own libraries, but Windows
   returns already loaded ones of the same names, with error 127 if they differ (onnxruntime issue 23674);
4. every folder ``nvidia`` along sys.path (wheels of both layouts: ``nvidia/cublas/bin``, ``nvidia/cu13/bin/x86_64``);
5. conda: CONDA_PREFIX and the interpreter's own prefix (``Library/bin``);
6. CUDA_HOME, CUDA_PATH, CUDNN_HOME, CUDNN_PATH, the CUDA_PATH_V13_0 that a toolkit sets, then the default folders of
   NVIDIA's installers of CUDA and of cuDNN;
7. the system loader: the folders of Windows, then PATH as it is now;
8. the folders of CUDA libraries that this process has loaded from elsewhere.

The rules of Windows depend on arguments and files alone, so they run on any system, and so do their tests. They follow
the layouts of the wheels for Windows (CUDA 11.8 to 13.5, cuDNN 8.9 to 9.28), of the toolkit's installer (``bin``;
``bin/x64`` since CUDA 13) and of cuDNN's installer (a folder for each CUDA: ``CUDNN/v9.12/bin/13.0``).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ..packages.metadata import DEFAULT_FOLDERS, absolute, list_names, numbers_of, read_file
from .catalogue import LibrarySpec, canonical, is_dll, spec_for
from .library_file import read_library, wrong_machine
from .loader_windows import folders_of_windows, path_of

Source = Literal[
    "already loaded", "directory", "nvidia wheels", "torch", "conda", "environment variable", "toolkit",
    "system loader", "beside a loaded one"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Root:
    source: Source
    prefix: str  # the root's name for people: a site-packages/nvidia folder, a toolkit, "/etc/ld.so.cache"
    files: Mapping[str, str]  # paths by base name, in the catalogue's spelling
    unfit: str | None = None  # reason why none of its files may be opened


Step = Callable[["SearchPlaces", int], Iterator[Root]]  # the roots of one kind, for a CUDA major


@dataclass(frozen=True, slots=True)
class System:
    names: Callable[[LibrarySpec], Mapping[int, str]]  # names of a library by CUDA major
    stem: Callable[[LibrarySpec], str]  # part before the version in these names
    suffix: str  # part behind the version
    is_library: Callable[[str], bool]  # True for the base name of a CUDA library of any version
    inside: Callable[[SearchPlaces, Source, str, int], Iterator[Root]]  # the roots below a folder, for a CUDA major
    folders_of_wheels: tuple[str, ...]  # folders of libraries in a wheel's component
    steps: tuple[Step, ...]  # The order is the documented one.

    def name(self, spec: LibrarySpec, version: int) -> str:
        return f"{self.stem(spec)}{version}{self.suffix}"


@dataclass(frozen=True, slots=True)
class SearchPlaces:
    """The inputs of the search. Tests point them at a prepared tree."""

    sys_path: tuple[str, ...]
    variables: Mapping[str, str]  # current environment variables
    start_library_path: str  # LD_LIBRARY_PATH when the process started
    python_prefix: str
    machine: str
    mapped: tuple[str, ...]  # paths of NVIDIA's libraries in this process
    system: System
    directory: str | None = None
    torch_folder: str | None = None  # folder of a torch of the same CUDA major
    provider_search_path: tuple[str, ...] = ()
    filesystem: Path = Path("/")  # root of etc/ld.so.cache, usr/local/cuda...


def judge(path: str, name: str, machine: str) -> str | None:
    """Return the reason why this file must not be opened under this name, or None. Reads headers only."""
    file = read_library(path)
    problem = file.problem or wrong_machine(file.machine, machine)
    if problem is not None:
        return problem
    if file.soname not in (None, name):
        return f"its SONAME is {file.soname}, {name} is needed"
    own_name = canonical(file.name or name)
    return f"its own name is {own_name}, {name} is needed" if own_name != name and spec_for(own_name) else None


# Steps of both systems


def _already_loaded(places: SearchPlaces, _: int) -> Iterator[Root]:
    # The kernel names the file behind the link (libnvrtc.so.11.8.89), but the loader goes by the SONAME
    # (libnvrtc.so.11.2). Windows goes by the file name of the loaded DLL.
    loaded = reversed(_cuda(places))  # The library that was loaded first by a name serves all later requests.
    files = {read_library(path).soname or canonical(os.path.basename(path)): path for path in loaded}
    yield Root("already loaded", "this process", files)


def _cuda(places: SearchPlaces) -> list[str]:
    return [path for path in places.mapped if places.system.is_library(os.path.basename(path))]


def _explicit_directory(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    if places.directory is not None:
        yield from places.system.inside(places, "directory", places.directory, cuda_major)


def _nvidia_wheels(places: SearchPlaces, _: int) -> Iterator[Root]:
    for entry in dict.fromkeys(map(absolute, places.sys_path)):
        prefix = os.path.join(entry, "nvidia")
        components = sorted(list_names(prefix))
        if components:
            inner = places.system.folders_of_wheels
            yield _root(
                places, "nvidia wheels", prefix, [os.path.join(prefix, c, i) for c in components for i in inner]
            )


def _torch(places: SearchPlaces, _: int) -> Iterator[Root]:
    if places.torch_folder is not None:
        yield _root(places, "torch", os.path.join(places.torch_folder, "lib"))


def conda_prefixes(places: SearchPlaces) -> Iterator[str]:
    prefixes = [places.variables.get("CONDA_PREFIX", "")]
    if os.path.isdir(os.path.join(places.python_prefix, "conda-meta")):
        prefixes.append(places.python_prefix)
    return _distinct(prefixes)


def _conda(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    for prefix in conda_prefixes(places):
        yield from places.system.inside(places, "conda", prefix, cuda_major)


def _variable_roots(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    names = ["CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "CUDNN_PATH"]
    if places.system is WINDOWS:
        of_toolkits = [name for name in places.variables if re.fullmatch(rf"CUDA_PATH_V{cuda_major}_[0-9]+", name)]
        names += sorted(of_toolkits, key=numbers_of, reverse=True)
    for prefix in _distinct(filter(None, map(places.variables.get, names))):
        yield from places.system.inside(places, "environment variable", prefix, cuda_major)


def _loaded_roots(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in _distinct(map(os.path.dirname, _cuda(places))):
        yield _root(places, "beside a loaded one", folder)


def _root(
    places: SearchPlaces, source: Source, prefix: str, folders: Iterable[str] = (), *, unfit: str | None = None
) -> Root:
    """Return the root of these folders, or of ``prefix`` itself."""
    files: dict[str, str] = {}
    for folder in _distinct(folders or (prefix,)):
        for name in sorted(filter(places.system.is_library, list_names(folder))):
            files.setdefault(canonical(name), os.path.join(folder, name))
    return Root(source, prefix, files, unfit)


def _newest_first(folder: str, pattern: str) -> list[str]:
    names = filter(re.compile(pattern, re.IGNORECASE).fullmatch, list_names(folder))
    return sorted(names, key=numbers_of, reverse=True)


def _distinct(paths: Iterable[str]) -> Iterator[str]:
    real_paths: set[str] = set()
    for path in paths:
        full = absolute(path) if path else ""
        if full and (real := os.path.realpath(full)) not in real_paths:
            real_paths.add(real)
            yield full


# Linux

_CUDA_FILE = re.compile(r"lib(cu|nv)\w+\.so(\.|$)")
_INNER_ON_LINUX = ("", "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib/x86_64-linux-gnu")


# glibc, sysdeps/generic/dl-cache.h: struct cache_file_new and struct file_entry_new
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = 48
_CACHE_ENTRY = 24
_ARCHITECTURE_MASK = 0xFF00
_FOREIGN = {0x0000, 0x0800}  # i386 and x32 libraries on an x86-64 system (FLAG_X8664_LIB64 is 0x0300)


def _is_shared_object(name: str) -> bool:
    return _CUDA_FILE.match(name) is not None and spec_for(name) is not None


def _inside_on_linux(places: SearchPlaces, source: Source, prefix: str, _: int) -> Iterator[Root]:
    folders = [os.path.join(prefix, name) if name else prefix for name in _INNER_ON_LINUX]
    for name in sorted(list_names(prefix)):
        in_wheel = os.path.join(prefix, name, "lib")
        if os.path.isdir(in_wheel):
            folders.append(in_wheel)
    yield _root(places, source, prefix, folders)


def _toolkits_on_linux(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    folder = str(places.filesystem / "usr/local")
    names = ["cuda", *_newest_first(folder, rf"cuda-{cuda_major}(\.\d+)?")]
    for prefix in _distinct(map(partial(os.path.join, folder), names)):
        yield from _inside_on_linux(places, "toolkit", prefix, cuda_major)


def _loader_of_linux(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folders in (places.provider_search_path, places.start_library_path.split(":")):
        for folder in _distinct(folders):
            yield _root(places, "system loader", folder)
    cache = places.filesystem / "etc/ld.so.cache"
    cached = {name: path for name, path in read_loader_cache(cache).items() if _is_shared_object(name)}
    yield Root("system loader", str(cache), cached)
    for folder in _distinct(str(places.filesystem / default) for default in DEFAULT_FOLDERS):
        yield _root(places, "system loader", folder)


def read_loader_cache(path: Path) -> dict[str, str]:
    """Return the paths in /etc/ld.so.cache by base name; empty if the file is absent or of an unknown form."""
    return parse_loader_cache(read_file(path) or b"")


def parse_loader_cache(data: bytes) -> dict[str, str]:
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + _CACHE_HEADER:
        return {}
    (count,) = struct.unpack_from("<I", data, start + len(_CACHE_MAGIC))
    paths: dict[str, str] = {}
    for index in range(count):
        at = start + _CACHE_HEADER + index * _CACHE_ENTRY
        if at + _CACHE_ENTRY > len(data):
            break
        flags, key, value = struct.unpack_from("<III", data, at)
        name, target = _string(data, start + key), _string(data, start + value)
        if name and target and flags & _ARCHITECTURE_MASK not in _FOREIGN:
            paths.setdefault(name, target)
    return paths


def _string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return data[at:end].decode("utf-8", "surrogateescape") if at < len(data) and end >= 0 else ""


LINUX = System(
    names=lambda spec: spec.sonames,
    stem=lambda spec: f"{spec.stem}.so.",
    suffix="",
    is_library=_is_shared_object,
    inside=_inside_on_linux,
    folders_of_wheels=("lib",),
    steps=(
        _already_loaded,
        _explicit_directory,
        _nvidia_wheels,
        _torch,
        _conda,
        _variable_roots,
        _toolkits_on_linux,
        _loader_of_linux,
        _loaded_roots,
    ),
)

# Windows

# No provider for Windows (1.19.2 to 1.31.1) opens these. CUDA's runtime is opened on demand if it is not linked.
_NOT_OPENED = ("libcurand",)
_INNER_ON_WINDOWS = ("", "bin", "bin/x64", "bin/x86_64", "lib", "lib/x64", "Library/bin", "Library/bin/x64")


def _inside_on_windows(places: SearchPlaces, source: Source, prefix: str, cuda_major: int) -> Iterator[Root]:
    """Yield the roots of an installer or archive below a folder. A cuDNN for another CUDA is marked unfit."""
    own_folders = [os.path.join(prefix, inner) if inner else prefix for inner in _INNER_ON_WINDOWS]
    own_folders += [
        os.path.join(prefix, name, inner) for name in sorted(list_names(prefix)) for inner in ("bin", "bin/x86_64")
    ]
    others: list[Root] = []
    for name in _newest_first(os.path.join(prefix, "bin"), r"[0-9]+\.[0-9]+"):
        folders = [os.path.join(prefix, "bin", name), os.path.join(prefix, "bin", name, "x64")]
        if numbers_of(name)[0] == cuda_major:
            own_folders += folders
        else:
            unfit = f"is for CUDA {name}, CUDA {cuda_major} is needed"
            others.append(_root(places, source, folders[0], folders, unfit=unfit))
    yield _root(places, source, prefix, own_folders)
    yield from others


def _toolkits_on_windows(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    programs = places.variables.get("PROGRAMFILES") or r"C:\Program Files"
    for folder, pattern in (
        (os.path.join(programs, "NVIDIA GPU Computing Toolkit", "CUDA"), rf"v{cuda_major}\.[0-9]+"),
        (os.path.join(programs, "NVIDIA", "CUDNN"), r"v[0-9]+\.[0-9.]+"),
    ):
        for name in _newest_first(folder, pattern):
            yield from _inside_on_windows(places, "toolkit", os.path.join(folder, name), cuda_major)


def _loader_of_windows(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in _distinct([*folders_of_windows(places.variables), *path_of(places.variables)]):
        yield _root(places, "system loader", folder)


WINDOWS = System(
    names=lambda spec: {} if spec.stem in _NOT_OPENED else spec.dlls,
    stem=lambda spec: spec.dll_stem,
    suffix=".dll",
    is_library=lambda name: is_dll(name) and spec_for(name) is not None,
    inside=_inside_on_windows,
    folders_of_wheels=("bin", "bin/x86_64"),
    steps=(
        _already_loaded,
        _explicit_directory,
        _torch,
        _nvidia_wheels,
        _conda,
        _variable_roots,
        _toolkits_on_windows,
        _loader_of_windows,
        _loaded_roots,
    ),
)
