"""Models whose large weights ONNX Runtime takes from memory, past its parser.

To parse a file is to copy every weight in pieces of a few KiB, and once more into a tensor. Given the structure alone
as bytes, with the file beside it in memory for what the structure calls external data, ONNX Runtime copies each weight
once. All that it needs is copied while the session is made (add_external_initializers_from_files_in_memory in
onnxruntime_pybind_state.cc): afterwards nothing refers to the file.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .model_structure import open_model, with_values_elsewhere
from .models import LARGEST, is_ort_format
from .placement import recording
from .runtime import load_runtime

_RELEASE = (1, 31)  # where it was measured
_FEWEST_BYTES = 8 << 20  # of a model: below, there is nothing to gain
_LARGE = 64 << 10  # bytes of an initializer
_LOCATION = "ortgpu: the model itself"  # as no file of external data is called


@contextmanager
def weights_in_memory(model: str | bytes | os.PathLike[str]) -> Iterator[tuple[bytes, Any] | None]:
    """The structure of a model and new session options, which have the values of its weights while the context lasts.

    None for a model that gains nothing by it, has external data already, or is none: ONNX Runtime says what is wrong.
    """
    try:
        content = _content(model)
        structure = None if content is None else with_values_elsewhere(content, _LOCATION, _LARGE)
    except (OSError, ValueError, IndexError):
        content = structure = None
    if content is None or structure is None:
        yield None
        return
    options = recording(None)
    options.add_external_initializers_from_files_in_memory([_LOCATION], [content], [len(content)])
    try:
        yield structure, options
    finally:
        if isinstance(content, mmap.mmap):
            content.close()


def _content(model: str | bytes | os.PathLike[str]) -> bytes | mmap.mmap | None:
    # Elsewhere than on Linux it was not tried
    if sys.platform != "linux" or load_runtime().release < _RELEASE or is_ort_format(model):
        return None
    if isinstance(model, bytes):
        return model if len(model) >= _FEWEST_BYTES else None
    with open_model(os.fspath(model)) as file:
        if not _FEWEST_BYTES <= os.fstat(file.fileno()).st_size < LARGEST:
            return None
        # All pages at once: one by one, as they are read, takes half as long again
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
