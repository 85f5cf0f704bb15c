"""Where each CUDA library would come from. Looks at files; opens none of them as a library.

The search order, first to last:

1. already loaded in this process;
2. the directory that the caller gave;
3. every folder ``nvidia`` along sys.path (wheels of both layouts: ``nvidia/cublas/lib``, ``nvidia/cu13/lib``);
4. the libraries inside an installed torch of the same CUDA major;
5. conda: CONDA_PREFIX and the interpreter's own prefix;
6. CUDA_HOME, CUDA_PATH, CUDNN_HOME, CUDNN_PATH, then the toolkits under /usr/local;
7. the system loader: the provider's own search path, LD_LIBRARY_PATH as it was at the start, its cache, the defaults;
8. the folders of CUDA libraries that this process has loaded from none of these.

Libraries of the CUDA toolkit are taken from one root where one root has all of them, whatever its place in the order;
the root of a toolkit library that is already loaded comes first. cuDNN is taken from that root too, where it has one (a
cuDNN for another CUDA has the same name), unless the caller's directory has one. Its parts come from the folder of
``libcudnn``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .catalogue import LIBRARIES, TOOLKIT_MAJORS, LibrarySpec, major_of, spec_for
from .elf import read_elf, this_machine, wrong_machine
from .loader_cache import read_loader_cache
from .mapped import only_loaded, read_mapped_libraries
from .metadata import search_path
from .packages import Torch
from .variables import read_variables
from .wheel import ProviderLibrary

Source = Literal[
    "already loaded", "directory", "nvidia wheels", "torch", "conda", "environment variable", "toolkit",
    "system loader", "beside a loaded one"
]  # fmt: skip

_CUDA_FILE = re.compile(r"lib(cu|nv)\w+\.so(\.|$)")
_NVIDIA_FILE = re.compile(r"lib(cu|nv|nccl)\w*\.so(\.|$)")


@dataclass(frozen=True, slots=True)
class Root:
    """One place with libraries: the file names in it, by base name."""

    source: Source
    prefix: str  # names the root to a person: a site-packages/nvidia folder, a toolkit, "/etc/ld.so.cache"
    files: Mapping[str, str]  # base name to path


@dataclass(frozen=True, slots=True)
class Candidate:
    """One file that could serve a soname. ``problem`` None means that it may be opened."""

    soname: str
    path: str
    source: Source
    root: str
    problem: str | None = None
    unfit_for: str | None = None  # the library of this process that does not have what this file takes from it


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the search found for one soname: what to open, in order, and what was passed over and why."""

    spec: LibrarySpec
    soname: str
    required: bool  # linked by the provider, as opposed to opened lazily
    candidates: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def damaged(self) -> tuple[Candidate, ...]:
        """The files of the right name that must not be opened."""
        return tuple(file for file in self.rejected if _names_soname(os.path.basename(file.path), self.soname))


@dataclass(frozen=True, slots=True)
class SearchPlaces:
    """Everything that the search depends on, so that it can be pointed at a prepared tree."""

    sys_path: tuple[str, ...]
    variables: Mapping[str, str]  # as they are now
    start_library_path: str  # LD_LIBRARY_PATH when the process started
    python_prefix: str
    machine: str
    mapped: tuple[str, ...]  # paths of the libraries of NVIDIA's in this process
    directory: str | None = None
    torch_folder: str | None = None  # of a torch of the same CUDA major
    provider_search_path: tuple[str, ...] = ()
    filesystem: Path = Path("/")  # where etc/ld.so.cache, usr/local/cuda... are


def find_roots(places: SearchPlaces, cuda_major: int) -> tuple[Root, ...]:
    """All roots that hold any file of a CUDA library, in the documented order."""
    return tuple(_each_root(places, cuda_major))


