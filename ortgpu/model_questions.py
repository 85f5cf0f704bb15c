"""Questions about a model that its file answers, in a time that has a limit."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection

from .model_structure import Model, open_model
from .protobuf import Extent, Reader

STANDARD = (b"", b"ai.onnx")  # the domain of ONNX's own operators, as a node and a model name it

_SMALL = 256 << 10  # bytes


def is_so(model: Model, judge: Callable[[Reader], bool], most: int) -> bool:
    """What ``judge`` says of a reader of a model, which reads ``most`` fields. False for what is no model: ONNX Runtime
    says what is wrong with it."""
    try:
        if isinstance(model, bytes):
            return judge(Reader(model, most))
        with open_model(os.fspath(model)) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return judge(Reader(content, most))
    except (OSError, ValueError, IndexError, TypeError):
        return False


def in_memory_if_small(model: Model) -> Model:
    """What is in a small file, for whoever asks several questions: to map it for each takes longer than to read it.
    Else ``model`` as it is."""
    if isinstance(model, bytes):
        return model
    try:
        with open_model(os.fspath(model)) as file:
            return file.read() if os.fstat(file.fileno()).st_size <= _SMALL else model
    except (OSError, ValueError, TypeError):  # whoever opens it next says so
        return model


def has_only(model: Model, operators: Collection[bytes], most: int) -> bool:
    """Whether all nodes of a model are among these ``operators`` of ONNX's own. False for what is no model, and for one
    with more than ``most`` fields."""

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

    return is_so(model, judge, most)


def _is_among(operators: Collection[bytes], reader: Reader, node: Extent) -> bool:
    operator, domain = b"", b""
    for number, _, extent in reader.fields(node):
        if number == 4:
            operator = reader.text(extent)
        elif number == 7:
            domain = reader.text(extent)
    return operator in operators and domain in STANDARD
