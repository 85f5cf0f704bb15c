"""What a model file holds, read with onnx. Only for diagnoses: a healthy session never comes here."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its file describes it. ``problem``: why it cannot be read; ``reader_problem``: why nothing can be said
    of it, since onnx cannot be imported. The rest is empty then."""

    name: str  # its path, or "<bytes>"
    problem: str | None = None
    reader_problem: str | None = None
    ir_version: int | None = None
    opsets: tuple[tuple[str, int], ...] = ()  # domain and version, as imported
    operators: frozenset[tuple[str, str]] = (
        frozenset()
    )  # operator and domain, those of subgraphs and functions included
    missing_data: tuple[str, ...] = ()  # files with external data that are not there


def read_model(model: str | bytes | os.PathLike[str]) -> ModelFacts:
    """Read a model without its weights. Never raises for what the file holds, or for its absence."""
    name = "<bytes>" if isinstance(model, bytes) else os.fspath(model)
    try:
        from onnx import ModelProto
    except Exception as error:  # noqa: BLE001 - a protobuf of another time raises what it likes
        return ModelFacts(name, reader_problem=f"{type(error).__name__}: {error}")
    try:
        proto: Any = ModelProto()
        if isinstance(model, bytes):
            proto.ParseFromString(model)
        else:
            with open_model(model) as file:
                proto.ParseFromString(file.read())
        if not proto.ir_version and not proto.graph.node:
            return ModelFacts(name, problem="not an ONNX model: it is empty")
        functions = list(proto.functions)
        local = {(function.name, function.domain) for function in functions}
        nodes = [*_walk(proto.graph.node), *(found for function in functions for found in _walk(function.node))]
        folder = None if isinstance(model, bytes) else os.path.dirname(os.path.abspath(name))
        return ModelFacts(
            name,
            ir_version=int(proto.ir_version),
            opsets=tuple(sorted((entry.domain, int(entry.version)) for entry in proto.opset_import)),
            operators=frozenset(nodes) - local,
            missing_data=tuple(sorted(_missing_data(proto, folder))),
        )
    except OSError as error:
        return ModelFacts(name, problem=(error.strerror or str(error)).lower())
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError, a broken onnx: all that counts is that it fails
        return ModelFacts(name, problem=f"not an ONNX model: {type(error).__name__}: {error}")


def open_model(path: str | os.PathLike[str]) -> BinaryIO:
    """Raises OSError also for what is not read: a pipe waits for a writer, and what it gives is gone for the session; a
    device may have no end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder cannot be opened, which says so
        raise OSError("not a regular file")
    return open(path, "rb")


def _walk(nodes: Any) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.op_type, "" if node.domain == "ai.onnx" else node.domain
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _walk(graph.node)


def _missing_data(proto: Any, folder: str | None) -> set[str]:
    """Locations that initialisers of the main graph name and that are not files beside the model."""
    locations = {
        entry.value
        for tensor in proto.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location" and not entry.value.startswith("*/_ORT_MEM_ADDR_/")
    }
    return {name for name in locations if folder is None or not os.path.isfile(os.path.join(folder, name))}


# Registered together, only in builds with NCCL: core/graph/contrib_ops/collective_defs.cc
_COLLECTIVE = ("AllReduce", "AllGather", "AllToAll", "ShardedMoE")
_COLLECTIVE_PREFIX = "Distributed"


def collective_operators(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Those of the operators (each with its domain) that work between processes."""
    names = {name for name, domain in operators if domain == "com.microsoft"}
    return tuple(sorted(name for name in names if name in _COLLECTIVE or name.startswith(_COLLECTIVE_PREFIX)))


def read_collective_operators(model: str | bytes | os.PathLike[str]) -> tuple[str, ...]:
    """The same of a model, which is only parsed where its bytes hold such a name. Never raises."""
    words = [name.encode() for name in (*_COLLECTIVE, _COLLECTIVE_PREFIX)]
    try:
        if isinstance(model, bytes):
            mentioned = any(word in model for word in words)
        else:
            with open_model(model) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                mentioned = any(content.find(word) >= 0 for word in words)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return ()
    return collective_operators(read_model(model).operators) if mentioned else ()


def nodes_on_strings(model: str | bytes | os.PathLike[str]) -> frozenset[tuple[str, str]]:
    """Operator and name of the nodes of the main graph with a string among their inputs or outputs."""
    try:
        import onnx
        from onnx import shape_inference

        if isinstance(model, bytes):
            proto: Any = onnx.load_from_string(model)
        else:
            with open_model(model) as file:
                proto = onnx.load(file, load_external_data=False)
        graph = shape_inference.infer_shapes(proto).graph
        values = (*graph.input, *graph.output, *graph.value_info)
        strings = {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.STRING}
        strings |= {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.STRING}
    except Exception:  # noqa: BLE001 - ONNX Runtime opened the model: what onnx makes of it is no reason to fail
        return frozenset()
    return frozenset(
        (node.op_type, node.name) for node in graph.node if not strings.isdisjoint((*node.input, *node.output))
    )
