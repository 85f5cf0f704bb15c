"""Open model files, read them in pieces, and recognise ONNX Runtime's own format."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO, TypeAlias, overload

ModelSource: TypeAlias = str | bytes | os.PathLike[str]  # the path of a model file, or its content

NO_REGULAR_FILE = "not a regular file"
LARGE = 1 << 30  # bytes; larger models are not loaded as a whole


def open_model(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file of a model, of weights or of inputs. Raises OSError if :func:`is_special_file` is True."""
    if is_special_file(path):
        raise OSError(NO_REGULAR_FILE)
    return open(path, "rb")


def source_of(model: ModelSource) -> bytes | str:
    """Return a model in a form that another process can open in any working directory."""
    return model if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))


def is_special_file(model: ModelSource) -> bool:
    """Return True for a pipe, a device or a socket: opening a pipe may block for ever, and a device may have no end."""
    if isinstance(model, bytes):
        return False
    try:
        mode = os.stat(model).st_mode
    except (OSError, ValueError):  # Opening the file will raise the same error.
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def stamp_of(file: ModelSource | int | None) -> tuple[int, ...] | None:
    """Return a stamp that changes with the content of a file, by its path or descriptor. None: bytes, or no file."""
    if file is None or isinstance(file, bytes):
        return None
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class FileContent:
    """The bytes of a file, read in pieces when they are used.

    The file is not mapped: if a writer cuts it short, reading the missing part would end the process.

    Raises:
        OSError: from its methods, if the file cannot be read.
        IndexError: the file has become shorter.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._start, self._piece = 0, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __getitem__(self, key: int | slice) -> int | bytes:
        if isinstance(key, int):
            if not 0 <= key - self._start < len(self._piece):
                self._start, self._piece = key, self._read(key, _PIECE)
            return self._piece[key - self._start]
        start, end, _ = key.indices(self._size)
        if self._start <= start and end - self._start <= len(self._piece):
            return self._piece[start - self._start : end - self._start]
        content = self._read(start, end - start)
        if len(content) < end - start:
            raise IndexError("the file has become shorter")
        return content

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


_PIECE = 16 << 10  # bytes, some fifty nodes


def is_ort_format(model: ModelSource) -> bool:
    """Return True if ONNX Runtime takes the model for one in its own format.

    The name of a file decides, or the first bytes of a model in memory (IsOrtFormatModel in flatbuffers_utils.cc). The
    session option session.load_model_format can override this.
    """
    if isinstance(model, bytes):
        return model.startswith(b"ORTM", 4)  # The offset of a flatbuffer's root comes first.
    return os.fsdecode(model).lower().endswith(".ort")
