"""Sessions without cuDNN handles, for models that need none.

A provider that finds cuDNN creates cuDNN handles for each session, whatever the model is. With cuDNN 9.19 on an H200
this took half of the time to open a small session (2.7 of 5.5 ms). It also leaked 10 KB of GPU memory for each session,
in plain ONNX Runtime too, because cudnnDestroy does not free it.
"""

from __future__ import annotations

from typing import Any

from ...errors import LibraryNotFoundError, ProviderOptionError, manual
from ...model.questions import has_only
from ...model.structure import ModelSource
from ...provider.options import may_record
from ...provider.placement import Placement, cudnn_operators
from ...provider.requests import CPU, CUDA, ProviderList
from ...provider.runtime import load_runtime

HANDLES = "enable_cudnn"  # the option
_REASON = "no operator of this model uses cuDNN, whose handles took half of the time of a small session on an H200"
CHOSEN = {HANDLES: ("0", _REASON)}

_RELEASE = (1, 31)  # where it was measured

# Operators of the standard domain whose results are bitwise equal with and without cuDNN
# (tests/gpu/test_cudnn_handles.py). Fusions of these do not need cuDNN either. Softmax and the parts of normalisations
# are left out: ONNX Runtime fuses them into attention, which may use cuDNN.
OPERATORS = frozenset(
    name.encode()
    for line in (
        "MatMul Gemm",
        "Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Gelu Sigmoid HardSigmoid HardSwish Tanh Softplus Softsign Erf",
        "Add Sub Mul Div Neg Abs Reciprocal Sqrt Exp Log Sin Cos Floor Ceil Round Sign Clip",
        "Equal Less Greater LessOrEqual GreaterOrEqual Not And Or Xor Where",
        "Shape Reshape Flatten Squeeze Unsqueeze Transpose Concat Split Slice Gather Expand Tile",
        "Cast Identity Constant ConstantOfShape",
    )
    for name in line.split(" ")
)
_MOST_READ = 2_000  # fields of the file, about 2 ms; a larger model gains too little


def options_without_handles(model: ModelSource, requested: ProviderList, options: Any) -> dict[str, tuple[str, str]]:
    """Return ``CHOSEN`` if the session needs no cuDNN handle, else nothing.

    ``requested`` and ``options``, which may be None, are what its caller asked for.
    """
    if load_runtime().release < _RELEASE or not {CUDA, CPU}.issuperset(requested.names):
        return {}
    if HANDLES in requested.options_of(CUDA):
        return {}
    if not may_record(options):  # needs_none could not tell
        return {}
    return dict(CHOSEN) if needs_no_cudnn(model) else {}


def needs_no_cudnn(model: ModelSource) -> bool:
    """Return True if all operators of a model are known to run without cuDNN.

    False for an unreadable model, and for one with more fields than are read here.
    """
    return has_only(model, OPERATORS, _MOST_READ)


def needs_none(placement: Placement) -> bool:
    """Return True if in fact no node of the optimised model needs cuDNN."""
    placed = ((node.op_type, node.domain) for node in placement.nodes if node.provider == CUDA)
    return placement.known and not cudnn_operators(placed)


def with_a_handle(error: LibraryNotFoundError) -> ProviderOptionError:
    """Return the error for a session without a handle that needed one after all. Then OPERATORS is wrong."""
    return ProviderOptionError(
        "the model reached an operator that needs cuDNN, and this session was opened without a handle of it",
        evidence=[f"chosen for speed: {HANDLES}=0", *error.evidence],
        fixes=[manual(f'open it with one: GPUSession(model, providers=[("{CUDA}", {{"{HANDLES}": "1"}})])')],
        provider=CUDA,
        option=HANDLES,
        value="0",
    )
