"""Layouts of images that a measurement tries with a model, and the check of their results.

:mod:`ortgpu.session.chosen.choose` has the narrower choice of a session, which compares no results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.files import is_ort_format
from ...model.outline import MOST_PARTS, Graph, GraphOutline
from ...provider.requests import CUDA
from ...session.chosen.layouts import LAYOUTS

if TYPE_CHECKING:
    from ...provider.placement import Placement

# Relative to the largest value of an output. TF32 and float16 keep 10 bits of the mantissa, and the errors of layers
# add up. Thirty layers stayed below this, compared with float32 on the CPU.
TOLERANCE = 2e-2

_DEFAULTS = {"prefer_nhwc": "0", "fuse_conv_bias": "0"}
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv"})


class DifferentResultsError(ValueError):
    """A layout gives other results than plain ONNX Runtime."""


def layouts_beside(options_chosen: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of the layouts that a session with ``options_chosen`` does not have."""
    had = {name: options_chosen[name][0] for name in _DEFAULTS if name in options_chosen}
    return tuple(name for name, options in LAYOUTS.items() if {**_DEFAULTS, **options} != {**_DEFAULTS, **had})


def has_convolutions(placement: Placement) -> bool:
    """Return True if convolutions are on the GPU, or if the placement was not recorded."""
    if not placement.known:
        return True
    return any(node.op_type in _CONVOLUTIONS and node.provider == CUDA for node in placement.nodes)


def find_weights(model: str) -> tuple[str | None, ...]:
    """Return the element type of the weights of each convolution in a model file.

    A type is named as in onnx ("FLOAT"), or None if the weights are not constant.

    Raises:
        OSError, ValueError, IndexError: the model cannot be read.
    """
    from onnx import TensorProto

    if is_ort_format(model):
        raise ValueError("the model is in ONNX Runtime's own format")
    outline = GraphOutline(model, 10 * MOST_PARTS)
    # Before IR version 4 every initializer is also an input, and none can be overridden.
    fixed = outline.content.ir_version < 4
    found = _weights_in(outline.graph, {}, () if fixed else [value.name for value in outline.graph.inputs])
    for function in outline.functions:  # the weights are inputs of the function, so their types are unknown
        found += _weights_in(function, {})
    return tuple(None if kind is None else TensorProto.DataType.Name(kind) for kind in found)


def why_untried(layout: str, weights: Sequence[str | None]) -> str | None:
    """Return the reason why a channels-last layout fails for convolutions with these weights, or None.

    ONNX Runtime 1.31 converts constant weights to the layout and assumes that others are converted already (PrePack in
    conv.cc and conv_transpose.cc). It has no such convolutions of doubles. For float16 with fused biases, cuDNN 9.19
    has kernels that poison the CUDA context.
    """
    if None in weights:
        return (
            "weights of a convolution are not constant, and ONNX Runtime would take them to be in this layout already"
        )
    if "fuse_conv_bias" in LAYOUTS[layout] and "FLOAT16" in weights:
        return "convolutions of float16 with biases inside ended in an illegal instruction, CUDA error 715"
    others = sorted({str(kind).lower() for kind in weights} - {"float", "float16"})
    return f"weights of a convolution are of the type {' and '.join(others)}" if others else None


def _weights_in(graph: Graph, around: Mapping[bytes, int], overridable: Sequence[bytes] = ()) -> list[int | None]:
    own = {tensor.name: tensor.data_type for tensor in graph.initializers}
    constants = {name: kind for name, kind in {**around, **own}.items() if name not in overridable}
    found: list[int | None] = []
    for node in graph.nodes:
        if os.fsdecode(node.operator) in _CONVOLUTIONS:
            found.append(constants.get(node.inputs[1]))
        elif node.operator == b"Constant":
            constants[node.outputs[0]] = next((each.data_type for each in node.attribute(b"value").tensors), 0)
        for graph in node.graphs:
            found += _weights_in(graph, constants)
    return found


def check_results(names: Sequence[str], expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Raise DifferentResultsError unless floats agree within TOLERANCE and all else is equal."""
    for name, right, other in zip(names, expected, found, strict=True):
        difference = _difference(right, other)
        if difference:
            raise DifferentResultsError(f"output {name!r} {difference}")


def _difference(right: Any, other: Any) -> str | None:
    if not isinstance(right, np.ndarray) or not isinstance(other, np.ndarray):
        return "is no tensor, and is not compared"
    if (right.shape, right.dtype) != (other.shape, other.dtype):
        return f"has shape {other.shape} and type {other.dtype}, not {right.shape} and {right.dtype}"
    if right.dtype.kind != "f":
        different = int(np.count_nonzero(right != other))
        return f"differs from that of plain run in {different} of {right.size} values" if different else None
    finite = np.isfinite(right)
    if not np.array_equal(right[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return "has infinities or NaN where that of plain run has others, or none"
    wide = np.promote_types(right.dtype, np.float32)  # the difference of two float16 can be too large for one
    right, other = right[finite].astype(wide), other[finite].astype(wide)
    largest = np.max(np.abs(right), initial=0)
    error = np.max(np.abs(right - other), initial=0)
    if error <= TOLERANCE * largest:
        return None
    return f"differs from that of plain run by {error:.3g}, and its largest value is {largest:.3g}"
