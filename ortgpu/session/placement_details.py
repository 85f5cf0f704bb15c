"""Why each node of a model is where it is, and where ONNX Runtime copies between devices.

A session knows the provider of each node. The reasons and the copies are only in ONNX Runtime's verbose log and in the
optimised graph that it can write, so a child process opens the model once more with both switched on.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..environment.child import run_python
from ..errors import ExecutionError, GPUError
from ..model.contents import text_of
from ..model.structure import write_temporary
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

Direction = Literal["to CPU", "to GPU"]

# The words of 1.24 to 1.31: cuda_execution_provider.cc, fallback_cpu_capability.cc, transformer_memcpy.cc.
_NO_KERNEL = re.compile(
    r"CUDA kernel not (?:found in registries|supported\. Fallback to CPU execution provider) "
    r"for Op type: (\S*) node name: (.*?)\s*$",
    re.MULTILINE,
)
_PREFERRED = re.compile(r"Force fallback to CPU execution for node: (.*?) because")
_MODEL = "model"  # the file for one that was given as bytes
_COPIES = {"MemcpyToHost": "to CPU", "MemcpyFromHost": "to GPU"}


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of the optimised main graph, in an order in which they can run. Copies are nodes of their own."""

    name: str
    op_type: str
    domain: str
    provider: str | None  # None: ONNX Runtime gave the node no name to find it by
    kind: NodeKind | None
    reason: str | None  # why it is not on the GPU
    copy: Direction | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacementDetails:
    """``nodes``: of the main graph. ``placed``: every node, those of subgraphs too, each with its reason or None."""

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
        """A table of what is not on the GPU, and the number of copies."""
        on_gpu = len(self.placed) - len(self.off_gpu)
        head = f"{len(self.placed)} nodes, {on_gpu} on the GPU, {self.copies} copies between devices"
        if not self.off_gpu:
            return head
        rows = [(str(node), node.kind, reason or "not known") for node, reason in self.off_gpu]
        return head + "\n" + format_table([("on the CPU", "kind", "reason"), *rows])

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "copies": self.copies,
            "on_cpu": [{**asdict(node), "reason": reason} for node, reason in self.off_gpu],
            "graph": [asdict(node) for node in self.nodes],
        }


def explain_placement(
    model: str | bytes | os.PathLike[str], *, device: int | str | None = None, timeout: float = 300.0
) -> PlacementDetails:
    """Open ``model`` on the GPU in a child process and read why its nodes are where they are.

    Costs as much time and GPU memory as a session. Needs ONNX Runtime 1.24, whose recording names every node. The
    optimised model, and a model that is given as bytes, are written to a temporary folder that no other user can read,
    and removed with it.

    Raises:
        PlacementError: where nodes are placed was not recorded.
        GPUError: the model cannot be opened on the GPU; of the class that GPUSession raises, where it is about the GPU.
        TimeoutError: it took more than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ortgpu-placement-") as folder:
        path = None if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))
        if isinstance(model, bytes):
            write_temporary(os.path.join(folder, _MODEL), model)
        request = json.dumps({"model": path, "device": device, "folder": folder})
        ended = run_python(_CHILD, request, timeout=timeout)
        if ended.timed_out:
            raise TimeoutError(f"opening the model took more than {timeout:.0f} s")
        if ended.returncode is None:
            summary = "the child process that opens the model cannot be started"
            raise ExecutionError(summary, evidence=[ended.errors])
        log = ended.errors
        graph = os.path.join(folder, "graph.json")
        # In a process that ignores SIGCHLD, or in which somebody else waits for every child, each has ended with 0
        if not ended.ok or not os.path.exists(graph):
            raise _failure(folder, log)
        with open(graph, encoding="utf-8") as file:
            found = json.load(file)
    name = "<bytes>" if isinstance(model, bytes) else os.fsdecode(model)
    placed = [PlacedNode(**node) for node in found["placed"]]
    return details_from(name, log, placed, found["graph"], on_gpu=found["on_gpu"])


def details_from(
    model: str, log: str, placed: list[PlacedNode], graph: list[Mapping[str, Any]], *, on_gpu: bool = True
) -> PlacementDetails:
    """Join what log, recording and optimised graph say. ``graph``: name, op_type, domain, inputs and outputs each;
    ``on_gpu``: of the session, which ORTGPU_ALLOW_CPU lets onto the CPU."""
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

    def of_graph(entry: Mapping[str, Any]) -> GraphNode:
        copy: Any = _COPIES.get(entry["op_type"])
        known = by_name.get((entry["op_type"], entry["name"]))
        only = by_type.get(entry["op_type"], set())
        provider = known.provider if known is not None else next(iter(only)) if len(only) == 1 else None
        return GraphNode(
            entry["name"],
            entry["op_type"],
            entry["domain"],
            CUDA if copy else provider,
            known.kind if known is not None else None,
            reason_of(known) if known is not None else None,
            copy,
            tuple(entry["inputs"]),
            tuple(entry["outputs"]),
        )

    return PlacementDetails(model, tuple(map(of_graph, graph)), tuple((node, reason_of(node)) for node in placed))


def _failure(folder: str, log: str) -> GPUError:
    import pickle

    try:
        with open(os.path.join(folder, "error.pickle"), "rb") as file:
            error = pickle.load(file)  # noqa: S301 - written by our own child into a folder of our own
    except (OSError, pickle.PickleError, EOFError, ImportError):
        error = None
    return (
        error
        if isinstance(error, GPUError)
        else GPUError(
            "the model could not be opened in the child process that looks at its placement",
            evidence=[line for line in log.strip().splitlines() if line.strip()][-6:],
        )
    )


_CHILD = """
import json
from ortgpu import GPUSession  # first: it loads what onnxruntime links, where that links CUDA
from ortgpu.session.placement_details import child
child(GPUSession, json.loads(sys.argv[1]))
"""


def child(open_session: Callable[..., Any], request: Mapping[str, Any]) -> None:
    """What the child process does: its stderr is the log, its result a file."""
    import pickle
    import warnings

    import onnxruntime

    os.umask(0o077)  # the optimised model has the weights
    warnings.simplefilter("ignore")  # of nodes on the CPU: that is what is being asked
    model = request["model"]
    if model is None:
        with open(os.path.join(request["folder"], _MODEL), "rb") as file:
            model = file.read()  # and not its path: external data and the format are looked for in other ways
    optimised = os.path.join(request["folder"], "optimised.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 0
    options.optimized_model_filepath = optimised
    try:
        session = open_session(model, options, device=request["device"], cpu_nodes="allow")
        if not session.placement.known:
            raise not_recorded("ONNX Runtime did not record where the nodes of this model are placed")
    except GPUError as error:
        with open(os.path.join(request["folder"], "error.pickle"), "wb") as file:
            pickle.dump(error, file)
        raise
    import onnx

    graph = onnx.load(optimised, load_external_data=False).graph
    nodes = [
        {
            "name": text_of(node.name),
            "op_type": node.op_type,
            "domain": node.domain,
            "inputs": [text_of(name) for name in node.input if name],
            "outputs": [text_of(name) for name in node.output if name],
        }
        for node in graph.node
    ]
    placed = [asdict(node) for node in session.placement.nodes]
    with open(os.path.join(request["folder"], "graph.json"), "w", encoding="utf-8") as file:
        json.dump({"graph": nodes, "placed": placed, "on_gpu": session.device.is_gpu}, file)
