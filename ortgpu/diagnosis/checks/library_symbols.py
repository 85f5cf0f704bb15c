"""Libraries of the right name that lack what another one was built against: another version of them was loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from ...environment.inspection import Environment
from ...environment.libraries.catalogue import canonical
from ...errors import Fix, GPUError, LibraryVersionError, UnsupportedPlatformError, manual
from ...provider.preloading import LoadedLibrary
from ..facts import Facts
from ..messages import loader_words
from ..remedies import commands as remedies
from . import windows


def of_another_version(text: str, user: str, facts: Facts) -> LibraryVersionError | None:
    """A loaded library has the right name, and not the functions that ``user`` was built against."""
    report = facts.observed.preload
    lacked = loader_words.lacks_symbol(text) or windows.lacks_function(text)
    if lacked is None or lacked[1] is None:
        return None
    function, soname = lacked[0], canonical(lacked[1])
    loaded = report.libraries if report is not None else _that_would_be_loaded(facts)
    culprits = [library for library in loaded if library.soname == soname]
    if not culprits:
        return None
    major = facts.environment.cuda_major
    wheels = dict.fromkeys(wheel for lib in culprits if (wheel := remedies.wheel_of(lib.soname, major)))
    return LibraryVersionError(
        f"a loaded library lacks {function}, which {user} was built against",
        evidence=[text, *(f"loaded: {lib.path} ({lib.source})" for lib in culprits)],
        fixes=_ways_to_a_whole_library(facts, culprits, wheels) if wheels else [],
        needed=(soname,),
        found={lib.soname: lib.path for lib in culprits},
    )


def older_c_library(words: str) -> tuple[str, str | None] | None:
    """What the C or C++ library that is loaded lacks, GLIBCXX_3.4.32 say, and its path where it is not the system's but
    one from conda, or another on LD_LIBRARY_PATH; None: the loader's words are others."""
    version = re.search(r"(GLIBC|GLIBCXX|CXXABI)_[\d.]+", words)
    if version is None:
        return None
    named = re.search(r"(/\S*libstdc\+\+\S*): version ", words)
    return version[0], named[1] if named is not None and not re.match(r"(/usr)?/lib(64)?/", named[1]) else None


def c_library_too_old(facts: Facts, text: str, what: str) -> GPUError | None:
    """``what`` fails for it."""
    old = older_c_library(text)
    if old is None:
        return None
    version, path = old
    host, fixes = facts.environment.host, [newer_c_library(facts.environment, path)]
    if path is not None:
        return LibraryVersionError(
            f"{what}: the C++ library that this process loads, {path}, is too old for it",
            evidence=[text],
            fixes=fixes,
            needed=(version,),
            found={os.path.basename(path): path},
        )
    return UnsupportedPlatformError(
        f"the installed ONNX Runtime needs {version}, which this system's C or C++ library does not have",
        evidence=[text, f"{host.os_name or host.system}, {host.libc or 'unknown C library'}"],
        fixes=fixes,
        system=host.system,
        machine=host.machine,
    )


def newer_c_library(environment: Environment, path: str | None) -> Fix:
    if path is None:
        return manual("use a newer operating system or container image", needs="host")
    off = remedies.off_the_path(environment, "LD_LIBRARY_PATH", os.path.dirname(path))
    return off or manual(f"update the package that brings {path}, or let the system's libstdc++.so.6 be loaded")


def _that_would_be_loaded(facts: Facts) -> tuple[LoadedLibrary, ...]:
    """Where a child process has tried it: what it loaded, by the same search."""
    return tuple(
        LoadedLibrary(found.soname, first.path, first.source, first.root, found.required)
        for found in facts.environment.libraries
        for first in found.candidates[:1]
    )


def _ways_to_a_whole_library(facts: Facts, culprits: list[LoadedLibrary], wheels: Iterable[str]) -> list[Fix]:
    environment = facts.environment
    locations = {wheel.location for wheel in environment.packages.nvidia}
    for lib in culprits:
        # Not the installer's: it would install beside that file, and the file would be found first again.
        if lib.source == "nvidia wheels" and (home := os.path.dirname(lib.root)) not in locations:
            off = remedies.off_the_path(environment, "PYTHONPATH", home)
            return [off or manual(f"take {home} off the search path of this program")]
    # Too old, or damaged and as new as can be: both are mended by the newest, whatever is on record.
    return [remedies.install(environment, wheels, upgrade=True, again=True)]
