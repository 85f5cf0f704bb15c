"""The parts of ONNX Runtime's objects that this library uses. ONNX Runtime ships no types of its own.

Not every release has every attribute: callers test with ``hasattr`` for attributes that came after 1.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Value(Protocol):
    """An input or output of a model (NodeArg)."""

    name: str
    type: str
    shape: Sequence[int | str | None]


class Node(Protocol):
    name: str
    op_type: str
    domain: str


class AssignedNodes(Protocol):
    """The nodes of one provider (OrtEpAssignedSubgraph)."""

    ep_name: str

    def get_nodes(self) -> Sequence[Node]: ...


class NativeSession(Protocol):
    inputs_meta: Sequence[Value]
    outputs_meta: Sequence[Value]
    input_meminfos: Sequence[Any]
    output_meminfos: Sequence[Any]

    def get_providers(self) -> Sequence[str]: ...
    def run(self, output_names: Any, feed: Any, run_options: Any) -> list[Any]: ...
    def create_ortvalue_from_shape_and_type(self, shape: Any, element_type: Any, device: Any, /) -> Any: ...


class Opened(Protocol):
    """An object that holds a C++ session or the stand-in for one."""

    _sess: Any


class Session(Protocol):
    """An ``onnxruntime.InferenceSession`` or an instance of a subclass. Its constructor may still be running."""

    _sess: NativeSession
    _sess_options_initial: Any
    _model_path: str | None
    _model_bytes: bytes | None
    _inputs_meta: Sequence[Value]
    _outputs_meta: Sequence[Value]
    _overridable_initializers: Sequence[Value]

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any: ...
    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None: ...
    def io_binding(self) -> Any: ...
    def _validate_input(self, feed_input_names: list[str]) -> None: ...


class VerifiedSession(Session, Protocol):
    """A GPUSession, or an InferenceSession that the guard made one."""

    _verified: Any  # session.verifying.Verified
    _request: Any
    _pinned_memory_limit: int
    _gpu_context: Any  # lifetime.ContextCheck; None on the CPU, or if the driver does not tell
    _holdings: Any  # running.memory.Holdings, from the first query on
    _pinned: Any  # running.pinned.PinnedMemory, from the first use on
    _gpu_runner: Any  # running.plain_runs.PlainRunner
    _model_stamp: tuple[int, ...] | None  # stamp of the model's file when the session opened

    def _gpu_explained(self, error: Exception) -> Exception: ...
