"""Parse the error messages of the dynamic loader and of the system."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

# The pattern matches a name in one way only. Otherwise a long text without the words behind it would take for ever.
SONAME = r"(?<![\w.+-])(lib(?:(?!\.so)[\w.+-])+\.so[\w.+-]*)"
_NOT_FOUND = re.compile(
    rf"{SONAME}: cannot open shared object"
    rf"|links {SONAME}, of which there are only damaged"  # provider/preloading.py
    r"|(?i:([^\s\\/]+\.dll), which it links, was not found)"  # loader_windows.py
    rf"|Unable to load any of {{{SONAME}"  # cuDNN 9, before it ends the process
    r"|Could not locate ([^\s\\/]+\.dll)\. Please make sure"  # cuDNN on Windows
    r'|.*which depends on "([^"\\/]+\.dll)" which is missing'  # ONNX Runtime's provider_bridge_ort.cc
)
# glibc has two texts for a symbol with a version. Before 2.31 the second had no comma.
_LACKED = re.compile(
    r"undefined symbol: (\w+)(?:, version (lib\S+))?|symbol (\w+),? version (lib\S+) not defined in file"
    r"|version `(\S+)' not found"
)


def _predicate(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether the words of a loader match a pattern, which few processes compile."""
    return lambda words: re.search(pattern, words) is not None


# The loader refuses a file that may be complete.
cannot_be_mapped = _predicate(
    r"failed to map segment|annot (apply additional|restore segment|change memory prot|make segment writable)"
    r"|annot allocate memory(?! in static TLS)"
    r"|not enough memory \(error|paging file of Windows|paging file is too small"
)
# The path of a file has more letters than Windows' loader takes: error 206.
has_long_path = _predicate(r"filename or extension is too long|longer than Windows opens")
# The words of musl's loader (Alpine) are about a file that was built for glibc.
is_musl = _predicate(r"Error loading shared library ld-linux|Error relocating \S+: \w+: symbol not found")
# The system refused ONNX Runtime's or OpenBLAS's thread pool a further thread.
lacks_threads = _predicate(r"pthread_create failed|annot start new thread|can't start new thread")
# An old or absent Visual C++ Redistributable may be the reason: Windows names no file.
may_be_visual_c = _predicate(
    r"\(error (126|127|1114)\)|DLL load failed(?!.*(Access is denied|not a valid Win32 application))"
)


def is_blocked(words: str) -> bool:
    """Return True if a guard refuses a whole file: errors 225, 1260 and 4551 of Windows, EPERM of fanotify(7)."""
    refusals = r"has blocked (it|this file)|blocked by group policy|contains a virus|[Oo]peration not permitted"
    return re.search(refusals, words) is not None and not cannot_be_mapped(words)


def may_not_be_read(words: str) -> bool:
    return "permission denied" in words.lower() and not cannot_be_mapped(words)


def lacks_thread_storage(words: str) -> str | None:
    """Return the file that glibc refuses because no thread-local storage is left for libraries opened late."""
    match = re.search(r"(?<!\S)(\S+): cannot allocate memory in static TLS block", words)
    return match[1] if match else None


def blames_numpy(words: str) -> bool:
    """Return True if an import of ONNX Runtime says that NumPy's extension failed: "numpy.core.multiarray failed"."""
    parts = words.split()
    return any("numpy" in name and then.startswith("failed") for name, then in itertools.pairwise(parts))


def lacks_symbol(words: str) -> tuple[str, str | None] | None:
    """Return a function that no loaded library has, and the library that should have it, if it is named."""
    match = _LACKED.search(words)
    return (match[1] or match[3] or match[5], match[2] or match[4]) if match else None


def not_found_for(words: str) -> str | None:
    """Return the linked library that the loader did not find, or refused, when it opened a file."""
    match = _NOT_FOUND.match(words)
    return next(filter(None, match.groups()), None) if match else None


def lacks_function(words: str) -> tuple[str, str] | None:
    """Return a missing function, and the DLL of another version that should have it, from loader_windows.py's text."""
    match = re.match(r"it takes (\S+) from ([^\s\\/]+\.dll), and ", words, re.IGNORECASE)
    return (match[1], match[2]) if match else None


def refuses(words: str) -> bool:
    """Return True if one of the predicates above says that a loader refuses a library."""
    ways = (not_found_for, lacks_symbol, lacks_function, lacks_thread_storage, cannot_be_mapped, has_long_path, is_musl)
    return any(way(words) for way in (*ways, is_blocked))
