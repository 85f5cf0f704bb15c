"""The outline of a model: its graph without the values of large weights, read from the file once.

Every question about a model is asked of it. Names are bytes, since those of a model need not be UTF-8. The numbers of
fields are those of onnx.proto.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..process.background import cached_property
from .files import FileContent, ModelSource, open_model, stamp_of
from .protobuf import Extent, Reader, TooManyFieldsError

STANDARD = (b"", b"ai.onnx")  # the domain of ONNX's own operators, as a node and a model name it

# What the questions raise for a model that cannot be read, or is none
UNREADABLE = (OSError, ValueError, IndexError, TypeError, RecursionError, MemoryError)

MOST_PARTS = 100_000  # nodes and initializers: a tenth of a second. Ten times as many fields within them
_LARGE = 1024  # bytes of an initializer or a list; smaller ones can be shapes


def names(*lines: str) -> frozenset[bytes]:
    """Return the names of operators, which are separated by spaces."""
    return frozenset(name.encode() for line in lines for name in line.split(" "))


class Tensor(NamedTuple):
    name: bytes
    data_type: int  # TensorProto.DataType
    shape: list[int]
    external: Mapping[bytes, bytes] | None  # the entries that say where the values are, if they are in another file


class Value(NamedTuple):
    """An input of a graph. Its shape is None if it is unknown or if it is no tensor."""

    name: bytes
    shape: list[int | None] | None = None


class Attribute(NamedTuple):
    """The value of an attribute. Fields that it does not set keep these defaults."""

    integer: int = 0
    text: bytes = b""
    tensors: Sequence[Tensor] = ()
    graphs: Sequence[Graph] = ()


_WITH_GRAPHS = names("If Loop Scan SequenceMap")  # of ONNX's own operators


class Node:
    """A node of a graph. Its attributes are read when one is asked for."""

    def __init__(self, reader: Reader, message: Extent) -> None:
        self.name = self.operator = self.domain = self.overload = b""
        self.inputs: list[bytes] = []
        self.outputs: list[bytes] = []
        self._reader = reader
        self._attributes: list[Extent] = []
        for number, _, part in reader.fields(message):
            if number == 1:
                self.inputs.append(reader.text(part))
            elif number == 2:
                self.outputs.append(reader.text(part))
            elif number == 3:
                self.name = reader.text(part)
            elif number == 4:
                self.operator = reader.text(part)
            elif number == 5:
                self._attributes.append(part)
            elif number == 7:
                self.domain = reader.text(part)
            elif number == 8:
                self.overload = reader.text(part)

    @cached_property
    def attributes(self) -> dict[bytes, Attribute]:
        return dict(_read_attribute(self._reader, part) for part in self._attributes)

    def attribute(self, name: bytes) -> Attribute:
        return self.attributes.get(name, Attribute()) if self._attributes else Attribute()

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of an If, a Loop or a Scan, and of operators of other domains."""
        if not self._attributes or (self.domain in STANDARD and self.operator not in _WITH_GRAPHS):
            return []
        return [graph for attribute in self.attributes.values() for graph in attribute.graphs]


