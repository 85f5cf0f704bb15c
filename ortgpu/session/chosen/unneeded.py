"""Sessions without what their model does not need: cuDNN handles, and most threads for nodes on the CPU.

A provider that finds cuDNN creates cuDNN handles for each session, whatever the model is. With cuDNN 9.19 on an H200
this took half of the time to open a small session (2.7 of 5.5 ms). It also leaked 10 KB of GPU memory for each session,
in plain ONNX Runtime too, because cudnnDestroy does not free it.

ONNX Runtime starts one thread less than the machine has cores, for each session. If all compute nodes are on the GPU,
these threads only serve ``run_async``.
"""

from __future__ import annotations

import os
from typing import Any

from ...errors import LibraryNotFoundError, ProviderOptionError, manual
from ...model.questions import has_only
from ...model.structure import ModelSource
from ...provider.options import may_record
from ...provider.placement import Placement, cudnn_operators
from ...provider.requests import CPU, CUDA, ProviderList
from ...provider.runtime import load_runtime

HANDLES = "enable_cudnn"  # the option
_WHY_NO_HANDLES = (
    "no operator of this model uses cuDNN, whose handles took half of the time of a small session on an H200"
)
NO_HANDLES = {HANDLES: ("0", _WHY_NO_HANDLES)}

THREADS = "intra_op_num_threads"  # the session option
COUNT = 4  # three concurrent runs of run_async, which keep a GPU busy
_WHY_FEW_THREADS = (
    "all nodes that compute are on the GPU; a thread for each of 32 cores took a fifth of the time to open an MLP"
)
FEW_THREADS = {THREADS: (str(COUNT), _WHY_FEW_THREADS)}

_RELEASE = (1, 31)  # where it was measured

# Operators of the standard domain whose results are bitwise equal with and without cuDNN
# (tests/gpu/test_cudnn_handles.py). Fusions of these do not need cuDNN either. Softmax and the parts of normalisations
# are left out: ONNX Runtime fuses them into attention, which may use cuDNN.
WITHOUT_CUDNN = frozenset(
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
# Standard operators that are on the GPU for usual types. If one is not after all, the session is made again.
ON_GPU = WITHOUT_CUDNN | frozenset(
    name.encode()
    for line in (
        "Conv MaxPool AveragePool GlobalMaxPool GlobalAveragePool BatchNormalization Resize Dropout",
        "Softmax LogSoftmax LayerNormalization Pow ReduceMean ReduceSum",
    )
    for name in line.split(" ")
)
_MOST_READ = 2_000  # fields of the file, about 2 ms; a larger model gains too little


def options_without_handles(model: ModelSource, requested: ProviderList, options: Any) -> dict[str, tuple[str, str]]:
    """Return ``NO_HANDLES`` if the session needs no cuDNN handle, else nothing.

    ``requested`` and ``options``, which may be None, are what its caller asked for.
    """
    if load_runtime().release < _RELEASE or not {CUDA, CPU}.issuperset(requested.names):
        return {}
    if HANDLES in requested.options_of(CUDA):
        return {}
    if not may_record(options):  # needs_no_handles could not tell
        return {}
    return dict(NO_HANDLES) if needs_no_cudnn(model) else {}


def options_with_few_threads(
    model: ModelSource, requested: ProviderList, options: Any, *, is_network_of_images: bool
) -> dict[str, tuple[str, str]]:
    """Return ``FEW_THREADS`` if the session needs no more threads, else nothing.

    ``requested`` and ``options``, which may be None, are what its caller asked for. ``is_network_of_images``: of those
    that layout.py knows, so that its operators are known as well.
    """
    if options is not None or load_runtime().release < _RELEASE or not {CUDA, CPU}.issuperset(requested.names):
        return {}
    # ONNX Runtime counts physical cores, and ignores how many the process may use
    if (os.cpu_count() or 1) <= 2 * COUNT:
        return {}
    return dict(FEW_THREADS) if is_network_of_images or has_only(model, ON_GPU, _MOST_READ) else {}


def needs_no_cudnn(model: ModelSource) -> bool:
    """Return True if all operators of a model are known to run without cuDNN.

    False for an unreadable model, and for one with more fields than are read here.
    """
    return has_only(model, WITHOUT_CUDNN, _MOST_READ)


def needs_no_handles(placement: Placement) -> bool:
    """Return True if in fact no node of the optimised model needs cuDNN."""
    placed = ((node.op_type, node.domain) for node in placement.nodes if node.provider == CUDA)
    return placement.known and not cudnn_operators(placed)


def needs_no_more_threads(placement: Placement) -> bool:
    """Return True if in fact no node computes on the CPU."""
    return placement.known and not placement.cpu_compute_nodes


def with_a_handle(error: LibraryNotFoundError) -> ProviderOptionError:
    """Return the error for a session without a handle that needed one after all. Then WITHOUT_CUDNN is wrong."""
    return ProviderOptionError(
        "the model reached an operator that needs cuDNN, and this session was opened without a handle of it",
        evidence=[f"chosen for speed: {HANDLES}=0", *error.evidence],
        fixes=[manual(f'open it with one: GPUSession(model, providers=[("{CUDA}", {{"{HANDLES}": "1"}})])')],
        provider=CUDA,
        option=HANDLES,
        value="0",
    )
