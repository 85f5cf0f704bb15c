"""Check that the CUDA libraries are installed, intact, and of the right version."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ... import errors
from ...environment.inspection import Environment
from ...environment.libraries import loader_words
from ...environment.libraries.catalogue import CUDNN_CORE_PARTS, canonical, major_of, spec_for, stem_of, wheel_name
from ...environment.libraries.search import Candidate
from ...errors import Fix, GPUError, Severity, manual
from ...provider.preloading import LoadedLibrary, MissingLibrary
from ..facts import Facts
from ..remedies import fixes as remedies
from . import surroundings


def missing(facts: Facts) -> GPUError | None:
    """Check that the linked libraries are there, intact and of the right version. One error names all of them.

    If every file and the driver are missing too, the error names the driver first. If only some files are missing or
    broken, the machine was set up for a GPU: the driver comes after them.
    """
    environment, absent = facts.environment, _missing(facts, required=True)
    if not absent:
        return None
    for library in absent:
        for file in library.rejected:
            if file.unfit_for is None and (other := version_mismatch(file.problem or "", library.soname, facts)):
                return other
    further = [library.wheel for library in _missing(facts, required=False) if library.wheel]
    error = judge_missing(facts, absent, "the CUDA provider needs", "fatal", further)
    some_file = any(library.candidates or library.rejected for library in environment.libraries if library.required)
    if some_file or not environment.driver.is_absent or not isinstance(error, errors.LibraryNotFoundError):
        return error
    way = surroundings.give_the_gpu(environment) if environment.host.container else None
    nothing = "no nvcuda.dll, no NVML" if environment.host.is_windows else "no libcuda, no NVML, no device files"
    return errors.LibraryNotFoundError(
        f"{error.summary}, and neither is an NVIDIA driver",
        evidence=[f"{nothing}: no GPU is visible, with or without these libraries", *error.evidence],
        fixes=[way or remedies.update_driver(environment), *error.fixes],
        severity=error.severity,
        missing=error.missing,
    )


def cudnn_missing(facts: Facts) -> GPUError | None:
    """Check for a lazily opened cuDNN (ONNX Runtime 1.28 and newer): fatal only to a model with operators on cuDNN."""
    if facts.request.cudnn_disabled:
        return None
    return _lazily_opened_missing(facts, "libcudnn", facts.request.cudnn_operators, "convolutions and others")


def lacks_cudnn(facts: Facts) -> bool:
    """Return True if the session has no cuDNN: it is switched off, or a library of it is missing."""
    absent = (stem_of(library.soname) for library in _missing(facts, required=False))
    return facts.request.cudnn_disabled or any(stem.startswith("libcudnn") for stem in absent)


def cufft_missing(facts: Facts) -> GPUError | None:
    return _lazily_opened_missing(facts, "libcufft", facts.request.cufft_operators, "Fourier transforms")


def _lazily_opened_missing(facts: Facts, stem: str, operators: tuple[str, ...], usual: str) -> GPUError | None:
    absent = tuple(library for library in _missing(facts, required=False) if stem_of(library.soname).startswith(stem))
    reason = f"this model's {_enumerate(operators)} nodes need" if operators else f"models with {usual} need"
    return judge_missing(facts, absent, reason, "fatal" if operators else "warning") if absent else None


def _missing(facts: Facts, *, required: bool) -> tuple[MissingLibrary, ...]:
    report, libraries, major = facts.observed.loading, facts.environment.libraries, facts.environment.cuda_major
    absent = report.missing if report is not None else None
    if absent is None:
        absent = tuple(
            MissingLibrary(lib.soname, lib.required, lib.spec.wheels.get(major) if major else None, lib.rejected)
            for lib in libraries
            if not lib.candidates
            and (lib.spec.part_of is None or lib.spec.stem in CUDNN_CORE_PARTS.get(major_of(lib.soname) or 0, ()))
        )
    absent = tuple(library for library in absent if library.required == required)
    if not absent or facts.observed.preload is not None:
        return absent
    sources = ("already loaded", "beside a loaded one")  # A new child does not find what only this process has.
    local = {lib.soname for lib in libraries if any(file.source in sources for file in lib.candidates)}
    return tuple(library for library in absent if library.soname not in local)


def judge_missing(
    facts: Facts, absent: tuple[MissingLibrary, ...], reason: str, severity: Severity, further: Iterable[str] = ()
) -> GPUError:
    """Return the error for missing libraries. ``further``: other missing requirements to install with them."""
    evidence = []
    for library in absent:
        evidence += [] if library.rejected else [f"{library.soname}: found nowhere"]
        evidence += [
            f"{library.soname}: {file.path} is unusable ({file.source}): {file.problem}"
            for file in library.rejected[:4]
        ]
    # The loader refuses some only because another library is missing.
    names = {library.soname for library in absent}
    roots = [
        library
        for library in absent
        if not library.rejected
        or any(loader_words.not_found_for(file.problem or "") not in names for file in library.rejected)
    ]
    absent = tuple(roots) or absent
    # This maps a soname to a file that conflicts with a loaded library of this process.
    unfit = {library.soname: file for library in absent for file in library.rejected if file.unfit_for is not None}
    fixes, facts_of_fixes = _ways_to_have(facts, absent, unfit, further)
    installed = facts.environment.packages.onnxruntime
    build = f"{installed.build_name or 'onnxruntime-gpu'} {installed.version or ''}".rstrip()
    evidence.append(f"{build} is built for CUDA {facts.environment.cuda_major or 'of unknown version'}")
    evidence += facts_of_fixes
    sonames = tuple(library.soname for library in absent)
    others = {
        library.soname: file.path
        for library in absent
        for file in reversed(library.rejected)
        for name in [canonical(os.path.basename(file.path))]
        if major_of(name) is not None
        and stem_of(name) == stem_of(library.soname)
        and not name.startswith(library.soname)
    }
    cls: type[GPUError] = errors.LibraryNotFoundError
    fields: dict[str, Any] = {"missing": sonames}
    what = (
        ": no usable copy on this machine" if any(file.rejected for file in absent) else ": not found on this machine"
    )
    if len(unfit) == len(absent):
        cls, what = errors.LibraryConflictError, ", and no copy fits what this process has already loaded"
        fields = {"libraries": tuple(file.unfit_for or "" for file in unfit.values())}
    elif len(others) == len(absent):
        cls, what = errors.LibraryVersionError, ", and only other versions are installed"
        fields = {"needed": sonames, "found": others}
    summary = f"{reason} {_enumerate(sonames)}{what}"
    return cls(summary, evidence=evidence, fixes=fixes, severity=severity, **fields)


def _ways_to_have(
    facts: Facts, absent: tuple[MissingLibrary, ...], unfit: Mapping[str, Candidate], further: Iterable[str]
) -> tuple[list[Fix], list[str]]:
    """Return fixes, and the facts behind them. Fixes install a library only if it has no other obstacle."""
    environment = facts.environment
    passed_over = [(library.soname, file) for library in absent for file in library.rejected]
    obstacles = {soname: fix for soname, file in passed_over if (fix := _way_round(environment, file)) is not None}
    closed = _closed(environment, absent)
    evidence = [f"in this process: {file.unfit_for}" for file in unfit.values()]
    evidence += [f"this user may not read {path}" for path in dict.fromkeys(closed.values())]
    fixes: list[Fix] = list(dict.fromkeys(obstacles.values()))
    if unfit:  # Libraries of two toolkits are in one process.
        loaded = list(dict.fromkeys(file.unfit_for for file in unfit.values() if file.unfit_for is not None))
        first = f"open the first GPUSession before what loads {_enumerate(loaded)}, or keep it from being loaded"
        fixes += _without("LD_PRELOAD", loaded, environment, f"use libraries of one place: {first}")
    if closed:
        fixes.append(remedies.fix_read_permission(environment, closed.values()))
    to_install = [library for library in absent if library.soname not in {*obstacles, *unfit, *closed}]
    wheels = dict.fromkeys(library.wheel for library in to_install if library.wheel)
    if wheels:
        # For nvidia/cublas/lib/libcublas.so.12 this is the folder nvidia. The link leads to nothing, or to itself.
        dead = dict.fromkeys(
            str(PurePath(file.path).parents[2])
            for _, file in passed_over
            if file.source == "nvidia wheels"
            and (file.problem or "").lower().startswith(("no such file", "too many levels of symbolic links"))
        )
        fixes.append(remedies.install_libraries(environment, {**wheels, **dict.fromkeys(further)}, dead))
    if unknown := [library.soname for library in to_install if not library.wheel]:
        fixes += remedies.newer_cuda(environment, unknown) or [remedies.system_package(unknown)]
    return fixes, evidence


def _way_round(environment: Environment, file: Candidate) -> Fix | None:
    problem = file.problem or ""
    if (fix := remedies.fix_load_refusal(environment, problem, file.path)) is not None:
        return fix
    if (old := older_c_library(problem)) is not None:
        return newer_c_library(environment, old[1])
    foreign = loader_words.not_found_for(problem)  # such as libgcc_s.so.1
    if foreign and spec_for(foreign) is None and not is_of_driver(foreign):
        return remedies.system_package([foreign])
    return None


def _without(variable: str, paths: Iterable[str], environment: Environment, otherwise: str) -> list[Fix]:
    fixes = [remedies.drop_from_variable(environment, variable, path) for path in paths]
    return [fix for fix in fixes if fix is not None] or [manual(otherwise)]


def _closed(environment: Environment, absent: Iterable[MissingLibrary]) -> dict[str, str]:
    """Return unreadable files by soname, or else the unreadable folder of wheels that may hold the file."""
    folders = [
        entry.path
        for entry in environment.packages.refused
        if f"{os.sep}nvidia" in entry.path and ".so" not in os.path.basename(entry.path)
    ]
    closed: dict[str, str] = {}
    for library in absent:
        files = [file.path for file in library.rejected if loader_words.may_not_be_read(file.problem or "")]
        if files or (folders and not library.rejected):
            closed[library.soname] = (files or folders)[0]
    return closed


def is_of_driver(library: str) -> bool:
    return library.lower().startswith(("libcuda.so", "nvcuda."))


def cudnn_of_other_cuda(facts: Facts) -> GPUError | None:
    """Check that the loaded cuDNN is for ONNX Runtime's CUDA: libcudnn.so.9 exists for CUDA 12 and for CUDA 13."""
    environment = facts.environment
    report, provider, major = facts.observed.loading, environment.provider, environment.cuda_major
    cudnn = report.cudnn if report is not None else None
    if cudnn is None or provider is None or major in (None, cudnn[1]):
        return None
    loaded, built_for = cudnn
    needed = any(stem_of(name).startswith("libcudnn") for name in provider.needed) or facts.request.cudnn_operators
    severity: Severity = "fatal" if needed else "warning"
    fixes = [manual(f"make every package of this process use CUDA {major}: torch, CuPy and the nvidia wheels")]
    wrong, right = f"nvidia-cudnn-cu{built_for}", remedies.wheel_of(loaded.soname, major)
    if right is not None and not environment.host.frozen:
        if any(wheel.name == wrong for wheel in environment.packages.nvidia):
            then = remedies.install(environment, [right], again=True)
            fixes.insert(0, remedies.chain_steps(environment, f"{environment.installer.uninstall} {wrong}", then))
        elif loaded.source not in (*_BEFORE_WHEELS, *(["torch"] if environment.host.is_windows else [])):
            fixes = [remedies.install_libraries(environment, [right])]
    summary = f"{loaded.soname} in this process is built for CUDA {built_for}, ONNX Runtime for CUDA {major}"
    evidence, libraries = [f"{loaded.path} ({loaded.source})"], (loaded.path,)
    return errors.LibraryConflictError(summary, evidence=evidence, fixes=fixes, severity=severity, libraries=libraries)


