"""What a model file holds, read with onnx. Only for diagnoses: a healthy session never comes here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def operators_of(model: str | bytes | os.PathLike[str]) -> frozenset[tuple[str, str]]:
    """Operator and domain of every node, those of subgraphs and functions included; empty if it is no ONNX model."""
    try:
        import onnx

        proto = (
            onnx.load_from_string(model)
            if isinstance(model, bytes)
            else onnx.load(os.fspath(model), load_external_data=False)
        )
        graphs = [proto.graph.node, *(function.node for function in proto.functions)]
        return frozenset(found for nodes in graphs for found in _walk(nodes))
    except Exception:  # noqa: BLE001 - protobuf's DecodeError, OSError, a missing onnx: whatever it is, the operators are not known
        return frozenset()


def _walk(nodes: Any) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.op_type, node.domain
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _walk(graph.node)
