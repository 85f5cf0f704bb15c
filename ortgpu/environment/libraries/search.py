"""Find the files of each CUDA library. Reads files, and opens none of them as a library.

The places and their order depend on the operating system: see :mod:`.places`.

If one root has all libraries of the CUDA toolkit, they are taken from it, whatever its place in the order. The root of
a toolkit library that is already loaded comes first. cuDNN is taken from that root too if it has one, because a cuDNN
for another CUDA has the same name. A cuDNN in the caller's directory takes precedence. The parts of cuDNN come from
the folder of ``libcudnn``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..packages.installed import Torch
from ..packages.metadata import search_path
from ..variables import read_variables
from .catalogue import BY_STEM, LIBRARIES, TOOLKIT_MAJORS, LibrarySpec, canonical, major_of, spec_for
from .library_file import this_machine
from .loader import only_loaded, read_mapped_libraries
from .places import LINUX, WINDOWS, Root, SearchPlaces, Source, System, judge
from .wheel import ProviderLibrary

_NVIDIA_FILE = re.compile(r"lib(cu|nv|nccl)\w*\.so(\.|$)|(?i:(cu|nv)[\w-]*\.dll$)")
_ORIGIN = re.compile(r"\$(ORIGIN\b|\{ORIGIN\})")  # folder of a file, in the file's own search path: ld.so(8)

SYSTEM: Final = WINDOWS if sys.platform == "win32" else LINUX  # system of this process


@dataclass(frozen=True, slots=True)
class Candidate:
    """One file that could serve a soname. ``problem`` None means that it may be opened."""

    soname: str
    path: str
    source: Source
    root: str
    problem: str | None = None
    unfit_for: str | None = None  # library of this process that lacks a function that this file imports from it


@dataclass(frozen=True, slots=True)
class Resolution:
    """The result of the search for one soname: the files to open, in order, and the rejected files with reasons."""

    spec: LibrarySpec
    soname: str
    required: bool  # True: the provider links it. False: it is opened lazily.
    candidates: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def damaged(self) -> tuple[Candidate, ...]:
        """The files of the right name that must not be opened."""
        return tuple(
            file for file in self.rejected if _names_soname(canonical(os.path.basename(file.path)), self.soname)
        )


def find_roots(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    """Return the roots with any file of a CUDA library, in the documented order. Each is read when its turn comes."""
    for step in places.system.steps:
        for root in step(places, cuda_major):
            if root.files:
                yield root


def resolve(
    places: SearchPlaces, needed: Sequence[str], cuda_major: int, *, thorough: bool = True
) -> tuple[Resolution, ...]:
    """Find the files to try, and the rejected ones, for each library of the provider, dependencies first.

    ``needed`` is the provider's DT_NEEDED. Libraries of the table that the provider does not link are resolved as not
    required. Sonames of the provider that are not in the table are left to the system loader.

    Without ``thorough`` the search ends with the first root, behind the loaded libraries, that is sufficient: it has
    complete files of cuDNN and of all linked libraries. The search then sees no missing or rejected files elsewhere.
    """
    system = places.system
    linked = {spec.stem: canonical(soname) for soname in needed if (spec := spec_for(soname)) is not None}
    libraries = [(spec, linked.get(spec.stem) or system.names(spec).get(cuda_major)) for spec in LIBRARIES]
    cudnn_major = major_of(linked.get("libcudnn", ""))
    toolkit = {soname for spec, soname in libraries if soname and not spec.is_cudnn and spec.stem in linked}
    roots = (
        tuple(find_roots(places, cuda_major)) if thorough else _first_roots(places, cuda_major, toolkit, cudnn_major)
    )
    roots = _preferred_first(roots, toolkit, places)
    cudnn_roots = sorted(roots, key=lambda root: root.source not in ("already loaded", "directory"))
    resolutions: dict[str, Resolution] = {}
    for spec, soname in libraries:
        if soname is None and cuda_major > TOOLKIT_MAJORS[-1] and system.names(spec):
            soname = _soname_there(roots, spec, cuda_major, system) or system.names(spec).get(TOOLKIT_MAJORS[-1])
        if soname is None:
            continue
        if spec.is_cudnn and cudnn_major is not None:
            soname = system.name(spec, cudnn_major)
        whole = resolutions.get(spec.part_of or "")
        where = cudnn_roots if spec.is_cudnn else roots
        resolutions[spec.stem] = _resolve_one(spec, soname, spec.stem in linked, where, whole, places)
    return tuple(resolutions.values())


def _soname_there(roots: Iterable[Root], spec: LibrarySpec, cuda_major: int, system: System) -> str | None:
    """Return the soname of a lazily opened library for a CUDA newer than the table, from the first root with one.

    If the root has several, the one beside libcudart counts.
    """
    for root in roots:
        beside = os.path.dirname(root.files.get(system.name(BY_STEM["libcudart"], cuda_major), ""))
        names = [name for name in root.files if name.startswith(system.stem(spec))]
        if names:  # The shorter name comes first: libcudnn.so.9 before libcudnn.so.9.14.0.
            return min(names, key=lambda name: (os.path.dirname(root.files[name]) != beside, len(name)))
    return None


def _first_roots(places: SearchPlaces, cuda_major: int, toolkit: set[str], cudnn_major: int | None) -> tuple[Root, ...]:
    """Return the roots up to the first sufficient one; all, if part of the toolkit is loaded and its root is wanted."""
    enough = {*toolkit, places.system.name(BY_STEM["libcudnn"], cudnn_major or 9)}
    roots: list[Root] = []
    for root in find_roots(places, cuda_major):
        roots.append(root)
        if roots[0].source == "already loaded" and toolkit & roots[0].files.keys():
            continue
        if enough <= root.files.keys() and not any(_judge(root, soname, places) for soname in enough):
            break
    return tuple(roots)


def _resolve_one(
    spec: LibrarySpec,
    soname: str,
    required: bool,
    roots: Iterable[Root],
    whole: Resolution | None,
    places: SearchPlaces,
) -> Resolution:
    candidates: list[Candidate] = []
    rejected: list[Candidate] = []
    known_paths: set[str] = set()
    folders = folders_of(whole.chosen.path) if whole is not None and whole.chosen is not None else None
    for root in roots:
        for name, path in root.files.items():
            if not name.startswith(places.system.stem(spec)) or path in known_paths:
                continue
            if folders is not None and folders.isdisjoint(folders_of(path)):
                continue
            if root.source == "beside a loaded one" and os.path.realpath(path) in map(os.path.realpath, known_paths):
                continue
            if not _names_soname(name, soname):
                of_table = name in places.system.names(spec).values()  # libcudart.so.11.0
                if of_table or name.count(".") <= soname.count("."):
                    rejected.append(Candidate(soname, path, root.source, root.prefix, f"is {name}, {soname} is needed"))
                    known_paths.add(path)
                continue
            known_paths.add(path)
            problem = None if root.source == "already loaded" else _judge(root, name, places, soname)
            candidate = Candidate(soname, path, root.source, root.prefix, problem)
            (rejected if problem else candidates).append(candidate)
    return Resolution(spec, soname, required, tuple(candidates), tuple(rejected))


def _judge(root: Root, name: str, places: SearchPlaces, soname: str | None = None) -> str | None:
    return root.unfit or judge(root.files[name], soname or name, places.machine)


def _preferred_first(roots: tuple[Root, ...], toolkit: set[str], places: SearchPlaces) -> tuple[Root, ...]:
    """Return the roots, with the root for the whole toolkit moved to just behind the loaded libraries."""
    first = 1 if roots and roots[0].source == "already loaded" else 0
    loaded, others = roots[:first], list(roots[first:])
    in_use = {os.path.realpath(root.files[name]) for root in loaded for name in toolkit & root.files.keys()}
    preferred = None
    for root in others:
        files = list(filter(None, map(root.files.get, toolkit)))
        if not in_use.isdisjoint(map(os.path.realpath, files)):
            preferred = root
            break
        serves_all = len(files) == len(toolkit) and not any(_judge(root, soname, places) for soname in toolkit)
        if preferred is None and serves_all:
            preferred = root
    if preferred is None:
        return (*loaded, *others)
    others.remove(preferred)
    return (*loaded, preferred, *others)


def _names_soname(name: str, soname: str) -> bool:
    """Return True if a file name is this soname or a longer version of it: libcublas.so.13.1.0 is libcublas.so.13."""
    return name == soname or name.startswith(soname + ".")


def folders_of(path: str) -> set[str]:
    """Return the folder that a path names, and the folder of the file behind its links."""
    folder = os.path.realpath(os.path.dirname(path))
    return {folder, os.path.dirname(os.path.realpath(path))} if os.path.islink(path) else {folder}


def places_for(
    provider: ProviderLibrary | None,
    torch: Torch | None,
    directory: str | None = None,
    *,
    cuda_major: int | None = None,
) -> SearchPlaces:
    """Return the current places of this process for the libraries of a provider, or of ``cuda_major`` without one."""
    of_provider: tuple[str, ...] = ()
    if provider is not None:
        cuda_major, folder = provider.cuda_major, os.path.dirname(provider.path)
        of_provider = tuple(_ORIGIN.sub(lambda _: folder, entry) for entry in provider.search_path)
    same_major = torch is not None and torch.cuda_version is not None and torch.cuda_version[0] == cuda_major
    return replace(
        places_of_this_process(),
        directory=directory,
        torch_folder=torch.folder if torch is not None and same_major else None,
        provider_search_path=of_provider,
    )


def places_of_this_process() -> SearchPlaces:
    at_start = read_variables().at_start
    return SearchPlaces(
        sys_path=tuple(search_path()),
        variables=os.environ,
        start_library_path=(os.environ if at_start is None else at_start).get("LD_LIBRARY_PATH", ""),
        python_prefix=sys.prefix,
        machine=this_machine(),
        mapped=only_loaded(path for path in read_mapped_libraries() if _NVIDIA_FILE.match(os.path.basename(path))),
        system=SYSTEM,
    )