class Graph:
    """A graph, of the fields of a message by their numbers."""

    _NODE = 1

    def __init__(self, reader: Reader, parts: Mapping[int, Sequence[Extent]]) -> None:
        self._reader = reader
        self._parts = parts
        self._read: list[Node] = []

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes in the order of the file, each read when it is first asked for."""
        for number, part in enumerate(self._parts.get(self._NODE, ())):
            if number == len(self._read):
                self._read.append(Node(self._reader, part))
            yield self._read[number]

    def all_nodes(self) -> Iterator[Node]:
        for node in self.nodes:
            yield node
            for graph in node.graphs:
                yield from graph.all_nodes()

    @property
    def size(self) -> int:
        return len(self._parts.get(self._NODE, ())) + len(self._parts.get(5, ()))

    def messages(self, number: int) -> Iterator[bytes]:
        """Yield the messages of a field; initializers are without the values of large weights."""
        return (self._reader.text(part) for part in self._parts.get(number, ()))

    @cached_property
    def initializers(self) -> list[Tensor]:
        return [_read_tensor(self._reader, part) for part in self._parts.get(5, ())]

    @cached_property
    def inputs(self) -> list[Value]:
        return [_read_value(self._reader, part) for part in self._parts.get(11, ())]

    @cached_property
    def outputs(self) -> list[bytes]:
        return [_read_value(self._reader, part).name for part in self._parts.get(12, ())]


class Function(Graph):
    _NODE = 7

    def __init__(self, reader: Reader, message: Extent) -> None:
        super().__init__(reader, _parts_of(reader, message))
        self.message = reader.text(message)
        self.operator, self.domain, self.overload = (
            b"".join(reader.text(part) for part in self._parts.get(number, ())[-1:]) for number in (1, 10, 13)
        )

    @cached_property
    def initializers(self) -> list[Tensor]:
        return []

    @cached_property
    def inputs(self) -> list[Value]:
        return [Value(self._reader.text(part)) for part in self._parts.get(4, ())]

    @cached_property
    def outputs(self) -> list[bytes]:
        return [self._reader.text(part) for part in self._parts.get(5, ())]


class GraphOutline:
    """The outline of a model. The model is opened once, when the first question is asked, and read as far as needed.

    A question raises one of ``UNREADABLE`` if the model cannot be read, is none, or has too many parts. An outline that
    has not read its file to the end keeps it open.
    """

    def __init__(self, model: ModelSource) -> None:
        self.model = model
        self._stamp: tuple[int, ...] | None = None  # of the file
        self._steps: Generator[Content | None, None, None] | None = None
        self._most = 0  # nodes and initializers that may be read now
        self._head, self._size = b"", 0
        self._content: Content | None = None
        self._refusal: tuple[type[Exception], tuple[Any, ...]] | None = None

    @property
    def head(self) -> bytes:
        """The first bytes of the model, which tell what kind of file it is."""
        self._open()
        return self._head

    @property
    def size(self) -> int:
        """The size of the model file in bytes, without files of external data."""
        self._open()
        return self._size

    def small_graph(self, most: int) -> Graph | None:
        """Return the main graph, or None if it has more than ``most`` nodes and initializers, which are not read."""
        try:
            graph = self.read(most).graph
        except TooManyFieldsError:
            return None
        return graph if graph.size <= most else None

    @property
    def is_current(self) -> bool:
        """False if the file of the model has changed since it was read."""
        return self._stamp is None or self._stamp == stamp_of(self.model)

    @property
    def graph(self) -> Graph:
        """The main graph. Its large initializers have names, types and shapes."""
        return self.content.graph

    @property
    def functions(self) -> list[Function]:
        return self.content.functions

    def operators(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the operator and the domain of each node, those of subgraphs and functions included."""
        return ((node.operator, node.domain) for graph in (self.graph, *self.functions) for node in graph.all_nodes())

    @property
    def content(self) -> Content:
        return self.read(MOST_PARTS)

    def read(self, most: int) -> Content:
        """Return the content of a model of at most so many nodes and initializers.

        After a TooManyFieldsError a later call with a larger number reads on.
        """
        if self._content is None:
            self._open()
            self._most = max(self._most, most)
            self._content = self._advance()
            if self._content is None:
                raise TooManyFieldsError("more nodes and initializers than are to be read")
            self.close()
        return self._content

    def close(self) -> None:
        """Close the file of a model that was not read to its end. No question may follow that needs more of it."""
        if self._steps is not None:
            self._steps.close()
            self._refusal = self._refusal or (ValueError, ("its outline is closed",))

    def _open(self) -> None:
        if self._steps is None and self._content is None:
            self._stamp = stamp_of(self.model)  # first: a file that another replaces meanwhile is not current
            self._steps = self._read_in_steps()
            self._advance()

    def _advance(self) -> Content | None:
        """Take the next step. A model that was refused is not opened again."""
        if self._refusal is not None:
            refused, arguments = self._refusal
            raise refused(*arguments)
        assert self._steps is not None
        try:
            return next(self._steps)
        except UNREADABLE as error:
            self._refusal = type(error), error.args
            raise

    def _read_in_steps(self) -> Generator[Content | None, None, None]:
        """Yield None once the model is open and wherever there are more parts than may be read, then the content."""
        if isinstance(self.model, bytes):
            self._head, self._size = self.model[:HEAD], len(self.model)
            yield None
            yield from self._read_parts(self.model)
            return
        with open_model(os.fspath(self.model)) as file:
            data = FileContent(file)
            self._size = len(data)
            self._head = data[:HEAD]
            yield None
            yield from self._read_parts(data)

    def _read_parts(self, data: bytes | FileContent) -> Generator[Content | None, None, None]:
        reader = Reader(data, _MOST_FIELDS)
        parts = defaultdict[int, list[Extent]](list)
        functions: list[Extent] = []
        opsets: list[tuple[bytes, int]] = []
        ir_version = counted = size = 0
        kept: list[bytes] = []
        infos: list[bytes] = []

        def keep(message: bytes) -> Extent:
            nonlocal size
            start, size = size, size + len(message)
            kept.append(message)
            return start, size

        has_graph = False
        for number, value, content in reader.fields():
            if number == 7:
                has_graph = True
                for inner, _, part in reader.fields(content):
                    if inner == 5 and part[1] - part[0] > _LARGE:
                        parts[5].append(keep(_skip_values(reader, part)))
                    elif inner in _ASKED_FOR:
                        parts[inner].append(keep(data[part[0] : part[1]]))
                    elif inner == 13:
                        infos.append(reader.text(part))
                    if inner in _COUNTED:
                        counted += 1
                        while counted > self._most:
                            yield None
            elif number == 25:
                functions.append(keep(reader.text(content)))
            elif number == 8:
                opsets.append(_read_opset(reader, content))
            elif number == 1 and value is not None:
                ir_version = value
        if not has_graph:
            raise ValueError("it has no graph" if len(data) else "it is empty")
        copies = b"".join(kept)
        inside = Reader(copies, 10 * max(MOST_PARTS, counted))
        own = [Function(inside, each) for each in functions]
        yield Content(Graph(inside, parts), own, opsets, ir_version, copies, infos)