# A further wheel does not come before these sources: a loaded library stays, and a folder was requested. On Windows
# the search looks first into the folder of torch, too.
_BEFORE_WHEELS = ("already loaded", "directory", "nvidia wheels")


def cudnn_mixed(facts: Facts) -> GPUError | None:
    """Check that all parts of cuDNN are from one release; else a convolution fails (pytorch issue 185512)."""
    report, environment = facts.observed.loading, facts.environment
    if report is None or not report.cudnn_mixed:
        return None
    paths = report.cudnn_mixed
    folders = list(dict.fromkeys(map(os.path.dirname, paths)))
    wheels = [
        wheel
        for wheel in environment.packages.nvidia
        if wheel.name.startswith("nvidia-cudnn-cu") and folders[0].startswith(os.path.join(wheel.location, ""))
    ]
    if len(folders) > 1:
        advice = f"load cuDNN from one of these folders only: {_enumerate(folders)}"
        fixes = _without("LD_LIBRARY_PATH", folders, environment, advice)
    elif wheels and not environment.host.frozen:
        fixes = [remedies.install_again(environment, *wheels)]
    else:
        fixes = [manual(f"install cuDNN again: {folders[0]} holds files of several releases")]
    severity: Severity = "fatal" if facts.request.cudnn_operators else "warning"
    return mixed(list_by_folder(paths), fixes=fixes, severity=severity, libraries=paths)


