"""The placement of a model: the provider that runs each node."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from ..errors import Fix, PlacementError, counted, escape_controls, manual
from ..model.data_flow import Key, Places, computing_nodes
from ..model.files import is_ort_format
from ..model.outline import UNREADABLE, GraphOutline
from .interfaces import AssignedNodes, NativeSession, Node, Opened
from .options import RECORDING_KEY, config_entry
from .requests import CPU, CUDA
from .runtime import load_runtime

NO_KERNEL = "no CUDA kernel for this operator with these types, attributes and this opset"
NO_KERNEL_OR_BESIDE = f"{NO_KERNEL}, or it takes a shape beside an input of the model, and ONNX Runtime prefers the CPU"
ALL_ON_CPU = "the whole session is on the CPU"
PREFERRED = "ONNX Runtime prefers the CPU here: it only handles shapes"
FOLLOWS = "ONNX Runtime prefers the CPU here: what it takes is there already"

# These entries of the session options divide a model between devices, by its metadata or the names of its nodes.
_DIVIDING_KEYS = (
    "session.layer_assignment_settings",
    "session.name_based_layer_assignment",
    "session.resource_cuda_partitioning_settings",
)

NodeKind = Literal["compute", "shape"]

# A node of these operators on the CPU mostly handles shapes or indices of a few elements: ONNX Runtime moves such nodes
# there itself (GetCpuPreferredNodes in fallback_cpu_capability.cc). All these operators have CUDA kernels, but not
# for all types, and not for the newest version in each release. The inputs of a node decide (data_flow.py).
_SHAPE_OPERATORS = frozenset(
    name
    for line in (
        "Shape Size Gather Unsqueeze Squeeze Concat Slice Cast Reshape Range ConstantOfShape Constant Identity Flatten",
        "Add Sub Mul Div Mod Neg Abs Min Max Pow Sqrt Exp Log Reciprocal Floor Ceil Round Sign Sum Clip",
        "Equal Less Greater LessOrEqual GreaterOrEqual Not And Or Xor Where Expand Tile Split Transpose",
        "ReduceProd ReduceMax ReduceMin ReduceSum NonZero ScatterND ScatterElements If Loop",
    )
    for name in line.split(" ")
)
_TAKING_NO_DATA = frozenset(("Shape", "Size", "If", "Loop"))  # The nodes in their graphs may take data.


class CPUNodesWarning(UserWarning):
    """Some compute nodes of a model run on the CPU; see ``cpu_nodes`` of GPUSession."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node as ONNX Runtime placed it, after its optimisations: names may be its own, or empty.

    ``domain`` is "" for ONNX's own operators. ``provider`` is a name such as "CUDAExecutionProvider". ``kind`` is
    "shape" if the node handles shapes or indices of a few elements, and else "compute".
    """

    name: str
    op_type: str
    domain: str
    provider: str
    kind: NodeKind
    divided_by: str | None = None  # the entry of the session options that may have put the node on the CPU

    @property
    def reason(self) -> str | None:
        """The reason why the node of a session on the GPU is on the CPU; None for a node on the GPU.

        Nearly always a compute node on the CPU has no CUDA kernel for its operator, types, attributes and opset. Few
        have another cause. A node may take a shape beside an input of the model, or follow a node without a kernel that
        takes a shape; GPUSession.explain_placement() tells both. And session options may divide the model between
        devices.
        """
        if self.provider != CPU:
            return None
        if self.divided_by is not None:
            return f"the model asks for it with {self.divided_by}, or there is no CUDA kernel"
        if self.kind == "shape":
            return PREFERRED
        return NO_KERNEL_OR_BESIDE if kind_of(self.op_type, self.domain, CPU) == "shape" else NO_KERNEL

    def __str__(self) -> str:
        domain = f"{self.domain}:" if self.domain not in ("", "ai.onnx") else ""
        return f"{domain}{self.op_type}" + (f" {self.name!r}" if self.name else "")


class _Recorded(NamedTuple):
    """A copy of ONNX Runtime's record of a placement. Its own objects would keep their session alive."""

    rows: tuple[tuple[str, str, str, str], ...]  # name, operator, domain and provider of each node
    computing: frozenset[Key]  # compute nodes on the CPU
    divided_by: str | None

    def nodes(self, provider: str | None = None) -> tuple[PlacedNode, ...]:
        return tuple(
            PlacedNode(name, op_type, domain, CPU, "compute", self.divided_by)
            if place == CPU and (op_type, name) in self.computing
            else PlacedNode(name, op_type, domain, place, kind_of(op_type, domain, place))
            for name, op_type, domain, place in self.rows
            if provider in (None, place)
        )


