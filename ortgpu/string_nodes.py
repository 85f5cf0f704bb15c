"""Which nodes of a model handle strings: a healthy session asks, if strings go into its model or come out."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from .models import open_model
from .protobuf import Bytes, Extent, Reader, length_delimited

_MOST_READ = 1_000_000  # fields of the file, a second
_LARGE = 1024  # bytes of an initializer; smaller ones can be shapes, which shape inference reads


def nodes_on_strings(model: str | bytes | os.PathLike[str]) -> frozenset[tuple[str, str]]:
    """Operator and name of the nodes of the main graph with a string among their inputs or outputs."""
    try:
        import onnx
        from onnx import shape_inference

        # Without weights: with them it takes longer than the session, and several times their memory.
        if isinstance(model, bytes):
            data = without_weights(model)
        else:
            with open_model(model) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                data = without_weights(content)
        graph = shape_inference.infer_shapes(onnx.load_from_string(data)).graph
        values = (*graph.input, *graph.output, *graph.value_info)
        strings = {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.STRING}
        strings |= {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.STRING}
    except Exception:  # noqa: BLE001 - ONNX Runtime opened the model: what onnx makes of it is no reason to fail
        return frozenset()
    return frozenset(
        (node.op_type, node.name) for node in graph.node if not strings.isdisjoint((*node.input, *node.output))
    )


def without_weights(data: Bytes) -> bytes:
    """A model as it is, but for the values of the large initializers of its main graph.

    Raises:
        ValueError, IndexError: it is no such message, or has more fields than are read.
    """
    reader = Reader(data, _MOST_READ)
    return b"".join(
        length_delimited(7, b"".join(_without_values(reader, content))) if number == 7 else reader.text(whole)
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
