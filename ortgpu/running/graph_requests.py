"""Requests for sessions that capture CUDA graphs, and the checks of models and sessions that cannot be captured.

:mod:`ortgpu.running.cuda_graph` runs the captured sessions.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from ..diagnosis.messages import runtime_words as messages
from ..errors import GPUError, PlacementError, ProviderRequestError, manual
from ..model.contents import describe_model, read_model
from ..model.outline import GraphOutline
from ..model.tensor_types import DTYPES
from ..provider.lifetime import device_of
from ..provider.requests import CUDA
from . import arena
from .cuda_graph import LEAVE_OUT, CapturedRunner, CapturingSession
from .cudart import CudaCallError, Stream, runtime_of, runtime_on
from .memory import holdings_of
from .pinned import memory_of

if TYPE_CHECKING:
    from ..provider.interfaces import VerifiedSession
    from ..provider.placement import Placement
    from .plain_runs import RunningSession

logger = logging.getLogger("ortgpu")

# The kernels of these operators read a count from the GPU. A capture computes nothing, so the count is random, and a
# replay writes to memory where the count was once kept (nonzero_op.cc, compress.cc).
_COUNTING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
_REFUSAL = re.compile(r"cannot use the (?:CUDA Graph|graph capture) feature", re.IGNORECASE)


def own_stream(ordinal: int) -> Stream | None:
    """Return a new stream on a GPU, for all work of a session.

    Copies in the same stream need no wait before or after a run. None if no stream can be made: ONNX Runtime then
    reports the GPU's problem, or :func:`captured` refuses the session.
    """
    runtime = runtime_on(ordinal)
    if runtime is None:
        return None
    try:
        return Stream(runtime)
    except CudaCallError as error:
        logger.debug("no stream can be made: %s", error)
        return None


def is_refusal(cause: BaseException) -> bool:
    """Return True if ONNX Runtime refused a model because it cannot be captured."""
    return _REFUSAL.search(str(cause)) is not None


def why_not_captured(cause: BaseException, placement: Placement, outline: GraphOutline) -> GPUError:
    """Return the error for such a refusal."""
    summary = "this model cannot be captured as a CUDA graph: "
    if "control flow" in str(cause):
        operators = sorted({"If", "Loop", "Scan"} & {name for name, _ in describe_model(outline).operators})
        return ProviderRequestError(
            summary + "it has control flow" + (f", {', '.join(operators)}" if operators else ""),
            evidence=[messages.telling_line(str(cause))],
            fixes=[LEAVE_OUT],
        )
    nodes = placement.cpu_compute_nodes or tuple(node for node in placement.nodes if node.provider != CUDA)
    return PlacementError(
        summary + "nodes of it are on the CPU, with copies in between",
        evidence=[*(f"{node}: {node.reason}" for node in nodes[:12]), messages.telling_line(str(cause))],
        fixes=[LEAVE_OUT, manual("or export the model with operators that have CUDA kernels")],
        nodes=nodes,
    )


def captured(session: RunningSession) -> CapturedRunner:
    """Replace the C++ session of ``session`` and return the runner. ``session`` was opened with capturing enabled.

    Raises:
        ProviderRequestError: inputs, outputs or operators cannot be captured, or this process lacks cudart.
    """
    reason = obstacle(session)
    runtime, stream = runtime_of(device_of(session)), session._stream
    if reason is not None or runtime is None or stream is None:
        raise ProviderRequestError(
            "this session cannot be captured as a CUDA graph",
            evidence=[reason or "no stream could be made on the GPU"],
            fixes=[LEAVE_OUT],
            requested="cuda_graph",
        )
    device, limit, holdings = device_of(session), arena.limit_of(session), holdings_of(session)
    graphs = CapturingSession(session._sess, runtime, device, stream, memory_of(session), limit, holdings.room)
    session._stream = None  # the C++ session keeps it alive from now on
    session._sess = graphs
    holdings.add("graphs", graphs)
    return CapturedRunner(session, graphs)


def obstacle(session: VerifiedSession) -> str | None:
    """Return why an open session cannot be captured, whatever its model computes. None: nothing is in the way."""
    inner, device = session._sess, device_of(session)
    if runtime_of(device) is None:
        return "the provider's CUDA runtime is not among the libraries of this process"
    if not hasattr(inner, "input_meminfos"):
        return "the installed ONNX Runtime does not tell where inputs must be; 1.23 and newer do"
    for value, memory in zip(inner.inputs_meta, inner.input_meminfos, strict=True):
        if memory.name.lower() != device.kind:
            return f"its input {value.name!r} is read on the CPU, or by no node: no graph takes it"
    if handed_on := {value.name for value in inner.inputs_meta} & {value.name for value in inner.outputs_meta}:
        # execution_frame.cc copies it before the run. A replay does not repeat that copy.
        return f"its output {min(handed_on)!r} is its input, which no node computes"
    for value in (*inner.inputs_meta, *inner.outputs_meta):
        if value.type not in DTYPES:
            return f"{value.name!r} is a {value.type}"
    operators = _operators_of(session)
    if operators is None:
        return "its operators are not known, and some give wrong results when they are replayed"
    if counting := operators & _COUNTING:
        return f"output shapes depend on data: of {', '.join(sorted(counting))}"
    if all(memory.name.lower() != device.kind for memory in inner.output_meminfos):
        return "all its outputs are computed on the CPU"
    return None


def _operators_of(session: VerifiedSession) -> frozenset[str] | None:
    placement = session._verified.placement
    if placement.known:
        return frozenset(node.op_type for node in placement.nodes)
    facts = read_model(session._request.model)
    # The operators of a model in ONNX Runtime's own format are not known.
    return frozenset(name for name, _ in facts.operators) if facts.operators else None