@dataclass(frozen=True)
class Placement:
    """All nodes of a session, each with its provider.

    With ``known`` False the placement was not recorded, and ``nodes`` is empty. Releases before 1.24 cannot record it.
    No release records it for models in ONNX Runtime's own format (.ort: ``in_own_format``), and an entry of the session
    options can forbid it. With ``is_whole`` False nodes may be missing: releases before 1.27 record no node without a
    kernel in any provider. Such nodes, for instance some on 16-bit floats, run on the CPU in float32.

    The nodes are nodes of the optimised graph, so a fusion counts once and folded constants do not count. ONNX Runtime
    inserts copies between devices afterwards, so ``nodes`` has none: GPUSession.explain_placement() finds them.
    """

    nodes: tuple[PlacedNode, ...]
    known: bool = True
    in_own_format: bool = False
    is_whole: bool = True

    @classmethod
    def parse_record(cls, recorded: _Recorded, *, is_whole: bool) -> Placement:
        """Return the placement of a session. The first use of ``nodes`` makes them: 2,000 nodes take 5 ms."""
        placement = cls((), is_whole=is_whole)
        vars(placement)["_recorded"] = recorded
        del vars(placement)["nodes"]
        return placement

    def __getattr__(self, name: str) -> Any:
        if name != "nodes" or "_recorded" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        nodes = vars(self)["nodes"] = vars(self)["_recorded"].nodes()
        return nodes

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def nodes_on(self, provider: str) -> tuple[PlacedNode, ...]:
        recorded: _Recorded | None = vars(self).get("_recorded")
        if recorded is not None and "nodes" not in vars(self):
            return recorded.nodes(provider)
        return tuple(node for node in self.nodes if node.provider == provider)

    def placed_on(self, provider: str) -> frozenset[tuple[str, str]]:
        recorded: _Recorded | None = vars(self).get("_recorded")
        if recorded is not None:
            return frozenset((op_type, domain) for _, op_type, domain, place in recorded.rows if place == provider)
        return frozenset((node.op_type, node.domain) for node in self.nodes if node.provider == provider)

    @property
    def by_provider(self) -> dict[str, int]:
        return dict(Counter(node.provider for node in self.nodes))

    @property
    def cpu_compute_nodes(self) -> tuple[PlacedNode, ...]:
        """The nodes for which ``cpu_nodes`` of GPUSession warns or raises. Empty if the placement is not ``known``."""
        return tuple(node for node in self.nodes_on(CPU) if node.kind == "compute")

    def operators_on(self, provider: str) -> dict[str, int]:
        return dict(Counter(node.op_type for node in self.nodes if node.provider == provider))

    def rows(self) -> list[tuple[str, str, str, int]]:
        """Return rows of provider, kind, operator and count, the most frequent first within a provider."""
        counts = Counter((node.provider, node.kind, node.op_type) for node in self.nodes)
        order = {provider: index for index, provider in enumerate(self.by_provider)}
        return [
            (p, k, op, n)
            for (p, k, op), n in sorted(counts.items(), key=lambda item: (order[item[0][0]], -item[1], item[0]))
        ]

    def __str__(self) -> str:
        if not self.known:
            return "placement unknown: ONNX Runtime did not record it"
        return format_table(
            [("provider", "kind", "operator", "nodes"), *((p, k, op, str(n)) for p, k, op, n in self.rows())]
        )


UNKNOWN = Placement((), known=False)
_RECORDS_ALL = (1, 27)  # the first release of ONNX Runtime that records all nodes
_SHORT_FLOATS = (10, 16)  # FLOAT16 and BFLOAT16 of TensorProto.DataType


