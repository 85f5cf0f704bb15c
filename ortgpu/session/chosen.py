"""Choose further options for a session by its model: cuDNN handles, CPU threads.

The graph decides the options, and the placement of the open session verifies them. Options that need a measurement,
such as the layout of images, are left to ``ortgpu tune``.

**cuDNN handles**: a provider that finds cuDNN creates cuDNN handles for each session, whatever the model is. With cuDNN
9.19 on an H200 this took half of the time to open a small session (2.7 of 5.5 ms). It also leaked 10 KB of GPU memory
for each session, in plain ONNX Runtime too, because cudnnDestroy does not free it.

**CPU threads**: ONNX Runtime starts one thread less than the machine has cores, for each session. If all compute nodes
are on the GPU, these threads only serve ``run_async``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..environment.libraries.catalogue import major_of
from ..errors import LibraryNotFoundError, ProviderOptionError, manual
from ..model.outline import STANDARD, UNREADABLE, GraphOutline, names
from ..provider.cudnn import cudnn_operators
from ..provider.options import may_record
from ..provider.placement import Placement, has_convolutions
from ..provider.requests import CPU, CUDA, ProviderList
from ..provider.settings import FEW_THREADS, THREADS

HANDLES = "enable_cudnn"  # the option
_WHY_NO_HANDLES = (
    "no operator of this model uses cuDNN, whose handles took half of the time of a small session on an H200"
)
NO_HANDLES = {HANDLES: ("0", _WHY_NO_HANDLES)}

_WHY_FEW_THREADS = (
    "all nodes that compute are on the GPU; a thread for each of 32 cores took a fifth of the time to open an MLP"
)
ON_FEW_THREADS = {THREADS: (str(FEW_THREADS), _WHY_FEW_THREADS)}

_RELEASE = (1, 31)  # The options were measured with this release of ONNX Runtime and newer ones.

# With and without cuDNN, these operators of the standard domain return bitwise equal results
# (tests/gpu/test_cudnn_handles.py). Fusions of these do not need cuDNN either. Softmax and the parts of normalisations
# are left out: ONNX Runtime fuses them into attention, and attention may use cuDNN.
WITHOUT_CUDNN = names(
    "MatMul Gemm",
    "Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Gelu Sigmoid HardSigmoid HardSwish Tanh Softplus Softsign Erf",
    "Add Sub Mul Div Neg Abs Reciprocal Sqrt Exp Log Sin Cos Floor Ceil Round Sign Clip",
    "Equal Less Greater LessOrEqual GreaterOrEqual Not And Or Xor Where",
    "Shape Reshape Flatten Squeeze Unsqueeze Transpose Concat Split Slice Gather Expand Tile",
    "Cast Identity Constant ConstantOfShape",
)
# Standard operators that are on the GPU for usual types. If one is not after all, the session is made again.
ON_GPU = WITHOUT_CUDNN | names(
    "Conv MaxPool AveragePool GlobalMaxPool GlobalAveragePool BatchNormalization Resize Dropout",
    "Softmax LogSoftmax LayerNormalization Pow ReduceMean ReduceSum",
)
_MOST_PARTS_OF_A_SMALL_MODEL = 250  # nodes and initializers, about 2 ms; a larger model gains too little


def choose(
    requested: ProviderList, options: Any, release: tuple[int, ...], outline: GraphOutline
) -> dict[str, tuple[str, str]]:
    """Return the options that suit the model, each with its value and the reason.

    They are options of the CUDA provider, and ``THREADS`` of the session. Nothing is chosen for an unreadable model:
    ONNX Runtime raises its own error for it.

    Args:
        requested: the caller's providers, with their options.
        options: the caller's SessionOptions, or None.
        release: the release of ONNX Runtime.
    """
    if release < _RELEASE or not {CUDA, CPU}.issuperset(requested.names):
        return {}
    try:
        operators = operators_of_small(outline)
    except UNREADABLE:
        return {}
    if operators is None:
        return {}
    choices: dict[str, tuple[str, str]] = {}
    if HANDLES not in requested.options_of(CUDA) and may_record(options) and operators <= WITHOUT_CUDNN:
        choices |= NO_HANDLES  # ``unfit`` can verify it: the placement is recorded.
    # ONNX Runtime counts physical cores. It ignores how many of them the process may use.
    if options is None and (os.cpu_count() or 1) > 2 * FEW_THREADS and operators <= ON_GPU:
        choices |= ON_FEW_THREADS
    return choices


def unfit(chosen: Mapping[str, tuple[str, str]], placement: Placement) -> set[str]:
    """Return the names of the chosen options that do not suit the model as ONNX Runtime placed it.

    Few threads of a record were measured with the model, wherever its nodes are.
    """
    is_measured = chosen.get(THREADS) != ON_FEW_THREADS[THREADS]
    fits = {
        HANDLES: placement.known and not cudnn_operators(placement.placed_on(CUDA)),
        THREADS: is_measured or (placement.known and not placement.cpu_compute_nodes),
    }
    return {name for name, fit in fits.items() if name in chosen and not fit}


_SEARCH = "cudnn_conv_algo_search"  # the option


def slow_search(options: Mapping[str, str], placement: Placement, cudnn: str | None) -> str | None:
    """Return a warning if the search for algorithms makes cuDNN 9 run convolutions by its slowest algorithm, or None.

    Args:
        options: the options of the CUDA provider in the open session.
        cudnn: the path of the loaded library.
    """
    if options.get(_SEARCH, "").upper() != "DEFAULT" or cudnn is None or not has_convolutions(placement):
        return None
    if (major_of(os.path.basename(cudnn)) or 0) < _SLOW_SINCE:
        return None
    return (
        f"{_SEARCH}=DEFAULT makes cuDNN {_SLOW_SINCE} run the convolutions of this model by its fallback: a network of "
        f'38 one-dimensional ones took 33 ms a run instead of 0.73 on an H200. Set {_SEARCH}="HEURISTIC"'
    )


_SLOW_SINCE = 9  # the major version of cuDNN


def operators_of_small(outline: GraphOutline) -> set[bytes] | None:
    """Return the operators of a small model if all of its nodes are of ONNX's own domain. Otherwise return None.

    It also returns None for a model with functions, because a function may have the name of an operator.
    """
    graph = outline.small_graph(_MOST_PARTS_OF_A_SMALL_MODEL)
    if graph is None or outline.functions or any(node.domain not in STANDARD for node in graph.nodes):
        return None
    return {node.operator for node in graph.nodes}


def missing_handle_error(error: LibraryNotFoundError) -> ProviderOptionError:
    """Return the error of a session that needed a cuDNN handle after all. Then WITHOUT_CUDNN is wrong."""
    return ProviderOptionError(
        "the model reached an operator that needs cuDNN, but this session was opened without a handle of cuDNN",
        evidence=[f"chosen for speed: {HANDLES}=0", *error.evidence],
        fixes=[manual(f'open it with a handle: GPUSession(model, providers=[("{CUDA}", {{"{HANDLES}": "1"}})])')],
        provider=CUDA,
        option=HANDLES,
        value="0",
    )
