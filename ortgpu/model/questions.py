"""Questions about a model that its file answers in limited time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from .protobuf import Extent, Reader
from .structure import FileContent, ModelSource, open_model, without_weights

STANDARD = (b"", b"ai.onnx")  # the domain of ONNX's own operators, as a node and a model name it

_SMALL = 256 << 10  # bytes
_MOST_READ = 100_000  # fields of a file, beside those within nodes: a tenth of a second


def matches(model: ModelSource, judge: Callable[[Reader], bool], most: int) -> bool:
    """Return the answer of ``judge`` to a reader of the model, which reads at most ``most`` fields.

    False if this is no model: ONNX Runtime says what is wrong with it.
    """
    content = in_memory(model)
    try:
        return isinstance(content, bytes) and judge(Reader(content, most))
    except (ValueError, IndexError):
        return False


def in_memory(model: ModelSource) -> ModelSource:
    """Read a model file for several questions; a large one without the values of its weights.

    ``model`` itself is returned if it cannot be read, or has very many nodes.
    """
    if isinstance(model, bytes):
        return model
    try:
        with open_model(os.fspath(model)) as file:
            if os.fstat(file.fileno()).st_size <= _SMALL:
                return file.read()
            return without_weights(FileContent(file), _MOST_READ)
    except (OSError, ValueError, IndexError, TypeError):  # the next one to open it reports that
        return model


def has_only(model: ModelSource, operators: Collection[bytes], most: int) -> bool:
    """Return True if all nodes of a model are of these ``operators`` of ONNX's own domain.

    False if this is no model, or one with more than ``most`` fields.
    """

    # Numbers of fields are those of onnx.proto

    def judge(reader: Reader) -> bool:
        graphs = 0
        for number, _, extent in reader.fields():
            if number == 25:  # a function of its own, which may have the name of an operator
                return False
            if number == 7:
                graphs += 1
                nodes = (node for field, _, node in reader.fields(extent) if field == 1)
                if not all(_is_among(operators, reader, node) for node in nodes):
                    return False
        return graphs == 1

    return matches(model, judge, most)


def _is_among(operators: Collection[bytes], reader: Reader, node: Extent) -> bool:
    operator, domain = b"", b""
    for number, _, extent in reader.fields(node):
        if number == 4:
            operator = reader.text(extent)
        elif number == 7:
            domain = reader.text(extent)
    return operator in operators and domain in STANDARD