def read_placement(session: Opened, outline: GraphOutline | None = None, *, without_options: bool = False) -> Placement:
    """Return the placement that ``session`` recorded when it opened. ``outline`` is the model's outline, if it exists.

    ``without_options``: the caller passed no SessionOptions. This saves a query that takes 50 µs.
    """
    rows: tuple[tuple[str, str, str, str], ...] | None = None
    try:
        # This calls no method of the session: a subclass may override methods.
        assigned: Sequence[AssignedNodes] = session._sess.get_provider_graph_assignment_info()
        rows = tuple(
            (_name_of(node), node.op_type, node.domain, part.ep_name) for part in assigned for node in part.get_nodes()
        )
    except (AttributeError, RuntimeError, TypeError):
        pass
    except Exception as error:  # ONNX Runtime's error for missing records derives from Exception directly.
        if not type(error).__module__.startswith("onnxruntime"):
            raise
    if not rows and _is_of_ort_format(session, without_options=without_options):
        return replace(UNKNOWN, in_own_format=True)
    if rows is None:
        return UNKNOWN
    is_whole = load_runtime().release >= _RECORDS_ALL or not _has_short_floats(session, outline)
    if not any(provider == CPU for *_, provider in rows):
        return Placement.parse_record(_Recorded(rows, frozenset(), None), is_whole=is_whole)
    options = None if without_options else getattr(session, "_sess_options", None)
    divided_by = next((key for key in _DIVIDING_KEYS if options is not None and config_entry(options, key)), None)
    computing = {
        (op_type, name)
        for name, op_type, domain, provider in rows
        if provider == CPU and kind_of(op_type, domain, provider) == "compute"
    }
    computing |= _computing_nodes(session, outline, rows)
    return Placement.parse_record(_Recorded(rows, frozenset(computing), divided_by), is_whole=is_whole)


def _name_of(node: Node) -> str:
    try:
        return node.name
    except UnicodeDecodeError:  # ONNX Runtime accepts such a name, but its bindings cannot decode it.
        return ""


def _has_short_floats(session: Opened, outline: GraphOutline | None) -> bool:
    """Return True if a model has float16 or bfloat16, or cannot be read."""
    inner: NativeSession = session._sess
    if any(value.type.endswith("float16)") for value in (*inner.inputs_meta, *inner.outputs_meta)):
        return True
    outline = outline or GraphOutline(_model_of(session) or b"")
    try:
        graph = outline.graph
        return any(tensor.data_type in _SHORT_FLOATS for tensor in graph.initializers) or any(
            node.attribute(b"to").integer in _SHORT_FLOATS for node in graph.all_nodes() if node.operator == b"Cast"
        )
    except UNREADABLE:
        return True


def _computing_nodes(
    session: Opened, outline: GraphOutline | None, rows: Iterable[tuple[str, str, str, str]]
) -> frozenset[Key]:
    """Return the nodes on the CPU that compute on data, although their operators could handle shapes."""
    inner: NativeSession = session._sess
    if tuple(inner.get_providers()) == (CPU,) and not any(
        "string" in value.type for value in (*inner.inputs_meta, *inner.outputs_meta)
    ):
        return frozenset()
    doubtful, elsewhere = Counter[Key](), Counter[Key]()
    for name, op_type, domain, provider in rows:
        is_doubtful = (
            provider == CPU and op_type not in _TAKING_NO_DATA and kind_of(op_type, domain, provider) == "shape"
        )
        (doubtful if is_doubtful else elsewhere)[op_type, name] += 1
    if not doubtful:
        return frozenset()
    placed = {key: Places(doubtful[key], elsewhere[key]) for key in (*elsewhere, *doubtful)}
    if outline is None or not outline.is_current:
        model = _model_of(session)
        if not model:
            return frozenset()
        outline = GraphOutline(model)
    return computing_nodes(outline, (value.name for value in inner.inputs_meta), placed)


def _is_of_ort_format(session: Opened, *, without_options: bool) -> bool:
    """Return True for a model in ONNX Runtime's own format. For such models it records no placement."""
    options = None if without_options else getattr(session, "_sess_options", None)
    load_format = config_entry(options, "session.load_model_format") if options is not None else None
    model = _model_of(session)
    return load_format == "ORT" if load_format else model is not None and is_ort_format(model)


