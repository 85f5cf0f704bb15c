"""The reasons for the placement of each node, and the copies that ONNX Runtime inserts between devices.

A session knows the provider of each node. The reasons and copies appear only in ONNX Runtime's verbose log and in the
optimised graph that it can write. So a child process opens the model again with both enabled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..environment.child_process import ChildFailedError, ChildProcess
from ..errors import GPUError, counted
from ..model.files import ModelSource, source_of
from ..model.outline import GraphOutline, Node
from ..process.late import late
from ..process.temporary import private_folder
from ..provider.devices import is_cpu
from ..provider.placement import (
    ALL_ON_CPU,
    FOLLOWS,
    NO_KERNEL,
    PREFERRED,
    NodeKind,
    PlacedNode,
    format_table,
    not_recorded,
)
from ..provider.requests import CPU, CUDA

if TYPE_CHECKING:
    import onnxruntime

    from ..running import onnxruntimes
else:
    onnxruntimes = late("ortgpu.running.onnxruntimes")
    onnxruntime = late("onnxruntime")

# The log messages of 1.24 to 1.31: cuda_execution_provider.cc, fallback_cpu_capability.cc, transformer_memcpy.cc.
_NO_KERNEL = re.compile(
    r"CUDA kernel not (?:found in registries|supported\. Fallback to CPU execution provider) "
    r"for Op type: (\S*) node name: (.*?)\s*$",
    re.MULTILINE,
)
_PREFERRED = re.compile(r"Force fallback to CPU execution for node: (.*?) because")
_TIMEOUT = 300.0  # seconds
_MOST_PARTS = 1_000_000  # nodes and initializers of the optimised model
_COPIES = {"MemcpyToHost": "to CPU", "MemcpyFromHost": "to GPU"}


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of the optimised main graph. A copy between devices is a node too."""

    name: str
    op_type: str
    domain: str
    provider: str | None  # None: unknown, since the node has no name
    kind: NodeKind | None
    reason: str | None  # why it is not on the GPU
    copy: Literal["to CPU", "to GPU"] | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacementDetails:
    """The placement of a model, with reasons.

    ``nodes`` are the nodes of the main graph, in an order that can run. ``placed`` has every node, also of subgraphs,
    with the reason why it is not on the GPU, or None.
    """

    model: str
    nodes: tuple[GraphNode, ...]
    placed: tuple[tuple[PlacedNode, str | None], ...]

    @property
    def copies(self) -> int:
        return sum(node.copy is not None for node in self.nodes)

    @property
    def off_gpu(self) -> tuple[tuple[PlacedNode, str | None], ...]:
        return tuple(entry for entry in self.placed if entry[0].provider == CPU)

    def __str__(self) -> str:
        """Return a table of the nodes that are not on the GPU, and the number of copies."""
        on_gpu = len(self.placed) - len(self.off_gpu)
        copies = "1 copy" if self.copies == 1 else f"{self.copies} copies"
        head = f"{counted(len(self.placed), 'node')}, {on_gpu} on the GPU, {copies} between devices"
        if not self.off_gpu:
            return head
        rows = [(str(node), node.kind, reason or "unknown") for node, reason in self.off_gpu]
        return head + "\n" + format_table([("on the CPU", "kind", "reason"), *rows])

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "copies": self.copies,
            "on_cpu": [{**asdict(node), "reason": reason} for node, reason in self.off_gpu],
            "graph": [asdict(node) for node in self.nodes],
        }