class Content(NamedTuple):
    graph: Graph
    functions: list[Function]
    opsets: list[tuple[bytes, int]]
    ir_version: int
    kept: bytes  # of the main graph and of functions, with names and small values
    infos: list[bytes]  # messages with types and shapes of values within the main graph


HEAD = 512  # bytes that are enough to tell a kind of file
_MOST_FIELDS = 1_000_000  # of the model, of its graph and of large tensors
_ASKED_FOR = frozenset((1, 5, 11, 12))  # of a graph
_COUNTED = (1, 5)  # nodes and initializers
_WITHOUT_VALUES = frozenset((1, 2, 8, 13, 14))  # of a tensor


def _skip_values(reader: Reader, tensor: Extent) -> bytes:
    found = []
    at = tensor[0]
    for number, _, content in reader.fields(tensor):
        if number in _WITHOUT_VALUES:
            found.append(reader.text((at, content[1])))
        at = content[1]
    return b"".join(found)


def _parts_of(reader: Reader, message: Extent) -> dict[int, list[Extent]]:
    found = defaultdict[int, list[Extent]](list)
    for number, _, part in reader.fields(message):
        found[number].append(part)
    return found


def _read_opset(reader: Reader, message: Extent) -> tuple[bytes, int]:
    domain, version = b"", 0
    for number, value, part in reader.fields(message):
        if number == 1:
            domain = reader.text(part)
        elif number == 2 and value is not None:
            version = value
    return domain, version


_LISTS = frozenset((7, 8, 9))  # floats, ints and strings of an attribute: a forest of decision trees has millions


def _read_attribute(reader: Reader, message: Extent) -> tuple[bytes, Attribute]:
    name, integer, text = b"", 0, b""
    tensors: list[Tensor] = []
    graphs: list[Graph] = []
    for number, value, part in reader.fields(message):
        if number == 1:
            name = reader.text(part)
        elif number in _LISTS and message[1] - message[0] > _LARGE:
            break  # an attribute holds nothing beside its list
        elif number == 3 and value is not None:
            integer = value
        elif number == 4:
            text = reader.text(part)
        elif number in (5, 10):
            tensors.append(_read_tensor(reader, part))
        elif number in (6, 11):
            graphs.append(Graph(reader, _parts_of(reader, part)))
    return name, Attribute(integer, text, tensors, graphs)


def _read_tensor(reader: Reader, message: Extent) -> Tensor:
    name, data_type, is_external = b"", 0, False
    shape: list[int] = []
    external: dict[bytes, bytes] = {}
    for number, value, part in reader.fields(message):
        if number == 1:
            shape += reader.numbers(value, part)
        elif number == 2:
            data_type = value or 0
        elif number == 8:
            name = reader.text(part)
        elif number == 13:
            texts = {inner: reader.text(each) for inner, _, each in reader.fields(part)}
            external[texts.get(1, b"")] = texts.get(2, b"")
        elif number == 14:
            is_external = value == _EXTERNAL
    return Tensor(name, data_type, shape, external if is_external else None)


_EXTERNAL = 1  # TensorProto.DataLocation


def _read_value(reader: Reader, message: Extent) -> Value:
    name, shape = b"", None
    for number, _, part in reader.fields(message):
        if number == 1:
            name = reader.text(part)
        elif number == 2:
            for tensor_type in (each for kind, _, each in reader.fields(part) if kind == 1):
                for inner, _, each in reader.fields(tensor_type):
                    if inner == 2:
                        shape = [_size(reader, size) for at, _, size in reader.fields(each) if at == 1]
    return Value(name, shape)


def _size(reader: Reader, dimension: Extent) -> int | None:
    sizes = [value for number, value, _ in reader.fields(dimension) if number == 1 and value is not None]
    return sizes[-1] if sizes else None
