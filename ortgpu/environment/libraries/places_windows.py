"""The places of the CUDA libraries on Windows, and the check of their files.

The search order, first to last:

1. already loaded in this process;
2. the directory that the caller gave;
3. the libraries inside an installed torch of the same CUDA major: it loads its own whatever is there, and Windows gives
   it those that are in the process by these names, with error 127 where they are others (onnxruntime issue 23674);
4. every folder ``nvidia`` along sys.path (wheels of both layouts: ``nvidia/cublas/bin``, ``nvidia/cu13/bin/x86_64``);
5. conda: ``Library/bin`` of CONDA_PREFIX and of the interpreter's own prefix;
6. CUDA_HOME, CUDA_PATH, CUDNN_HOME, CUDNN_PATH, the CUDA_PATH_V13_0 that a toolkit sets, then the folders that
   NVIDIA's installers of CUDA and of cuDNN take;
7. the system loader: the folders of Windows, then PATH as it is now;
8. the folders of CUDA libraries that this process has loaded from none of these.

Everything depends on arguments and files alone, so it runs on any system, and so do its tests. The layouts are
those of the wheels for Windows (CUDA 11.8 to 13.5, cuDNN 8.9 to 9.28), of the toolkit's installer (``bin``; ``bin/x64``
from CUDA 13 on) and of cuDNN's, which has a folder for each CUDA (``CUDNN/v9.12/bin/13.0``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from ..files.elf import wrong_machine
from ..files.pe import read_pe
from ..packages.metadata import numbers_of
from .catalogue import canonical, is_dll, spec_for
from .places import (
    VARIABLES,
    Root,
    SearchPlaces,
    Source,
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

# By no provider for Windows (1.19.2 to 1.31.1). CUDA's runtime is opened at need where it is not linked.
_NOT_OPENED = ("libcurand",)

_INNER = ("", "bin", "bin/x64", "bin/x86_64", "lib", "lib/x64", "Library/bin", "Library/bin/x64")


def judge_file(path: str, name: str, machine: str) -> str | None:
    """Return why this file must not be opened as ``name``, or None. Reads headers only."""
    file = read_pe(path)
    if file.problem:
        return file.problem
    if problem := wrong_machine(file.machine, machine):
        return problem
    own = canonical(file.name or name)
    return f"its own name is {own}, {name} is needed" if spec_for(own) and own != name else None


def folders_of_windows(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders of Windows that its loader searches before PATH."""
    windows = variables.get("SYSTEMROOT") or variables.get("WINDIR") or r"C:\Windows"
    return os.path.join(windows, "System32"), windows


def path_of(variables: Mapping[str, str]) -> list[str]:
    """Return the folders of PATH, without the quotes that some programs write around them."""
    return [folder for entry in variables.get("PATH", "").split(";") if (folder := entry.strip().strip('"'))]


def _explicit_directory(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    if places.directory is not None:
        yield from _installed("directory", places.directory, places, cuda_major)


def _nvidia_wheels(places: SearchPlaces, _: int) -> Iterator[Root]:
    return nvidia_wheels(places, ("bin", "bin/x86_64"))


def _conda(places: SearchPlaces, _: int) -> Iterator[Root]:
    for prefix in conda_prefixes(places):
        folders = [os.path.join(prefix, "Library", "bin", "x64"), os.path.join(prefix, "Library", "bin")]
        yield root(places.system, "conda", prefix, folders)


def _variables(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    of_toolkits = [n for n in places.variables if re.fullmatch(rf"CUDA_PATH_V{cuda_major}_[0-9]+", n)]
    names = (*VARIABLES, *sorted(of_toolkits, key=numbers_of, reverse=True))
    for prefix in distinct(places.variables.get(name, "") for name in names):
        yield from _installed("environment variable", prefix, places, cuda_major)


def _default_toolkits(places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    programs = places.variables.get("PROGRAMFILES") or r"C:\Program Files"
    toolkits = os.path.join(programs, "NVIDIA GPU Computing Toolkit", "CUDA")
    for name in newest_first(toolkits, rf"v{cuda_major}\.[0-9]+"):
        yield from _installed("toolkit", os.path.join(toolkits, name), places, cuda_major)
    cudnn = os.path.join(programs, "NVIDIA", "CUDNN")
    for name in newest_first(cudnn, r"v[0-9]+\.[0-9.]+"):
        yield from _installed("toolkit", os.path.join(cudnn, name), places, cuda_major)


def _installed(source: Source, prefix: str, places: SearchPlaces, cuda_major: int) -> Iterator[Root]:
    """Yield the roots that an installer or archive put below a folder. A cuDNN for another CUDA is marked unfit."""
    own = [os.path.join(prefix, inner) if inner else prefix for inner in _INNER]
    own += [os.path.join(prefix, name, inner) for name in sorted(listed(prefix)) for inner in ("bin", "bin/x86_64")]
    others: list[Root] = []
    for name in newest_first(os.path.join(prefix, "bin"), r"[0-9]+\.[0-9]+"):
        folders = [os.path.join(prefix, "bin", name), os.path.join(prefix, "bin", name, "x64")]
        if numbers_of(name)[0] == cuda_major:
            own += folders
        else:
            unfit = f"is for CUDA {name}, CUDA {cuda_major} is needed"
            others.append(root(places.system, source, folders[0], folders, unfit=unfit))
    yield root(places.system, source, prefix, own)
    yield from others


def _system_loader(places: SearchPlaces, _: int) -> Iterator[Root]:
    for folder in distinct([*folders_of_windows(places.variables), *path_of(places.variables)]):
        yield root(places.system, "system loader", folder, [folder])


def _own_name(path: str) -> str | None:
    return canonical(os.path.basename(path))  # by which Windows knows a DLL that it has loaded


WINDOWS = System(
    names=lambda spec: {} if spec.stem in _NOT_OPENED else spec.dlls,
    stem=lambda spec: spec.dll_stem,
    suffix=".dll",
    is_library=lambda name: is_dll(name) and spec_for(name) is not None,
    own_name=_own_name,
    judge=judge_file,
    steps=(
        already_loaded,
        _explicit_directory,
        torch_folder,
        _nvidia_wheels,
        _conda,
        _variables,
        _default_toolkits,
        _system_loader,
        beside_loaded,
    ),
)
