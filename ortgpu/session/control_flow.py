"""Refuse models whose control flow ends the process where CUDA is a plugin.

Measured with ONNX Runtime's provider of 1.31.1, registered as a plugin, on the 1,884 models of ONNX's node tests: each
model with an If or a Scan that is left after optimising dies of SIGSEGV while the session is made; Loop works. The
provider built in opens them all.
"""

from __future__ import annotations

import os

from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..environment.libraries.wheel import uses_internals
from ..errors import PlacementError, manual
from ..model.outline import STANDARD, UNREADABLE, GraphOutline
from ..provider.options import recording
from ..provider.requests import CPU
from ..provider.runtime import Runtime
from .request import SessionRequest

_DEADLY = (b"If", b"Scan")


def refuse_deadly_control_flow(request: SessionRequest, runtime: Runtime, outline: GraphOutline) -> None:
    """Raise PlacementError if the plugin in use would end this process for a node of the model.

    A model that is about to be refused is optimised on the CPU first, since a constant condition leaves no node.
    """
    arrival = runtime.arrival
    if arrival is None or not arrival.is_plugin:
        return
    try:
        held = any(name in _DEADLY and domain in STANDARD for name, domain in outline.operators())
    except UNREADABLE:
        held = True
    if not held or not uses_internals(arrival.library):
        return
    left = _left_after_optimising(request)
    if left:
        raise PlacementError(
            f"CUDA as a plugin cannot hold {' and '.join(left)}: opening this model would end the process",
            evidence=[f"plugin: {arrival.library}", "the provider built into onnxruntime-gpu opens such models"],
            fixes=[
                manual("use onnxruntime-gpu, or the CPU package with a plugin that does not call Provider_GetHost"),
                manual(
                    "or export the model without these operators, with torch.where instead of a branch for instance"
                ),
            ],
        )


def _left_after_optimising(request: SessionRequest) -> list[str]:
    in_file = not isinstance(request.model, bytes)
    model = os.fspath(request.model) if in_file else request.model
    with recording(request.sess_options) as options:
        try:
            opened = native.InferenceSession(options, model, in_file, False)
            opened.initialize_session([CPU], [{}], set())
            nodes = [node for part in opened.get_provider_graph_assignment_info() for node in part.get_nodes()]
        except Exception:  # noqa: BLE001 - ONNX Runtime raises it again, in its own words, before it comes to the plugin
            return []
    return sorted({node.op_type for node in nodes if node.op_type.encode() in _DEADLY})
