"""Find nodes on the CPU that compute, although their operators could just handle shapes.

ONNX Runtime moves a node to the CPU if all its inputs are there already (GetCpuPreferredNodes in
fallback_cpu_capability.cc). These are shapes, values computed from shapes, small constants and inputs of the graph. A
node handles shapes if all its inputs derive from shapes and small constants. Any other node on the CPU computes
there. It may have no CUDA kernel for its types or version, or follow such a node. Or ONNX Runtime prefers the CPU for
it, since this preference ignores the sizes of inputs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple, TypeAlias

from .outline import STANDARD, UNREADABLE, Graph, GraphOutline, Node, Tensor, Value, names

Key: TypeAlias = tuple[str, str]  # operator and name; several nodes can share a key


class Places(NamedTuple):
    doubtful: int = 0  # on the CPU, with an operator that can handle shapes
    elsewhere: int = 0


# The sources of a value, as flags. A value without a flag does not depend on the inputs.
_SHAPE = 1  # shapes alone
_SMALL = 2  # an input of the model with a few elements; beside a shape it counts as a shape
_GIVEN = 4  # another input of its graph
_DATA = 8

_FEW = 100  # elements: up to kSmallInitializerThreshold, ONNX Runtime takes a constant for a part of a shape

_SOURCES = names("Constant Shape Size SequenceLength")
# CUDA kernels of these operators take later inputs from the CPU, so only the first input can move a node to the CPU.
_BY_FIRST_INPUT = names(
    "Cast Clip Expand Flatten Reshape Slice Split Squeeze Tile Unsqueeze",
    "ReduceMax ReduceMin ReduceProd ReduceSum",
)
# For these operators, the input at this position sets the number of elements of the output. Their CUDA kernels take the
# input from the CPU. So if it is a shape, no preference put the node onto the CPU, and the output need not be small.
_COUNT = {b"ConstantOfShape": 0, b"Range": 1, b"Expand": 1, b"Tile": 1}


def computing_nodes(outline: GraphOutline, inputs: Iterable[str], placed: Mapping[Key, Places]) -> frozenset[Key]:
    """Return the keys of the doubtful nodes that take data. ``inputs``: names of the inputs of a run.

    Nodes that ONNX Runtime made are not in the file and stay unnoticed. If the model cannot be read, all doubtful keys
    are returned.
    """
    try:
        return _Flow(outline, inputs, placed).computing()
    except UNREADABLE:
        return frozenset(key for key, places in placed.items() if places.doubtful)


_NOWHERE = Places()

_Scope: TypeAlias = MutableMapping[bytes, int]  # sources of values by their names


class _Flow:
    def __init__(self, outline: GraphOutline, inputs: Iterable[str], placed: Mapping[Key, Places]) -> None:
        self._placed = {(op_type.encode(), name.encode()): places for (op_type, name), places in placed.items()}
        self._functions = {(body.domain, body.operator, body.overload): body for body in outline.functions}
        # For each node of a doubtful key: it computes; ONNX Runtime prefers the CPU, since the node takes a shape
        self._found: dict[tuple[bytes, bytes], dict[tuple[int, ...], tuple[bool, bool]]] = defaultdict(dict)
        scope: _Scope = dict.fromkeys((name.encode() for name in inputs), _GIVEN)
        scope.update((value.name, _given(value)) for value in outline.graph.inputs if value.name in scope)
        self._follow(outline.graph, scope, (), b"")

    def computing(self) -> frozenset[Key]:
        return frozenset(
            (op_type.decode(), name.decode())
            for (op_type, name), nodes in self._found.items()
            if _some_compute(self._placed[op_type, name], list(nodes.values()))
        )

    def _follow(self, graph: Graph, scope: _Scope, path: tuple[int, ...], prefix: bytes) -> list[int]:
        """Return the sources of a graph's outputs. ``scope`` has its inputs. ``path`` identifies the graph.

        ``prefix`` is put before the names of nodes.
        """
        for tensor in graph.initializers:
            scope.setdefault(tensor.name, _source_of(tensor))
        nodes = list(graph.nodes)
        for node in nodes:
            for name in node.outputs:
                # This holds until the walk reaches the node. ONNX Runtime does not insist on ONNX's order of nodes.
                scope.setdefault(name, _DATA)
        scope[b""] = 0  # the name of an input that is left out
        for index, node in enumerate(nodes):
            body = self._functions.get((node.domain, node.operator, node.overload)) if self._functions else None
            has_own_nodes = body is not None or bool(node.graphs)
            key = self._key_of(node, prefix)
            places = self._placed.get(key, _NOWHERE)
            if places.elsewhere and not places.doubtful and not has_own_nodes and not _is_source(node):
                scope.update(dict.fromkeys(node.outputs, _DATA))  # The inputs do not matter.
                continue
            values = [scope.get(name, 0) for name in node.inputs]
            node_path = *path, index
            if body is not None:
                inner = dict(zip(_names_of(body), values, strict=False))
                outputs = self._follow(body, inner, node_path, b"_inlfunc_" + node.operator + b"_")
            elif has_own_nodes:
                outputs = self._through_graphs(node, values, scope, node_path, prefix)
            else:
                outputs = [self._made(node, values, node_path, key, places)] * len(node.outputs)
            scope.update(zip(node.outputs, outputs, strict=False))
        return [scope.get(name, 0) for name in graph.outputs]

    def _key_of(self, node: Node, prefix: bytes) -> tuple[bytes, bytes]:
        """Return the key of a node in the placement. ``prefix`` is put before names within a function."""
        if node.operator == b"CastLike":  # No provider has it; its function is a Cast without a name.
            return b"Cast", b""
        name = node.name
        try:
            name.decode()
        except UnicodeDecodeError:  # A placement has no name for it.
            name = b""
        key = node.operator, prefix + name if name else b""
        return key if key in self._placed else (node.operator, name)

    def _through_graphs(
        self, node: Node, values: list[int], scope: _Scope, path: tuple[int, ...], prefix: bytes
    ) -> list[int]:
        """Return the sources of the outputs of an If, a Loop or a Scan. A loop-carried value has all turns' sources."""
        first, inputs, handed_on = 0, list[int](), 0
        if node.operator == b"Loop":
            first, inputs, handed_on = 1, [_SHAPE, _SHAPE, *values[2:]], len(values) - 2
        elif node.operator != b"If":
            inputs = values[-len(node.graphs[0].inputs) :] if node.graphs[0].inputs else []
            handed_on = len(inputs) - (node.attribute(b"num_scan_inputs").integer or len(inputs))
        while True:
            results = list[int]()
            for number, graph in enumerate(node.graphs):
                # ONNX Runtime's preference does not ask where an input of a subgraph is.
                bound = (source & ~_DATA | _GIVEN if source & _DATA else source for source in inputs)
                inner = ChainMap[bytes, int]({}, *(scope.maps if isinstance(scope, ChainMap) else (scope,)))
                inner.maps[0].update(zip(_names_of(graph), bound, strict=False))
                outputs = self._follow(graph, inner, (*path, number), prefix)
                results = [a | b for a, b in zip(results, outputs, strict=False)] if results else outputs
            before = list(inputs)
            offset = len(inputs) - handed_on if node.operator == b"Loop" else 0
            for number, result in enumerate(results[first : first + handed_on]):
                inputs[offset + number] |= result
            if inputs == before:
                return results[first:]

    def _made(
        self, node: Node, values: list[int], path: tuple[int, ...], key: tuple[bytes, bytes], places: Places
    ) -> int:
        if _is_source(node):
            constant = node.operator == b"Constant"
            return next(map(_source_of, node.attribute(b"value").tensors), 0) if constant else _SHAPE
        if node.operator == b"CastLike":
            values = values[:1]
        taken = functools.reduce(operator.or_, values, 0)
        if node.operator in _BY_FIRST_INPUT and values and values[0]:
            taken = values[0]
        at = _COUNT.get(node.operator)
        many = at is not None and len(values) > at and values[at] & _SHAPE
        computes = bool(taken & (_GIVEN | _DATA) or taken == _SMALL or many)
        if places.doubtful:
            self._found[key][path] = (computes, bool(taken & _SHAPE and not taken & _DATA))
        if computes:
            return _DATA
        return _SHAPE if places.doubtful and not places.elsewhere else taken


def _is_source(node: Node) -> bool:
    """Return True if the outputs of a node do not depend on the values of its inputs."""
    return node.operator in _SOURCES and node.domain in STANDARD


def _some_compute(places: Places, found: list[tuple[bool, bool]]) -> bool:
    """Return True if some nodes of a key on the CPU compute. ONNX Runtime may have removed any of the nodes."""
    computing = [is_preferred for computes, is_preferred in found if computes]
    shapes = len(found) - len(computing)
    if not computing:
        return False
    if not places.elsewhere and not shapes:
        return True
    if any(computing):
        return True
    return places.doubtful > shapes and places.elsewhere < len(computing)


def _names_of(graph: Graph) -> list[bytes]:
    return [value.name for value in graph.inputs]


def _source_of(tensor: Tensor) -> int:
    return _DATA if math.prod(tensor.shape) > _FEW else 0


def _given(value: Value) -> int:
    sizes = None if value.shape is None else [_FEW + 1 if size is None else size for size in value.shape]
    return _SMALL if sizes is not None and math.prod(sizes) <= _FEW else _GIVEN