def _each_root(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    return (root for step in _STEPS for root in step(places, cuda_major) if root.files)


def _already_loaded(places: SearchPlaces, _: int) -> Iterator[Root]:
    # The kernel names the file behind the link (libnvrtc.so.11.8.89); what counts is its SONAME (libnvrtc.so.11.2).
    paths = [path for path in places.mapped if _is_cuda(os.path.basename(path))]
    yield Root("already loaded", "this process", {read_elf(p).soname or os.path.basename(p): p for p in paths})


def _explicit_directory(places: SearchPlaces, _: int) -> Iterator[Root]:
    if places.directory is not None:
        yield _root("directory", places.directory, _toolkit_folders(places.directory))


def _nvidia_wheels(places: SearchPlaces, _: int) -> Iterator[Root]:
    for entry in dict.fromkeys(map(_absolute, places.sys_path)):
        prefix = os.path.join(entry, "nvidia")
        components = sorted(_list(prefix))
        if components:
            yield _root("nvidia wheels", prefix, [os.path.join(prefix, name, "lib") for name in components])


def _torch(places: SearchPlaces, _: int) -> Iterator[Root]:
    if places.torch_folder is not None:
        folder = os.path.join(places.torch_folder, "lib")
        yield _root("torch", folder, [folder])


def _conda(places: SearchPlaces, _: int) -> Iterator[Root]:
    prefixes = [places.variables.get("CONDA_PREFIX", "")]
    if os.path.isdir(os.path.join(places.python_prefix, "conda-meta")):
        prefixes.append(places.python_prefix)
    for prefix in _distinct(prefixes):
        yield _root("conda", prefix, _toolkit_folders(prefix))


def _variables(places: SearchPlaces, _: int) -> Iterator[Root]:
    names = ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "CUDNN_PATH")
    for prefix in _distinct(places.variables.get(name, "") for name in names):
        yield _root("environment variable", prefix, _toolkit_folders(prefix))


