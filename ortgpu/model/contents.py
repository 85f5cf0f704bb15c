"""Facts of a model file, read with onnx, for diagnoses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .file_kinds import HEAD, kind_of_file
from .structure import ModelSource, open_model, read_structure

# Of one protobuf message: https://protobuf.dev/programming-guides/encoding/#size-limit
LARGEST = 2 << 30


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its file describes it.

    ``problem`` says why the model cannot be read, ``reader_problem`` why onnx cannot be imported. All other fields are
    empty then, and for a model in ONNX Runtime's own format.
    """

    name: str  # its path, or "<bytes>"
    problem: str | None = None
    fix: str | None = None  # of the problem, where it is known
    reader_problem: str | None = None
    ir_version: int | None = None
    opsets: tuple[tuple[str, int], ...] = ()  # domain and version, as imported
    operators: frozenset[tuple[str, str]] = (
        frozenset()
    )  # operator and domain, those of subgraphs and functions included
    data_folder: str = ""  # in which its files with external data have to be
    data_problems: tuple[tuple[str, str], ...] = ()  # of these files: name, and why it cannot be used


def read_model(model: ModelSource) -> ModelFacts:
    """Read a model without its weights. Never raises for what the file holds, or for its absence."""
    name = "<bytes>" if isinstance(model, bytes) else os.fsdecode(model)
    if isinstance(model, bytes) and is_ort_format(model):
        return ModelFacts(name)
    try:
        from onnx import ModelProto
    except Exception as error:  # noqa: BLE001 - a protobuf of another time raises what it likes
        return ModelFacts(name, reader_problem=f"{type(error).__name__}: {error}")
    head = b""
    try:
        head, size = _head_and_size(model)
        if not isinstance(model, bytes) and is_ort_format(model):
            return _of_ort_format(name, head)
        if size >= LARGEST:
            return _no_model(name, head, f"it has {size} bytes, and an ONNX file can have {LARGEST - 1}")
        content = read_structure(model)
        proto: Any = ModelProto()
        proto.ParseFromString(content)
        if not proto.HasField("graph"):
            return _no_model(name, head, "it has no graph" if content else "it is empty")
        functions = list(proto.functions)
        local = {(text_of(function.name), text_of(function.domain)) for function in functions}
        nodes = [*_walk(proto.graph.node), *(found for function in functions for found in _walk(function.node))]
        folder = os.getcwd() if isinstance(model, bytes) else os.path.dirname(os.path.abspath(name))
        return ModelFacts(
            name,
            ir_version=int(proto.ir_version),
            opsets=tuple(sorted((text_of(entry.domain), int(entry.version)) for entry in proto.opset_import)),
            operators=frozenset(nodes) - local,
            data_folder=folder,
            data_problems=tuple(_data_problems(proto.graph, folder)),
        )
    except OSError as error:
        return ModelFacts(name, problem=(error.strerror or str(error)).lower())
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError, a broken onnx: all that counts is that it fails
        return _no_model(name, head, f"{type(error).__name__}: {error}")


def _head_and_size(model: ModelSource) -> tuple[bytes, int]:
    if isinstance(model, bytes):
        return model[:HEAD], len(model)
    with open_model(model) as file:
        return file.read(HEAD), os.fstat(file.fileno()).st_size


def is_ort_format(model: ModelSource) -> bool:
    """Return True if ONNX Runtime takes the model for one in its own format.

    It goes by the name of a file and by the first bytes (IsOrtFormatModel in flatbuffers_utils.cc). The session option
    session.load_model_format can say otherwise.
    """
    if isinstance(model, bytes):
        return model.startswith(_ORT_IDENTIFIER, 4)
    return os.fsdecode(model).lower().endswith(".ort")


_ORT_IDENTIFIER = b"ORTM"  # after the offset of a flatbuffer's root


def _of_ort_format(name: str, head: bytes) -> ModelFacts:
    if is_ort_format(head):
        return ModelFacts(name)
    return ModelFacts(
        name,
        problem="its name ends in .ort, and it is no model in ONNX Runtime's own format",
        fix="give an ONNX model a name that ends in .onnx",
    )


def _no_model(name: str, head: bytes, why: str) -> ModelFacts:
    kind = kind_of_file(head)
    if kind is None:
        return ModelFacts(name, problem=f"not an ONNX model: {why}")
    return ModelFacts(name, problem=f"not an ONNX model: it is {kind.what}", fix=kind.fix)


def text_of(value: str | bytes) -> str:
    """Return a string field as str; protobuf gives bytes where it is not UTF-8."""
    return value if isinstance(value, str) else os.fsdecode(value)


def _walk(nodes: Any) -> Iterator[tuple[str, str]]:
    for node in nodes:
        domain = text_of(node.domain)
        yield text_of(node.op_type), "" if domain == "ai.onnx" else domain
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _walk(graph.node)


def _data_problems(graph: Any, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the location of each external data file that lacks data of the graph, and why."""
    needed: dict[str, int] = {}  # bytes, where that is said
    for tensor in _tensors(graph):
        if tensor.data_location != tensor.EXTERNAL:
            continue
        entries = {entry.key: text_of(entry.value) for entry in tensor.external_data}
        location = entries.get("location", "")
        if location and not location.startswith("*/_ORT_MEM_ADDR_/"):
            sizes = [entries.get(key, "0") for key in ("offset", "length")]
            end = sum(map(int, sizes)) if all(size.isdecimal() for size in sizes) else 0
            needed[location] = max(end, needed.get(location, 0))
    for location, size in sorted(needed.items()):
        why = _why_without(os.path.join(folder, location), size)
        if why is not None:
            yield location, why


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _why_without(path: str, size: int) -> str | None:
    """Return why ``size`` bytes of a file cannot be read, or None if they can."""
    try:
        with open_model(path) as file:
            kind = kind_of_file(file.read(HEAD))
            found = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return (getattr(error, "strerror", None) or str(error)).lower()
    if found >= size:
        return None
    return f"it has {found} bytes, and the model needs {size}" + (f": it is {kind.what}" if kind is not None else "")


# Registered together, only in builds with NCCL: core/graph/contrib_ops/collective_defs.cc
_COLLECTIVE = ("AllReduce", "AllGather", "AllToAll", "ShardedMoE")
_COLLECTIVE_PREFIX = "Distributed"


def collective_operators(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of the operators that work between processes. ``operators``: type and domain."""
    names = {name for name, domain in operators if domain == "com.microsoft"}
    return tuple(sorted(name for name in names if name in _COLLECTIVE or name.startswith(_COLLECTIVE_PREFIX)))


def read_collective_operators(model: ModelSource) -> tuple[str, ...]:
    """Return :func:`collective_operators` of a model, parsed only if its bytes hold such a name. Never raises."""
    words = [name.encode() for name in (*_COLLECTIVE, _COLLECTIVE_PREFIX)]
    try:
        content = read_structure(model)
    except (OSError, ValueError):
        return ()
    mentioned = any(word in content for word in words)
    return collective_operators(read_model(model).operators) if mentioned else ()