def _model_of(session: Opened) -> str | bytes | None:
    path = getattr(session, "_model_path", None)
    return os.fsdecode(path) if path else getattr(session, "_model_bytes", None)


def kind_of(op_type: str, domain: str, provider: str) -> NodeKind:
    """Return the kind that an operator suggests. Some "shape" nodes on the CPU compute; data_flow.py finds them."""
    on_cpu = provider == CPU and domain in ("", "ai.onnx")
    return "shape" if (on_cpu and op_type in _SHAPE_OPERATORS) or op_type in ("Shape", "Size") else "compute"


def refusal(placement: Placement) -> PlacementError | None:
    """Return the error for ``cpu_nodes="forbid"``, or None if every compute node is known to be on the GPU."""
    if not placement.known:
        return not_recorded(
            'cpu_nodes="forbid" cannot be verified: ONNX Runtime did not record where nodes are placed',
            manual('or accept that: cpu_nodes="allow"'),
        )
    nodes = placement.cpu_compute_nodes
    if not nodes and not placement.is_whole:
        return PlacementError(
            'cpu_nodes="forbid" cannot be verified: ONNX Runtime did not record where all nodes are placed',
            evidence=["before 1.27 it records no node on 16-bit floats that has no kernel; it computes on the CPU"],
            fixes=[manual("use ONNX Runtime 1.27 or newer"), manual('or accept that: cpu_nodes="allow"')],
        )
    if not nodes:
        return None
    counts = Counter(node.op_type for node in nodes)
    divided_by = nodes[0].divided_by
    verb = "computes" if len(nodes) == 1 else "compute"
    return PlacementError(
        f"{len(nodes)} of {counted(len(placement.nodes), 'node')} {verb} on the CPU: "
        + ", ".join(f"{op} ({n})" if n > 1 else op for op, n in counts.most_common(8)),
        evidence=[f"{node}: {node.reason}" for node in nodes[:12]]
        + ([f"... {len(nodes)} in all"] if len(nodes) > 12 else []),
        fixes=[
            *([manual(f"leave {divided_by} out of the session options")] if divided_by is not None else []),
            manual(
                "export the model with operators that have CUDA kernels; often a lower opset or another type (int32 "
                "instead of uint8) is enough"
            ),
            manual('or accept it: cpu_nodes="allow"'),
        ],
        nodes=nodes,
    )


def warning(placement: Placement) -> str | None:
    """Return the warning of ``cpu_nodes="warn"``, or None. An unrecorded placement causes no warning."""
    if placement.in_own_format:
        return (
            "where the nodes of this model run is not known: it is in ONNX Runtime's own format (.ort)\n"
            "ONNX Runtime copies nothing between devices for such a file, unless a session on CUDA wrote it: a node "
            "without a CUDA kernel then reads the GPU's memory, and the process ends (a segmentation fault in 1.31.1). "
            'Open the ONNX model that it was made from, or accept it: cpu_nodes="allow".'
        )
    if not placement.known or not placement.cpu_compute_nodes:
        return None
    error = refusal(placement)
    return f"{error.summary}\n{placement}" if error is not None else None


def not_recorded(summary: str, *fixes: Fix) -> PlacementError:
    """Return the error for an unknown placement that is needed. ``fixes`` come after the fix that makes it known."""
    return PlacementError(
        summary,
        evidence=[
            f"it does since 1.24, unless the session options have {RECORDING_KEY}=0",
            "it does not for models in its own format (.ort)",
        ],
        fixes=[manual("use ONNX Runtime 1.24 or newer and an ONNX model, and leave that entry out"), *fixes],
    )


def format_table(rows: Sequence[Iterable[str]]) -> str:
    cells = [tuple(map(escape_controls, row)) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def cufft_operators(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of the operators that need cuFFT, sorted. ``operators``: type and domain."""
    microsoft_operators = {op_type for op_type, domain in operators if domain == "com.microsoft"}
    return tuple(sorted(microsoft_operators & {"Rfft", "Irfft"}))


CONVOLUTIONS = frozenset(("Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv"))


def has_convolutions(placement: Placement) -> bool:
    """Return True if convolutions are on CUDA. Their cuDNN plans hold for one shape."""
    return any(op_type in CONVOLUTIONS for op_type, _ in placement.placed_on(CUDA))