def explain_placement(model: ModelSource, *, device: int | str | None = None) -> PlacementDetails:
    """Open ``model`` on a GPU, or on the device "cpu", in a child process and read why its nodes are where they are.

    This takes as much time and GPU memory as a session. It needs ONNX Runtime 1.24 or newer, because older releases do
    not record every node. The optimised model is written to a temporary folder that no other user can read, and removed
    afterwards. The module of GPUSession must have been imported.

    Raises:
        PlacementError: ONNX Runtime did not record the placement.
        GPUError: the model cannot be opened on the GPU, with the error class that GPUSession would raise.
        TimeoutError: it took more than five minutes.
    """
    source = source_of(model)
    with private_folder("ortgpu-placement-") as folder, ChildProcess(keeps_output=True) as child:
        optimised = os.path.join(folder, "optimised.onnx")
        try:
            placed, on_gpu = child.ask(
                open_and_record, onnxruntimes.gpu_session_class(), source, device, optimised, timeout=_TIMEOUT
            )
        except GPUError:
            raise
        except Exception as error:
            if isinstance(error, ChildFailedError) and error.timed_out:
                raise TimeoutError(f"opening the model took more than {_TIMEOUT:.0f} s") from None
            raise GPUError(
                "the model could not be opened in the child process that looks at its placement",
                evidence=[f"{type(error).__name__}: {error}"],
            ) from error
        child.kill()  # The child has written all of its log.
        nodes = list(GraphOutline(optimised).read(_MOST_PARTS).graph.nodes)
        log = child.output().decode("utf-8", "replace")
    name = "<bytes>" if isinstance(model, bytes) else os.fsdecode(model)
    return details_from(name, log, placed, nodes, on_gpu=on_gpu)


def open_and_record(
    session_class: type[Any], model: ModelSource, device: int | str | None, optimised: str
) -> tuple[list[PlacedNode], bool]:
    """Open a model with a verbose log, and write the optimised model. A child process calls this.

    Return the nodes, and False if the session is on the CPU.

    Raises:
        GPUError: the model does not open, or ONNX Runtime did not record its placement.
    """
    os.umask(0o077)  # The optimised model contains the weights.
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 0
    options.optimized_model_filepath = optimised
    allow_cpu = True if is_cpu(device) else None  # The caller's session was allowed to be on the CPU.
    session = session_class(model, options, device=device, cpu_nodes="allow", allow_cpu=allow_cpu)
    if not session.placement.known:
        raise not_recorded("ONNX Runtime did not record where the nodes of this model are placed")
    return list(session.placement.nodes), session.device.is_gpu


def details_from(
    model: str, log: str, placed: list[PlacedNode], graph: Iterable[Node], *, on_gpu: bool = True
) -> PlacementDetails:
    """Combine log, placement and optimised graph. ``on_gpu`` False: ORTGPU_ALLOW_CPU let the session run on the CPU."""
    log = re.sub(r"\x1b\[[0-9;]*m", "", log)
    without_kernel = set(_NO_KERNEL.findall(log))
    preferred = set(_PREFERRED.findall(log)) - {""}
    by_name = {(node.op_type, node.name): node for node in placed}
    by_type: dict[str, set[str]] = {}
    for node in placed:
        by_type.setdefault(node.op_type, set()).add(node.provider)

    def reason_of(node: PlacedNode) -> str | None:
        if node.provider != CPU:
            return None
        if not on_gpu:
            return ALL_ON_CPU
        if (node.op_type, node.name) in without_kernel:
            return NO_KERNEL
        if node.name in preferred:
            return PREFERRED if node.kind == "shape" else FOLLOWS
        return node.reason

    def graph_node(node: Node) -> GraphNode:
        name, op_type = os.fsdecode(node.name), os.fsdecode(node.operator)
        copy: Any = _COPIES.get(op_type)
        placed_node = by_name.get((op_type, name))
        only = by_type.get(op_type, set())
        provider = placed_node.provider if placed_node is not None else next(iter(only)) if len(only) == 1 else None
        return GraphNode(
            name,
            op_type,
            os.fsdecode(node.domain),
            CUDA if copy else provider,
            placed_node.kind if placed_node is not None else None,
            reason_of(placed_node) if placed_node is not None else None,
            copy,
            tuple(os.fsdecode(value) for value in node.inputs if value),
            tuple(os.fsdecode(value) for value in node.outputs if value),
        )

    return PlacementDetails(model, tuple(map(graph_node, graph)), tuple((node, reason_of(node)) for node in placed))