def _default_toolkits(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    folder = str(places.filesystem / "usr/local")
    names = sorted(
        (n for n in _list(folder) if re.fullmatch(rf"cuda-{cuda_major}(\.\d+)?", n)), key=_version, reverse=True
    )
    for prefix in _distinct(os.path.join(folder, name) for name in ["cuda", *names]):
        yield _root("toolkit", prefix, _toolkit_folders(prefix))


def _system_loader(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in _distinct(places.provider_search_path):
        yield _root("system loader", folder, [folder])
    for folder in _distinct(places.start_library_path.split(":")):
        yield _root("system loader", folder, [folder])
    cache = places.filesystem / "etc/ld.so.cache"
    cached = {name: path for name, path in read_loader_cache(cache).items() if _is_cuda(name)}
    yield Root("system loader", str(cache), cached)
    for default in ("lib64", "usr/lib64", "lib", "usr/lib"):
        folder = str(places.filesystem / default)
        yield _root("system loader", folder, [folder])


def _beside_loaded(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in _distinct(os.path.dirname(path) for path in places.mapped if _is_cuda(os.path.basename(path))):
        yield _root("beside a loaded one", folder, [folder])


_STEPS = (
    _already_loaded,
    _explicit_directory,
    _nvidia_wheels,
    _torch,
    _conda,
    _variables,
    _default_toolkits,
    _system_loader,
    _beside_loaded,
)


def resolve(
    places: SearchPlaces, needed: Sequence[str], cuda_major: int, *, thorough: bool = True
) -> tuple[Resolution, ...]:
    """For each library of the provider, dependencies first: the files to try, and those passed over.

    ``needed`` is the provider's DT_NEEDED; libraries that the table knows and the provider does not link are
    resolved as not required. A soname of the provider that no table entry knows is left to the system loader.

    Without ``thorough`` the search ends with the first root, behind what is already loaded, that has a whole file of
    everything that the provider links and of cuDNN: what is missing or passed over elsewhere is not seen then.
    """
    linked = {spec.stem: soname for soname in needed if (spec := spec_for(soname)) is not None}
    wanted = [(spec, linked.get(spec.stem) or spec.sonames.get(cuda_major)) for spec in LIBRARIES]
    cudnn_major = major_of(linked.get("libcudnn", ""))
    toolkit = {soname for spec, soname in wanted if soname and not spec.is_cudnn and spec.stem in linked}
    roots = (
        tuple(_each_root(places, cuda_major)) if thorough else _first_roots(places, cuda_major, toolkit, cudnn_major)
    )
    roots = _preferred_first(roots, toolkit, places.machine)
    cudnn_roots = sorted(roots, key=lambda root: root.source not in ("already loaded", "directory"))
    resolutions: dict[str, Resolution] = {}
    for spec, soname in wanted:
        if soname is None and cuda_major > TOOLKIT_MAJORS[-1]:
            soname = _soname_there(roots, spec, cuda_major) or spec.sonames.get(TOOLKIT_MAJORS[-1])
        if soname is None:
            continue
        if spec.is_cudnn and cudnn_major is not None:
            soname = f"{spec.stem}.so.{cudnn_major}"
        whole = resolutions.get(spec.part_of or "")
        where = cudnn_roots if spec.is_cudnn else roots
        resolutions[spec.stem] = _resolve_one(spec, soname, spec.stem in linked, where, whole, places.machine)
    return tuple(resolutions.values())


def _soname_there(roots: Iterable[Root], spec: LibrarySpec, cuda_major: int) -> str | None:
    """For a CUDA newer than the table, of a library that is opened lazily: the version that the first root has; where
    it has several, the one beside the CUDA runtime."""
    for root in roots:
        beside = os.path.dirname(root.files.get(f"libcudart.so.{cuda_major}", ""))
        names = [name for name in root.files if name.startswith(f"{spec.stem}.so.")]
        if names:  # libcudnn.so.9 before libcudnn.so.9.14.0
            return min(names, key=lambda name: (os.path.dirname(root.files[name]) != beside, len(name)))
    return None


def _first_roots(places: SearchPlaces, cuda_major: int, toolkit: set[str], cudnn_major: int | None) -> tuple[Root, ...]:
    """The roots down to the first that is enough; all, when part of the toolkit is loaded and its root is wanted."""
    enough = {*toolkit, f"libcudnn.so.{cudnn_major or 9}"}
    roots: list[Root] = []
    for root in _each_root(places, cuda_major):
        roots.append(root)
        if roots[0].source == "already loaded" and toolkit & roots[0].files.keys():
            continue
        if enough <= root.files.keys() and not any(
            judge_file(root.files[soname], soname, places.machine) for soname in enough
        ):
            break
    return tuple(roots)


def _resolve_one(
    spec: LibrarySpec, soname: str, required: bool, roots: Iterable[Root], whole: Resolution | None, machine: str
) -> Resolution:
    candidates: list[Candidate] = []
    rejected: list[Candidate] = []
    seen: set[str] = set()
    folders = folders_of(whole.chosen.path) if whole is not None and whole.chosen is not None else None
    for root in roots:
        for name, path in root.files.items():
            if not name.startswith(f"{spec.stem}.so.") or path in seen:
                continue
            if folders is not None and folders.isdisjoint(folders_of(path)):
                continue
            if root.source == "beside a loaded one" and os.path.realpath(path) in map(os.path.realpath, seen):
                continue
            if not _names_soname(name, soname):
                if name.count(".") <= soname.count(".") or name in spec.sonames.values():  # libcudart.so.11.0
                    rejected.append(Candidate(soname, path, root.source, root.prefix, f"is {name}, {soname} is needed"))
                    seen.add(path)
                continue
            seen.add(path)
            problem = None if root.source == "already loaded" else judge_file(path, soname, machine)
            candidate = Candidate(soname, path, root.source, root.prefix, problem)
            (rejected if problem else candidates).append(candidate)
    return Resolution(spec, soname, required, tuple(candidates), tuple(rejected))


def judge_file(path: str, soname: str, machine: str) -> str | None:
    """Why this file must not be opened as ``soname``, or None. Reads headers only."""
    elf = read_elf(path)
    if elf.problem:
        return elf.problem
    if problem := wrong_machine(elf.machine, machine):
        return problem
    if elf.soname is not None and elf.soname != soname:
        return f"its SONAME is {elf.soname}, {soname} is needed"
    return None


def _preferred_first(roots: tuple[Root, ...], toolkit: set[str], machine: str) -> tuple[Root, ...]:
    """The roots with the one that should serve the whole toolkit moved to just behind what is loaded already."""

    def serves_all(root: Root) -> bool:
        paths = (root.files.get(soname) for soname in toolkit)
        return all(
            path and judge_file(path, soname, machine) is None for path, soname in zip(paths, toolkit, strict=True)
        )

    loaded = next((root for root in roots if root.source == "already loaded"), None)
    in_use = {os.path.realpath(path) for name, path in (loaded.files.items() if loaded else ()) if name in toolkit}

    def is_in_use(root: Root) -> bool:
        return any(os.path.realpath(root.files[soname]) in in_use for soname in toolkit if soname in root.files)

    others = [root for root in roots if root is not loaded]
    preferred = next((root for root in others if is_in_use(root)), None)
    if preferred is None:
        preferred = next((root for root in others if serves_all(root)), None)
    ordered = [root for root in (loaded, preferred) if root is not None]
    return (*ordered, *(root for root in others if root is not preferred))


def _names_soname(name: str, soname: str) -> bool:
    """Whether a file name is this soname or a longer version of it: libcublas.so.13.1.0 is libcublas.so.13."""
    return name == soname or name.startswith(soname + ".")


def folders_of(path: str) -> set[str]:
    """The folder that a path names and the one that the file behind its links is in."""
    return {os.path.realpath(os.path.dirname(path)), os.path.dirname(os.path.realpath(path))}


def _root(source: Source, prefix: str, folders: Iterable[str]) -> Root:
    files: dict[str, str] = {}
    for folder in _distinct(folders):
        for name in sorted(_list(folder)):
            if _is_cuda(name):
                files.setdefault(name, os.path.join(folder, name))
    return Root(source, prefix, files)


def _toolkit_folders(prefix: str) -> list[str]:
    inner = ("", "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib/x86_64-linux-gnu")
    folders = [os.path.join(prefix, name) if name else prefix for name in inner]
    wheel_layout = [os.path.join(prefix, name, "lib") for name in sorted(_list(prefix))]
    return folders + [folder for folder in wheel_layout if os.path.isdir(folder)]


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):  # absent, unreadable, not a folder, or not a path at all
        return []


def _distinct(paths: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for path in paths:
        absolute = _absolute(path) if path else ""
        if absolute and (real := os.path.realpath(absolute)) not in seen:
            seen.add(real)
            yield absolute


def _absolute(path: str) -> str:
    """What is found here is opened later, whatever the working directory is then; empty if that is gone already."""
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except OSError:
        return ""


def _is_cuda(name: str) -> bool:
    return _CUDA_FILE.match(name) is not None and spec_for(name) is not None


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def places_for(provider: ProviderLibrary, torch: Torch | None, directory: str | None = None) -> SearchPlaces:
    """The places of this process, as they are now, for the libraries of a provider."""
    same_major = torch is not None and torch.cuda_version is not None and torch.cuda_version[0] == provider.cuda_major
    return replace(
        places_of_this_process(),
        directory=directory,
        torch_folder=torch.folder if torch is not None and same_major else None,
        provider_search_path=provider.search_path,
    )


def places_of_this_process() -> SearchPlaces:
    """The places that do not depend on what is looked for."""
    at_start = read_variables().at_start
    return SearchPlaces(
        sys_path=tuple(search_path()),
        variables=os.environ,
        start_library_path=(os.environ if at_start is None else at_start).get("LD_LIBRARY_PATH", ""),
        python_prefix=sys.prefix,
        machine=this_machine(),
        mapped=only_loaded(path for path in read_mapped_libraries() if _NVIDIA_FILE.match(os.path.basename(path))),
    )