def not_as_installed(facts: Facts) -> GPUError | None:
    """Check that libraries are the installed files: a part of cuDNN has the same name in all releases."""
    environment = facts.environment
    major = environment.cuda_major
    if not any(wheel.altered_files for wheel in environment.packages.nvidia):
        return None
    right = {wheel_name(lib.spec.wheels[major]) for lib in environment.libraries if major in lib.spec.wheels}
    used = {lib.chosen.path for lib in environment.libraries if lib.chosen is not None}
    names = [wheel.name for wheel in environment.packages.nvidia]
    altered = {
        wheel: files
        for wheel in environment.packages.nvidia
        if wheel.name in right
        # The same wheel for another CUDA writes the same files: cudnn_of_other_cuda judges the result.
        and sum(name.split("-cu1")[0] == wheel.name.split("-cu1")[0] for name in names) == 1
        and (files := used.intersection(os.path.join(wheel.location, *name.split("/")) for name in wheel.altered_files))
    }
    if not altered:
        return None
    paths = tuple(path for files in altered.values() for path in sorted(files))
    return errors.BrokenPackageError(
        f"libraries of {_enumerate([wheel.name for wheel in altered])} differ from those that were installed",
        evidence=[f"differs from its package's record: {path}" for path in paths],
        fixes=[remedies.install_again(environment, *altered)],
        severity="fatal" if facts.observed.crashed else "warning",
        package=next(iter(altered)).name,
        files=paths,
    )


