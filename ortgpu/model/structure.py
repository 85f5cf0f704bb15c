"""Split a model into its structure and its large weights."""

from __future__ import annotations

from collections.abc import Collection

from .outline import EXTERNAL, GraphOutline, Tensor, read_tensor
from .protobuf import Bytes, Extent, Reader, length_delimited, whole_number

_MOST_READ = 100_000  # fields of large initializers


def with_values_elsewhere(
    data: Bytes, outline: GraphOutline, least: int, data_types: Collection[int]
) -> tuple[bytes, list[Tensor]] | None:
    """Return the model with large initializers of its main graph made external, and these initializers.

    Those are the ones of ``data_types`` with at least ``least`` bytes. The caller must give their values to the
    session. Initializers that no node takes stay: ONNX Runtime leaves them out, and refuses values for them.
    ``outline`` is the outline of ``data``.

    None if they are less than half of the model, one of them is an output, two have the same name, or the model has
    external data already.

    Raises:
        ValueError, IndexError: it is no such message, or has more fields than are read.
    """
    reader = Reader(data, _MOST_READ)
    graph, fields = outline.graph, outline.content.fields
    found: dict[Extent, Tensor] = {}
    for number, _, part in fields.of_graph:
        if number == 5 and part[1] - part[0] >= least:
            tensor = read_tensor(reader, part)
            if tensor.values is not None and tensor.data_type in data_types:
                found[part] = tensor
    names = {tensor.name for tensor in found.values()}
    if len(names) < len(found) or not names.isdisjoint(graph.outputs):
        return None
    taken = {name for node in graph.nodes for name in node.inputs}
    if not taken.issuperset(names):
        taken.update(name for node in graph.all_nodes() for name in node.inputs)
    moved = {part: tensor for part, tensor in found.items() if tensor.name in taken}
    if not moved or 2 * sum(end - start for start, end in moved) < len(data):
        return None  # all that is not moved is copied, several times
    structure = b"".join(
        length_delimited(5, _external(moved[part])) if part in moved else reader.text((start, part[1]))
        for _, start, part in fields.of_graph
    )
    model = b"".join([*map(reader.text, fields.around), length_delimited(7, structure)])
    already = model.count(_LOCATION) > len(moved)
    return None if already else (model, list(moved.values()))


def _external(tensor: Tensor) -> bytes:
    dimensions = b"".join(whole_number(1, size) for size in tensor.shape)
    described = dimensions + whole_number(2, tensor.data_type) + length_delimited(8, tensor.name)
    where = _LOCATION + length_delimited(2, b"elsewhere")
    return described + length_delimited(13, where) + whole_number(14, EXTERNAL)


_LOCATION = length_delimited(1, b"location")  # the key of what tells where external data is, in graphs of any depth
