"""Refuse nodes that end the process where CUDA's provider is a plugin of an ONNX Runtime that was built without CUDA.

A provider that calls ``Provider_GetHost`` has kernels that call functions of ONNX Runtime. Some of these functions
exist only in an ONNX Runtime with CUDA (cpu_provider_shared.h). Without them the call goes to other memory, and the
process dies of SIGSEGV. The names below come from that header. Concat, Split, Pad, CumSum, ScatterND and BiasGelu are
left out, because their kernels in 1.31.1 do not call these functions. tests/behaviour/test_plugins.py opens and runs
each.
"""

from __future__ import annotations

from collections.abc import Collection

import onnxruntime

from ..environment.libraries.wheel import uses_internals
from ..errors import PlacementError, manual
from ..model.outline import STANDARD, UNREADABLE, GraphOutline, Node
from ..provider.options import recording
from ..provider.placement import Placement
from ..provider.requests import CUDA
from ..provider.runtime import Runtime
from ..running.onnxruntimes import session_on_cpu
from .request import SessionRequest

_WHEN_OPENED = {"If", "Scan"}
_WHEN_RUN = {
    "": {
        "Einsum", "GatherElements", "Loop", "OneHot", "RoiAlign", "Scatter", "ScatterElements", "Size", "Slice", "Tile",
        "Upsample",
    },
    "com.microsoft": {
        "Attention", "BeamSearch", "EmbedLayerNormalization", "FastGelu", "GreedySearch", "LongformerAttention",
        "QAttention", "Sampling", "WhisperBeamSearch",
    },
}  # fmt: skip


def check_before_opening(request: SessionRequest, runtime: Runtime, outline: GraphOutline) -> None:
    """Raise PlacementError if opening the model would end this process."""
    if not _may_end_the_process(runtime):
        return
    try:
        may_remain = any(name.decode() in _WHEN_OPENED and domain in STANDARD for name, domain in outline.operators())
    except UNREADABLE:
        may_remain = True
    remaining = _left_after_optimising(request) if may_remain else ()
    if remaining:
        raise _refusal(remaining, runtime)


def check_before_running(placement: Placement, runtime: Runtime, outline: GraphOutline) -> None:
    """Raise PlacementError if a run of the open session would end this process."""
    if not _may_end_the_process(runtime):
        return
    on_gpu = {(domain, op_type) for op_type, domain in placement.placed_on(CUDA)}
    operators = {name for domain, name in on_gpu if name in _WHEN_RUN.get(domain.replace("ai.onnx", ""), ())}
    if ("", "Resize") in on_gpu and _resizes_to_sizes(outline):
        operators.add("Resize")
    if operators:
        raise _refusal(sorted(operators), runtime)


def _may_end_the_process(runtime: Runtime) -> bool:
    library = runtime.provider_library
    if not runtime.cuda_is_plugin or library is None or onnxruntime.get_device().startswith("GPU"):
        return False
    return uses_internals(library)


def _resizes_to_sizes(outline: GraphOutline) -> bool:
    """Return True if a Resize has sizes, or crops. With scales alone its kernel calls none of the functions."""

    def calls_back(node: Node) -> bool:
        sizes = node.inputs[3:4] not in ([], [b""])
        return sizes or node.attribute(b"coordinate_transformation_mode").text == b"tf_crop_and_resize"

    try:
        graphs = (outline.graph, *outline.functions)
        return any(node.operator == b"Resize" and calls_back(node) for graph in graphs for node in graph.all_nodes())
    except UNREADABLE:
        return True


def _refusal(operators: Collection[str], runtime: Runtime) -> PlacementError:
    return PlacementError(
        f"CUDA as a plugin cannot compute {' and '.join(operators)} here: it would end this process",
        evidence=[
            f"plugin: {runtime.provider_library}",
            f"its kernels call functions that onnxruntime {onnxruntime.__version__} built without CUDA does not have",
        ],
        fixes=[
            manual("install onnxruntime-gpu instead of onnxruntime: it has these functions"),
            manual("or use a plugin that does not call Provider_GetHost, or export the model without these operators"),
        ],
    )


def _left_after_optimising(request: SessionRequest) -> list[str]:
    try:
        opened = session_on_cpu(request.model, recording(request.sess_options))
        nodes = [node for part in opened.get_provider_graph_assignment_info() for node in part.get_nodes()]
    except Exception:  # noqa: BLE001 - ONNX Runtime raises it again, in its own words, before it comes to the plugin
        return []
    return sorted({node.op_type for node in nodes if node.op_type in _WHEN_OPENED})
