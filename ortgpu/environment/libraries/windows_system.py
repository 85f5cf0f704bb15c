"""Find missing DLLs of Windows and of Visual C++ that a file links."""

from __future__ import annotations

import os
from collections.abc import Iterable

from .catalogue import spec_for
from .loader_windows import DRIVER, find_beside, is_of_the_system


def missing_from_the_system(
    files: Iterable[tuple[str, tuple[str, ...]]], loaded: Iterable[str], folders: Iterable[str]
) -> tuple[str, ...]:
    """Return the DLLs that are missing. ``files``: path and linked DLLs of each. ``folders``: those of the loader.

    Empty, too, where these folders are not those of Windows: then nothing is known. CUDA's libraries and ONNX Runtime's
    own are found or missed elsewhere.
    """
    everywhere = tuple(folders)
    if find_beside("KERNEL32.dll", everywhere) is None:
        return ()
    names = {os.path.basename(path.replace("\\", "/")).lower() for path in loaded}
    absent: dict[str, None] = {}
    for path, needed in files:
        for name in needed:
            ours = name.lower().startswith("onnxruntime") or name.lower() == DRIVER or spec_for(name) is not None
            if ours or name.lower() in names or is_of_the_system(name):
                continue
            if find_beside(name, (os.path.dirname(path), *everywhere)) is None:
                absent.setdefault(name)
    return tuple(absent)
