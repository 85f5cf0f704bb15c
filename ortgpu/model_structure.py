"""Models without the values of their weights, which take nearly all of the time and the memory to read one."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from .protobuf import Bytes, Extent, Reader, TooManyFieldsError, length_delimited, whole_number

_MOST_READ = 1_000_000  # fields of the file, a second
_LARGE = 1024  # bytes of an initializer; smaller ones can be shapes, which shape inference reads


def read_structure(model: str | bytes | os.PathLike[str]) -> bytes:
    """:func:`without_weights` of a file or of bytes; what has too many parts is read whole.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no model.
    """
    if isinstance(model, bytes):
        return _structure(model)
    with open_model(model) as file:
        if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
            return b""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _structure(content)


def _structure(data: Bytes) -> bytes:
    try:
        return without_weights(data)
    except TooManyFieldsError:
        return data[:]
    except IndexError:
        raise ValueError("it ends in the middle of a field") from None


def open_model(path: str | os.PathLike[str]) -> BinaryIO:
    """Raises OSError also for what is not read: a pipe waits for a writer, and what it gives is gone for the session; a
    device may have no end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder cannot be opened, which says so
        raise OSError("not a regular file")
    return open(path, "rb")


def without_weights(data: Bytes) -> bytes:
    """A model as it is, but for the values of the large initializers of its main graph.

    Raises:
        ValueError, IndexError: it is no such message, or has more fields than are read (TooManyFieldsError).
    """
    return _with_graph(Reader(data, _MOST_READ), _without_values)


def with_values_elsewhere(data: Bytes, location: str, least: int) -> bytes | None:
    """A model as it is, but that the values of initializers of its main graph, those with so many bytes or more, are
    external: in a file at ``location`` that has the content of ``data``.

    None if there is none of them, or some external data already.

    Raises:
        ValueError, IndexError: it is no such message, or has more fields than are read (TooManyFieldsError).
    """
    moved = 0

    def with_values_moved(reader: Reader, graph: Extent) -> Iterator[bytes]:
        nonlocal moved
        for number, (start, end), whole in _fields(reader, graph):
            tensor = _moved(reader, (start, end), location) if number == 5 and end - start >= least else None
            moved += tensor is not None
            yield length_delimited(5, tensor) if tensor is not None else reader.text(whole)

    structure = _with_graph(Reader(data, _MOST_READ), with_values_moved)
    already = structure.count(_LOCATION_ENTRY) > moved
    return structure if moved and not already else None


def _moved(reader: Reader, tensor: Extent, location: str) -> bytes | None:
    """An initializer with its values at ``location``; None for one that does not have them in one piece."""
    kept, values = [], None
    for number, content, whole in _fields(reader, tensor):
        if number == 9:
            values = content
        elif number in _DESCRIBING:
            kept.append(reader.text(whole))
        else:
            return None
    if values is None:
        return None
    start, end = values
    entries = {b"location": location.encode(), b"offset": b"%d" % start, b"length": b"%d" % (end - start)}
    external = (
        length_delimited(13, length_delimited(1, key) + length_delimited(2, value)) for key, value in entries.items()
    )
    return b"".join((*kept, *external, whole_number(14, _EXTERNAL)))


_EXTERNAL = 1  # TensorProto.DataLocation
_LOCATION_ENTRY = length_delimited(1, b"location")  # what tells where external data is, in graphs of any depth


def _with_graph(reader: Reader, changed: Callable[[Reader, Extent], Iterable[bytes]]) -> bytes:
    """The model that a reader reads, with its main graph put together from what ``changed`` makes of it."""
    return b"".join(
        length_delimited(7, b"".join(changed(reader, content))) if number == 7 else reader.text(whole)
        for number, content, whole in _fields(reader, None)
    )


def _without_values(reader: Reader, graph: Extent) -> Iterator[bytes]:
    for number, (start, end), whole in _fields(reader, graph):
        if number == 5 and end - start > _LARGE:
            kept = (each for inner, _, each in _fields(reader, (start, end)) if inner in _DESCRIBING)
            yield length_delimited(5, b"".join(map(reader.text, kept)))
        else:
            yield reader.text(whole)


_DESCRIBING = frozenset((1, 2, 8))  # of TensorProto: dims, data_type, name


def _fields(reader: Reader, message: Extent | None) -> Iterator[tuple[int, Extent, Extent]]:
    """Of each field its number, where its content is, and where all of it: they follow each other without a gap."""
    at = message[0] if message is not None else 0
    for number, _, content in reader.fields(message):
        yield number, content, (at, content[1])
        at = content[1]
