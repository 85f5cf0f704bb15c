"""Facts of a model file for diagnoses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .files import NO_REGULAR_FILE, ModelSource, is_ort_format, is_special_file, open_model
from .outline import HEAD, UNREADABLE, Graph, GraphOutline, Tensor
from .protobuf import TooManyFieldsError

# The limit for one protobuf message: https://protobuf.dev/programming-guides/encoding/#size-limit
LARGEST = 2 << 30

_MOST_PARTS = 1_000_000  # nodes and initializers: one second


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its file describes it.

    ``problem`` says why the model cannot be read. Then all other fields are empty. They are also empty for a model in
    ONNX Runtime's own format and for a model with more than a million parts.
    """

    name: str  # its path, or "<bytes>"
    problem: str | None = None
    fix: str | None = None  # how to fix the problem, if known
    # operator and domain of all nodes, subgraphs and functions included
    operators: frozenset[tuple[str, str]] = frozenset()
    data_folder: str = ""  # the folder for its files with external data
    data_problems: tuple[tuple[str, str], ...] = ()  # names of unusable data files, with the reason


def read_model(model: ModelSource) -> ModelFacts:
    """Read a model without its weights. Never raises for a damaged or missing file."""
    return describe_model(GraphOutline(model))


def describe_model(outline: GraphOutline) -> ModelFacts:
    """Return the facts of the model of an outline. Never raises for a damaged or missing file."""
    model = outline.model
    name = "<bytes>" if isinstance(model, bytes) else os.fsdecode(model)
    head = b""
    if is_special_file(model):
        return ModelFacts(name, problem=NO_REGULAR_FILE, fix="write the model to a file first, or give its bytes")
    try:
        head = outline.head
        if is_ort_format(model):
            if is_ort_format(head):
                return ModelFacts(name)
            why = "its name ends in .ort, and it is no model in ONNX Runtime's own format"
            return ModelFacts(name, problem=why, fix="give an ONNX model a name that ends in .onnx")
        if outline.size >= LARGEST:
            return _no_model(name, head, f"it has {outline.size} bytes, and an ONNX file can have {LARGEST - 1}")
        content = outline.read(_MOST_PARTS)
        path = None if isinstance(model, bytes) else os.path.abspath(name)
        folder = os.getcwd() if path is None else os.path.dirname(path)
        return ModelFacts(
            name,
            operators=_operators_of(outline),
            data_folder=folder,
            data_problems=tuple(_data_problems(content.graph, folder, path)) if b"location" in content.kept else (),
        )
    except OSError as error:
        return ModelFacts(name, problem=(error.strerror or str(error)).lower())
    except TooManyFieldsError:
        return ModelFacts(name)
    except IndexError:
        return _no_model(name, head, "it is cut off")
    except MemoryError:
        return ModelFacts(name, problem="this process gets too little memory to read it")
    except (ValueError, RecursionError) as error:
        return _no_model(name, head, str(error))


def _no_model(name: str, head: bytes, why: str) -> ModelFacts:
    what, fix = _kind_of_file(head)
    return ModelFacts(name, problem=f"not an ONNX model: {why if what is None else f'it is {what}'}", fix=fix)


def _operators_of(outline: GraphOutline) -> frozenset[tuple[str, str]]:
    operators = set()
    for operator, domain in set(outline.operators()):
        operators.add((os.fsdecode(operator), "" if domain == b"ai.onnx" else os.fsdecode(domain)))
    for function in outline.functions:
        operators.discard((os.fsdecode(function.operator), os.fsdecode(function.domain)))
    return frozenset(operators)


LEAVES = "this path leaves the folder of the model, and ONNX Runtime reads no weights outside of it"


def _data_problems(graph: Graph, folder: str, path: str | None) -> Iterator[tuple[str, str]]:
    """Yield the location of each external data file that lacks data of the graph, and why.

    ``path`` is the path of the model, or None for bytes. A model must not find out what other folders hold.
    """
    # ValidateExternalDataPath in tensorprotoutils.cc allows the folder and, if the model is a link, its target's
    # folder.
    inside = {os.path.realpath(folder), os.path.dirname(os.path.realpath(path or os.path.join(folder, "model")))}
    for location, size in sorted(_needed(graph).items()):
        why = LEAVES if _leaves(folder, location, inside) else _why_without(os.path.join(folder, location), size)
        if why is not None:
            yield location, why


def data_files(path: str) -> list[str]:
    """Return the locations of the external data files of a model; none if it cannot be read."""
    try:
        return sorted(_needed(GraphOutline(path).read(_MOST_PARTS).graph))
    except UNREADABLE:
        return []


