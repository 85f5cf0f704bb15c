"""Recognise files that are no ONNX models by their first bytes."""

from __future__ import annotations

from typing import NamedTuple

HEAD = 512  # bytes that are enough to tell


class FileKind(NamedTuple):
    what: str
    fix: str


_DOWNLOAD = "download the file itself: this is what a server sends in its place, for an error or to sign in"
_EXPORT = "export the model to ONNX, with the framework that made this file"

_POINTER = FileKind(
    "a pointer of Git LFS, in place of the file",
    "fetch the file itself: run git lfs pull in its repository, or download it again",
)
_ORT = FileKind(
    "a model in ONNX Runtime's own format", "give the file a name that ends in .ort, by which ONNX Runtime knows it"
)

# Offset, the bytes there, and the kind of file
_SIGNATURES = (
    (0, b"version https://git-lfs.github.com/spec/", _POINTER),
    (4, b"ORTM", _ORT),
    (0, b"PK\x03\x04", FileKind("a zip archive", f"unpack it; or if torch.save wrote it, {_EXPORT}")),
    (0, b"\x1f\x8b", FileKind("compressed with gzip", "uncompress it, with gunzip or tar xzf")),
    (4, b"TFL3", FileKind("a model of TensorFlow Lite", _EXPORT)),
    (0, b"\x89HDF", FileKind("in the format HDF5, as models of Keras are", _EXPORT)),
    (0, b"GGUF", FileKind("weights in the format GGUF", _EXPORT)),
    (8, b'{"', FileKind("weights in the format safetensors", _EXPORT)),
    (0, b"\x80\x02", FileKind("written by pickle, as older releases of torch.save do", _EXPORT)),
    (0, b"ftrt", FileKind("an engine of TensorRT", "use the ONNX model from which it was built")),
)
_TEXTS = ((b"<!doctype html", "a web page"), (b"<html", "a web page"), (b"<?xml", "XML"), (b"{", "JSON"))


def kind_of_file(head: bytes) -> FileKind | None:
    """Return the kind of a file by ``head``, its first HEAD bytes; None if it is unknown."""
    for at, signature, kind in _SIGNATURES:
        if head.startswith(signature, at):
            return kind
    text = head.lstrip().lower()
    return next((FileKind(what, _DOWNLOAD) for start, what in _TEXTS if text.startswith(start)), None)
