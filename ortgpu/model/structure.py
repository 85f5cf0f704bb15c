"""Read models without the values of their weights, which take nearly all of the time and memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import BinaryIO, NamedTuple, TypeAlias, overload

from .protobuf import Bytes, Extent, Reader, TooManyFieldsError, length_delimited, whole_number

ModelSource: TypeAlias = str | bytes | os.PathLike[str]  # the path of a model file, or its content

_MOST_READ = 1_000_000  # fields of the file, a second
_LARGE = 1024  # bytes of an initializer; smaller ones can be shapes, which shape inference reads


def read_structure(model: ModelSource) -> bytes:
    """Return :func:`without_weights` of a file or bytes, or the whole model if it has too many fields.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no model.
    """
    if isinstance(model, bytes):
        return _structure(model)
    with open_model(model) as file:
        return _structure(FileContent(file))


def _structure(data: Bytes) -> bytes:
    try:
        return without_weights(data)
    except TooManyFieldsError:
        return data[:]
    except IndexError:
        raise ValueError("it ends in the middle of a field") from None


NO_REGULAR_FILE = "not a regular file"


def open_model(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a model file. Raises OSError for pipes and devices, too.

    A pipe waits for a writer, and the session could not read its content again. A device may have no end.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder cannot be opened, which says so
        raise OSError(NO_REGULAR_FILE)
    return open(path, "rb")


class FileContent:
    """The bytes of a file, read in pieces when they are used.

    The file is not mapped: if a writer cuts it short, a look at what was cut off would end the process.

    Raises:
        OSError: from its methods, for what cannot be read.
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
        found = self._read(start, end - start)
        if len(found) < end - start:
            raise IndexError("the file has become shorter")
        return found

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


_PIECE = 16 << 10  # bytes, some fifty nodes


def write_temporary(path: str | os.PathLike[str], model: bytes) -> None:
    """Write a model to a file that no other user can read."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(model)


def without_weights(data: Bytes, most: int = _MOST_READ) -> bytes:
    """Return the model without the values of the large initializers of its main graph.

    Raises:
        ValueError, IndexError: it is no such message, or has more fields than are read (TooManyFieldsError).
    """
    return _with_graph(Reader(data, most), _without_values)


class MovedTensor(NamedTuple):
    """An initializer without its values, and where these are."""

    name: bytes
    shape: list[int]
    data_type: int
    values: Extent


def with_values_elsewhere(
    data: Bytes, least: int, data_types: Collection[int]
) -> tuple[bytes, list[MovedTensor]] | None:
    """Return the model with large initializers of its main graph made external, and these initializers.

    Those are the ones of ``data_types`` with at least ``least`` bytes. The caller must give their values to the
    session. Initializers that no node takes stay: ONNX Runtime leaves them out, and refuses values for them.

    None if they are less than half of the model, one of them is an output, two have the same name, or the model has
    external data already.

    Raises:
        ValueError, IndexError: it is no such message, or has more fields than are read (TooManyFieldsError).
    """
    reader = Reader(data, _MOST_READ)
    graphs = [content for number, _, content in reader.fields() if number == 7]
    found: dict[Extent, MovedTensor] = {}
    outputs: set[bytes] = set()
    taken: set[bytes] = set()
    for graph in graphs:
        for number, _, part in reader.fields(graph):
            if number == 1:
                taken.update(_first_texts(reader, part))
            elif number == 5 and part[1] - part[0] >= least:
                tensor = _read_tensor(reader, part)
                if tensor is not None and tensor.data_type in data_types:
                    found[part] = tensor
            elif number == 12:
                outputs.update(_first_texts(reader, part))
    names = {tensor.name for tensor in found.values()}
    if len(names) < len(found) or not outputs.isdisjoint(names):
        return None
    if not taken.issuperset(names):
        taken.update(name for graph in graphs for name in _taken_inside(reader, graph))
    moved = {part: tensor for part, tensor in found.items() if tensor.name in taken}
    if not moved or 2 * sum(end - start for start, end in moved) < len(data):
        return None  # all that is not moved is copied, several times

    def with_values_moved(reader: Reader, graph: Extent) -> Iterator[bytes]:
        for _, part, whole in _fields(reader, graph):
            tensor = moved.get(part)
            yield reader.text(whole) if tensor is None else length_delimited(5, _external(tensor))

    structure = _with_graph(reader, with_values_moved)
    already = structure.count(_LOCATION) > len(moved)
    return None if already else (structure, list(moved.values()))


def _first_texts(reader: Reader, message: Extent) -> Iterator[bytes]:
    """Yield the texts of field 1: the inputs of a node, or the name of an output."""
    return (reader.text(part) for number, _, part in reader.fields(message) if number == 1)


def _taken_inside(reader: Reader, graph: Extent) -> Iterator[bytes]:
    """Yield the inputs of all nodes in subgraphs of this graph, at any depth."""
    for node in (part for number, _, part in reader.fields(graph) if number == 1):
        for attribute in (part for number, _, part in reader.fields(node) if number == 5):
            for inner in (part for number, _, part in reader.fields(attribute) if number in (6, 11)):
                for part in (part for number, _, part in reader.fields(inner) if number == 1):
                    yield from _first_texts(reader, part)
                yield from _taken_inside(reader, inner)


def _read_tensor(reader: Reader, message: Extent) -> MovedTensor | None:
    """Return a tensor, or None if its values are not in one piece."""
    name, shape, data_type, values = b"", list[int](), 0, None
    for number, value, extent in reader.fields(message):
        if number == 1:
            shape += reader.numbers(value, extent)
        elif number == 2 and value is not None:
            data_type = value
        elif number == 8:
            name = reader.text(extent)
        elif number == 9:
            values = extent
        else:
            return None
    return None if values is None else MovedTensor(name, shape, data_type, values)


def _external(tensor: MovedTensor) -> bytes:
    dimensions = b"".join(whole_number(1, size) for size in tensor.shape)
    described = dimensions + whole_number(2, tensor.data_type) + length_delimited(8, tensor.name)
    where = _LOCATION + length_delimited(2, b"elsewhere")
    return described + length_delimited(13, where) + whole_number(14, _EXTERNAL)


_EXTERNAL = 1  # TensorProto.DataLocation
_LOCATION = length_delimited(1, b"location")  # the key of what tells where external data is, in graphs of any depth


def _with_graph(reader: Reader, changed: Callable[[Reader, Extent], Iterable[bytes]]) -> bytes:
    """Return the reader's model with its main graph replaced by the fields that ``changed`` yields."""
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
    """Yield each field's number, the extent of its content, and its whole extent. There are no gaps between them."""
    at = message[0] if message is not None else 0
    for number, _, content in reader.fields(message):
        yield number, content, (at, content[1])
        at = content[1]