def _needed(graph: Graph) -> dict[str, int]:
    """Return the bytes that the graph needs of each external data file, 0 if the model does not say."""
    needed: dict[str, int] = {}
    for tensor in _tensors(graph):
        entries = tensor.external or {}
        location = os.fsdecode(entries.get(b"location", b""))
        if location and not location.startswith("*/_ORT_MEM_ADDR_/"):
            sizes = [entries.get(key, b"0").decode(errors="replace") for key in (b"offset", b"length")]
            end = sum(map(int, sizes)) if all(size.isdecimal() for size in sizes) else 0
            needed[location] = max(end, needed.get(location, 0))
    return needed


def _leaves(folder: str, location: str, inside: Iterable[str]) -> bool:
    if os.path.isabs(location) or os.path.splitdrive(location)[0]:
        return True
    try:
        target = os.path.realpath(os.path.join(folder, location))
    except (OSError, ValueError):  # No file can have this name.
        return False
    return not any(target.startswith(os.path.join(allowed, "")) for allowed in inside)


def _tensors(graph: Graph) -> Iterator[Tensor]:
    yield from graph.initializers
    for node in graph.nodes:
        for attribute in node.attributes.values():
            yield from attribute.tensors
        for inner in node.graphs:
            yield from _tensors(inner)


def _why_without(path: str, size: int) -> str | None:
    """Return why ``size`` bytes of a file cannot be read, or None if they can."""
    try:
        with open_model(path) as file:
            what, _ = _kind_of_file(file.read(HEAD))
            total = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:  # ValueError: no file can have this name.
        return (getattr(error, "strerror", None) or str(error)).lower()
    if total >= size:
        return None
    return f"it has {total} bytes, and the model needs {size}" + (f": it is {what}" if what is not None else "")


_DOWNLOAD = "download the file itself: this is what a server sends in its place, for an error or to sign in"
_POINTER = (
    "a pointer of Git LFS, in place of the file",
    "fetch the file itself: run git lfs pull in its repository, or download it again",
)
_ORT = (
    "a model in ONNX Runtime's own format",
    "give the file a name that ends in .ort, by which ONNX Runtime knows it",
)
_ARCHIVE = ("an archive", "unpack it; or if torch.save wrote it, export the model to ONNX with torch")

# Offset, the bytes there, and what the file is, with the fix
_SIGNATURES = (
    (0, b"version https://git-lfs.github.com/spec/", _POINTER),
    (4, b"ORTM", _ORT),
    (0, b"PK\x03\x04", _ARCHIVE),
    (0, b"\x1f\x8b", _ARCHIVE),
)
_TEXTS = ((b"<!doctype html", "a web page"), (b"<html", "a web page"), (b"<?xml", "XML"), (b"{", "JSON"))


def _kind_of_file(head: bytes) -> tuple[str, str] | tuple[None, None]:
    for at, signature, kind in _SIGNATURES:
        if head.startswith(signature, at):
            return kind
    text = head.lstrip().lower()
    return next(((what, _DOWNLOAD) for start, what in _TEXTS if text.startswith(start)), (None, None))


# Only builds with NCCL register these operators (core/graph/contrib_ops/collective_defs.cc).
_COLLECTIVE = ("AllReduce", "AllGather", "AllToAll", "ShardedMoE")
_COLLECTIVE_PREFIX = "Distributed"
_COLLECTIVE_WORDS = re.compile("|".join((*_COLLECTIVE, _COLLECTIVE_PREFIX)).encode())


def collective_operators(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of the operators that work between processes. ``operators``: type and domain."""
    names = {name for name, domain in operators if domain == "com.microsoft"}
    return tuple(sorted(name for name in names if name in _COLLECTIVE or name.startswith(_COLLECTIVE_PREFIX)))


def read_collective_operators(outline: GraphOutline) -> tuple[str, ...]:
    """Return :func:`collective_operators` of a model. Nodes are read only if the file has such a name. Never raises."""
    try:
        messages = outline.read(_MOST_PARTS).kept
        if not _COLLECTIVE_WORDS.search(messages):
            return ()
        return collective_operators(_operators_of(outline))
    except UNREADABLE:
        return ()


# The kernels of these operators compute one scale from the values of all items.
_BATCH_WIDE = ("DynamicQuantizeLSTM", "DynamicQuantizeLinear", "DynamicQuantizeMatMul")


def read_batch_wide_operators(model: ModelSource) -> tuple[str, ...]:
    """Return the names of a model's operators that make items of a batch depend on each other. Never raises."""
    outline = GraphOutline(model)
    try:
        outline.read(_MOST_PARTS)
        names = {os.fsdecode(operator) for operator, _ in outline.operators()}
    except UNREADABLE:
        return ()
    return tuple(sorted(names.intersection(_BATCH_WIDE)))
