"""Fewer CPU threads for sessions whose compute nodes are all on the GPU.

ONNX Runtime starts one thread less than the machine has cores, for each session. If all compute nodes are on the GPU,
these threads only serve ``run_async``.
"""

from __future__ import annotations

import os
from typing import Any

from ...model.questions import has_only
from ...model.structure import ModelSource
from ...provider.placement import Placement
from ...provider.requests import CPU, CUDA, ProviderList
from ...provider.runtime import load_runtime
from . import cudnn_handles, layout

THREADS = "intra_op_num_threads"  # the session option
COUNT = 4  # three concurrent runs of run_async, which keep a GPU busy
_REASON = "all nodes that compute are on the GPU; a thread for each of 32 cores took a fifth of the time to open an MLP"
CHOSEN = {THREADS: (str(COUNT), _REASON)}

_RELEASE = (1, 31)  # where it was measured

# Standard operators that are on the GPU for usual types. If one is not after all, the session is made again.
OPERATORS = (
    cudnn_handles.OPERATORS
    | frozenset(name.encode() for name in layout.OPERATORS)
    | frozenset(b"Softmax LogSoftmax LayerNormalization Pow ReduceMean ReduceSum".split())
)
_MOST_READ = 2_000  # fields of the file, some 2 ms


def options_with_few_threads(
    model: ModelSource, requested: ProviderList, options: Any, *, is_network_of_images: bool
) -> dict[str, tuple[str, str]]:
    """Return ``CHOSEN`` if the session needs no more threads, else nothing.

    ``requested`` and ``options``, which may be None, are what its caller asked for. ``is_network_of_images``: of those
    that layout.py knows, so that its operators are known as well.
    """
    if options is not None or load_runtime().release < _RELEASE or not {CUDA, CPU}.issuperset(requested.names):
        return {}
    # ONNX Runtime counts physical cores, and ignores how many the process may use
    if (os.cpu_count() or 1) <= 2 * COUNT:
        return {}
    return dict(CHOSEN) if is_network_of_images or has_only(model, OPERATORS, _MOST_READ) else {}


def needs_no_more(placement: Placement) -> bool:
    """Return True if in fact no node computes on the CPU."""
    return placement.known and not placement.cpu_compute_nodes
