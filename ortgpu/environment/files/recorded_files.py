"""Compare the files of a distribution on disk with its RECORD."""

from __future__ import annotations

import base64
import errno
import os
import re
from collections.abc import Iterable
from typing import Final, Literal

from ..packages.metadata import MetadataFolder, RecordEntry

FileState = Literal["whole", "missing", "altered", "unknown"]

_LIBRARIES: Final = (".so", ".dll", ".pyd")  # somewhere in the name: libcublas.so.13
_HASHED: Final = re.compile(r"onnxruntime/(__init__|capi/[^/]+)\.py")
_HASHED_BELOW: Final = 64 * 1024  # bytes


def missing_and_altered(
    entries: Iterable[RecordEntry], one: MetadataFolder, *, by_content: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of missing and of altered files, in the order of the entries. See :func:`_state_of`."""
    states = {entry.path: _state_of(entry, one, by_content=by_content) for entry in entries}
    missing = tuple(path for path, state in states.items() if state == "missing")
    altered = tuple(path for path, state in states.items() if state == "altered")
    return missing, altered


def _state_of(entry: RecordEntry, one: MetadataFolder, *, by_content: bool) -> FileState:
    """Compare one file of ``one`` by its size, and by its hash if it is a small Python file of ONNX Runtime's.

    ``by_content``: by the hash of every library too, which may take seconds. "unknown" is the state of a file that may
    not be read, and of files that are not compared: scripts, caches, metadata.
    """
    path = entry.path
    # Scripts lie outside: images are often built by copying site-packages alone, and nothing here needs them.
    if path.startswith(("../", one.folder + "/")) or os.path.isabs(path):
        return "unknown"
    if "/__pycache__/" in path or path.endswith(".pyc"):
        return "unknown"
    target = os.path.join(one.location, path)
    try:
        size = os.stat(target).st_size
    except OSError as error:
        # A link to itself is as absent as a link to nothing; a folder that may not be entered is unknown.
        return "missing" if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else "unknown"
    except ValueError:
        return "unknown"
    if entry.size is not None and size != entry.size:
        return "altered"
    algorithm, _, expected = entry.digest.partition("=")
    is_small = size < _HASHED_BELOW and _HASHED.fullmatch(path) is not None
    if algorithm == "sha256" and (is_small or (by_content and _is_library_of_its_maker(path, one))):
        actual = _hash_of(target)
        return "unknown" if actual is None else "whole" if actual == expected.rstrip("=") else "altered"
    return "whole"


def _is_library_of_its_maker(path: str, one: MetadataFolder) -> bool:
    """Return True for a library outside of conda's packages: conda edits libraries after it has written RECORD."""
    return any(end in path for end in _LIBRARIES) and b"conda" not in (one.read("INSTALLER") or b"")


def _hash_of(path: str) -> str | None:
    try:
        import hashlib  # which loads OpenSSL: milliseconds that a session does without

        digest, block = hashlib.sha256(), 1 << 20
        with open(path, "rb") as file:
            while data := file.read(block):
                digest.update(data)
    except (ImportError, OSError, ValueError):  # the first: nothing can be imported in this process any more
        return None
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
