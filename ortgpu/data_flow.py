"""Nodes on the CPU that have the operator of one that handles shapes, and compute.

ONNX Runtime moves a node to the CPU where it takes what is there already: a shape, or what was computed of one
(GetCpuPreferredNodes in fallback_cpu_capability.cc). A node that takes nothing of a shape is on the CPU for another
reason: CUDA has no kernel for its types, Greater on uint8 for instance, or for the version that its opset gave it, or
it follows such a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

from .model_questions import is_so
from .model_structure import Model
from .protobuf import Extent, Reader

Key: TypeAlias = tuple[str, str]  # operator and name of a node
#: Where a node is: "doubtful" is on the CPU with the operator of one that handles shapes; "data" is any other.
Place = Literal["data", "doubtful"]

_MOST_READ = 100_000  # fields of the file, a tenth of a second

_OF_SHAPES = frozenset((b"Shape", b"Size", b"SequenceLength"))
_WITH_GRAPHS = frozenset((b"If", b"Loop", b"Scan"))
# What they take after the first input, their CUDA kernels take from the CPU: it moves none of them there.
_BY_FIRST_INPUT = frozenset(
    name.encode()
    for line in (
        "Cast Clip Expand Flatten Reshape Slice Split Squeeze Tile Unsqueeze",
        "ReduceMax ReduceMin ReduceProd ReduceSum",
    )
    for name in line.split(" ")
)


# Operators that lack CUDA kernels for some types in every release that tells where nodes are, 1.24 to 1.31. Of the
# others of placement.py that handle shapes, all types and all versions up to opset 25 have one in these releases
# (tests/test_kernels.py).
_LACKING = frozenset(
    name
    for line in (
        "Clip Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod",
        "ReduceMax ReduceMin ReduceProd Tile Where",
    )
    for name in line.split(" ")
)
_COMPLETE = ((1, 28), (1, 31))


def may_compute(operators: Iterable[str], release: tuple[int, ...]) -> bool:
    """Whether one of these, which are on the CPU, may compute there: to find out which takes some milliseconds."""
    first, last = _COMPLETE
    return not first <= release[:2] <= last or not _LACKING.isdisjoint(operators)


def computing_nodes(model: Model, inputs: Iterable[str], placed: Mapping[Key, Place]) -> frozenset[Key]:
    """Those of the doubtful nodes that take data and nothing of a shape. ``inputs``: names of what a run is given.

    A node that the model file does not have, because ONNX Runtime made it, is not among them, nor is one of which
    that cannot be told.
    """
    flow = _Flow(inputs, placed)
    return flow.computing() if is_so(model, flow.read, _MOST_READ) else frozenset()


class _Flow:
    """What is data, and what is of a shape. Of a value that is not noted nothing depends on the inputs."""

    def __init__(self, inputs: Iterable[str], placed: Mapping[Key, Place]) -> None:
        self._values: dict[bytes, Literal["data", "shape", "either"]] = {name.encode(): "data" for name in inputs}
        self._placed = {(op_type.encode(), name.encode()): place for (op_type, name), place in placed.items()}
        self._computing: dict[tuple[bytes, bytes], bool] = {}  # several nodes can have no name

    def computing(self) -> frozenset[Key]:
        return frozenset((op_type.decode(), name.decode()) for (op_type, name), yes in self._computing.items() if yes)

    # Numbers of fields are those of onnx.proto

    def read(self, reader: Reader) -> bool:
        for number, _, graph in reader.fields():
            if number == 7:
                self._read_graph(reader, graph)
        return True

    def _read_graph(self, reader: Reader, graph: Extent) -> None:
        for number, _, node in reader.fields(graph):
            if number == 1:
                self._read_node(reader, node)

    def _read_node(self, reader: Reader, node: Extent) -> None:
        takes, gives, name, operator = list[bytes](), list[bytes](), b"", b""
        for number, _, part in reader.fields(node):
            if number == 1:
                takes.append(reader.text(part))
            elif number == 2:
                gives.append(reader.text(part))
            elif number == 3:
                name = reader.text(part)
            elif number == 4:
                operator = reader.text(part)
            elif operator in _WITH_GRAPHS:
                for graph in _graphs_of(reader, part) if number == 5 else ():
                    self._read_inner(reader, graph)
            elif operator:
                break  # what follows are attributes, which are most of a node
        made = self._made(operator, name, takes)
        if made is not None:
            self._values.update(dict.fromkeys(gives, made))

    def _read_inner(self, reader: Reader, graph: Extent) -> None:
        for number, _, value in reader.fields(graph):
            if number == 11:  # an input
                names = (part for field, _, part in reader.fields(value) if field == 1)
                self._values.update((reader.text(part), "either") for part in names)
        self._read_graph(reader, graph)

    def _made(self, operator: bytes, name: bytes, takes: list[bytes]) -> Literal["data", "shape", "either"] | None:
        if operator in _OF_SHAPES:
            return "shape"
        if operator in _WITH_GRAPHS:
            return "either"
        place = self._placed.get((operator, name))
        if place == "data":
            return "data"
        counted = takes[:1] if operator in _BY_FIRST_INPUT else takes
        taken = {self._values[value] for value in counted if value in self._values}
        if place == "doubtful":
            computes = taken == {"data"}
            self._computing[operator, name] = computes and self._computing.get((operator, name), True)
            return "data" if computes else "shape"
        # ONNX Runtime has put something else in its place
        if not taken:
            return None
        return taken.pop() if len(taken) == 1 else "either"


def _graphs_of(reader: Reader, attribute: Extent) -> Iterator[Extent]:
    return (part for number, _, part in reader.fields(attribute) if number in (6, 11))