def mixed(
    evidence: list[str], *, fixes: Iterable[Fix] = (), severity: Severity = "fatal", libraries: tuple[str, ...] = ()
) -> errors.LibraryConflictError:
    what = "the parts of cuDNN in this process are of different releases"
    return errors.LibraryConflictError(what, evidence=evidence, fixes=fixes, severity=severity, libraries=libraries)


def list_by_folder(paths: Iterable[str]) -> list[str]:
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        folders.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
    return [f"in this process from {folder}: {', '.join(names)}" for folder, names in folders.items()]


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def version_mismatch(text: str, user: str, facts: Facts) -> errors.LibraryVersionError | None:
    """Return the error for a library with the right name that lacks a function. ``user``: its caller."""
    report, environment = facts.observed.preload, facts.environment
    lacked = loader_words.lacks_symbol(text) or loader_words.lacks_function(text)
    if lacked is None or lacked[1] is None:
        return None
    function, soname = lacked[0], canonical(lacked[1])
    # The search of a child process is the same as in this process.
    loaded = [
        LoadedLibrary(found.soname, first.path, first.source, first.root, found.required)
        for found in environment.libraries
        for first in found.candidates[:1]
    ]
    culprits = [lib for lib in (report.libraries if report is not None else loaded) if lib.soname == soname]
    if not culprits:
        return None
    wheel = remedies.wheel_of(soname, environment.cuda_major)
    locations = {package.location for package in environment.packages.nvidia}
    # The installer would write beside such a file, and the search would find the old file first again.
    unreachable = [
        home
        for lib in culprits
        for home in [os.path.dirname(lib.root)]
        if lib.source == "nvidia wheels" and (home not in locations or remedies.comes_first(environment, home))
    ]
    fixes = []
    if wheel is not None and unreachable:
        fixes = [remedies.drop_from_search_path(environment, unreachable[0])]
    elif wheel is not None:  # The newest release replaces an old library as well as a damaged one.
        fixes = [remedies.install(environment, [wheel], upgrade=True, again=True)]
    return errors.LibraryVersionError(
        f"a loaded library lacks {function}, which {user} needs",
        evidence=[text, *(f"loaded: {lib.path} ({lib.source})" for lib in culprits)],
        fixes=fixes,
        needed=(soname,),
        found={lib.soname: lib.path for lib in culprits},
    )


