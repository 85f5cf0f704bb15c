"""Runs for which ``InferenceSession.run`` has nothing to do in Python, and which therefore call C++ at once.

Since 1.30 it asks whether WebGPU captures a graph, reads name and type of each input from C++ to find those that are
missing, looks for OrtValues of other sessions, and reads the names of the outputs. Of a dict that has a small NumPy
array for each input, all that can find nothing.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from numpy import ndarray

from ..provider.requests import CPU, CUDA
from .onnxruntimes import InferenceSession, onnxruntimes_run

# All names in the code of ``run`` from 1.18 to 1.31. With another one it does something that nobody has read yet.
_READ = frozenset(
    (
        "_validate_graph_capture_run_api", "_validate_input", "list", "keys", "_validate_ortvalue_ownership", "values",
        "_outputs_meta", "name", "_sess", "run", "C", "EPFail", "_enable_fallback", "print", "_providers",
        "_fallback_providers", "set_providers", "disable_fallback",
    )
)  # fmt: skip


class DirectRuns:
    """What a session has to know of itself for them. ``staged_from``: arrays of so many bytes are not for them."""

    __slots__ = ("_input_names", "_staged_from", "output_names", "stands_in_for")

    def __init__(self, inner: Any, run: FunctionType, staged_from: int) -> None:
        self.stands_in_for = run
        self.output_names = [each.name for each in inner.outputs_meta]
        self._input_names = [each.name for each in inner.inputs_meta]
        self._staged_from = staged_from

    def take(self, feed: Any) -> bool:
        """Called before each run: it costs a tenth of a microsecond."""
        if type(feed) is not dict or len(feed) != len(self._input_names):
            return False
        for name in self._input_names:
            value = feed.get(name)
            if type(value) is not ndarray or value.nbytes >= self._staged_from:
                return False
        return True


def direct_runs_of(session: Any) -> DirectRuns | None:
    """For a session that was opened; None where each run is to go through ``InferenceSession.run``."""
    run, staging = onnxruntimes_run(session), session._staging
    if run is None or not _READ.issuperset(run.__code__.co_names):
        return None
    if staging is not None and staging.has_large_outputs:
        return None
    if not {CUDA, CPU}.issuperset(InferenceSession.get_providers(session)):  # WebGPU has rules of its own for graphs
        return None
    try:
        return DirectRuns(session._sess, run, sys.maxsize if staging is None else staging.staged_from)
    except UnicodeDecodeError:  # names of inputs or outputs
        return None