def older_c_library(words: str) -> tuple[str, str | None] | None:
    """Return the missing version of the C or C++ library, such as GLIBCXX_3.4.32, and its path outside the system."""
    version = re.search(r"(GLIBC|GLIBCXX|CXXABI)_[\d.]+", words)
    if version is None:
        return None
    before = (part.split()[-1] for part in words.split(": version ")[:-1] if part.strip())
    paths = (word[word.find("/") :] for word in before if "/" in word and "libstdc++" in word)
    path = next(paths, None)
    return version[0], path if path is not None and not re.match(r"(/usr)?/lib(64)?/", path) else None


def c_library_unfit(facts: Facts, text: str, what: str) -> GPUError | None:
    """Return the error for an old C library, or for one other than glibc, by ``text``. ``what``: the failed step."""
    host, old = facts.environment.host, older_c_library(text)
    fields: dict[str, Any] = {"system": host.system, "machine": host.machine}
    evidence = [text, f"{host.os_name or host.system}, {host.libc or 'unknown C library'}"]
    error: type[GPUError] = errors.UnsupportedPlatformError
    if loader_words.is_musl(text):  # Alpine's gcompat is not enough: issues 2909 and 17986.
        other = "another C library (musl, that of Alpine)"
        summary = f"the installed ONNX Runtime is built for glibc, and this system has {other}"
        fix = manual("use a container image with glibc: of Debian, Ubuntu or NVIDIA's CUDA", needs="host")
    elif old is None:
        return None
    else:
        version, path = old
        fix = newer_c_library(facts.environment, path)
        summary = f"the installed ONNX Runtime needs {version}, which this system's C or C++ library does not have"
        if path is not None:
            error, evidence = errors.LibraryVersionError, [text]
            summary = f"{what}: the C++ library that this process loads, {path}, is too old for it"
            fields = {"needed": (version,), "found": {os.path.basename(path): path}}
    return error(summary, evidence=evidence, fixes=[fix], **fields)


def newer_c_library(environment: Environment, path: str | None) -> Fix:
    if path is None:
        return manual("use a newer operating system or container image", needs="host")
    off = remedies.drop_from_variable(environment, "LD_LIBRARY_PATH", os.path.dirname(path))
    return off or manual(f"update the package that brings {path}, or load the system's libstdc++.so.6 instead")
