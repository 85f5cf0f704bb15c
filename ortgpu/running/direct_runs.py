"""Runs that call C++ directly, because the Python code of ``InferenceSession.run`` has nothing to do for them.

Since 1.30 that code asks whether WebGPU captures a graph, reads the name and type of each input from C++ to find
missing ones, looks for OrtValues of other sessions, and reads the names of the outputs. For a dict with a small NumPy
array for each input, these checks can find nothing.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from numpy import ndarray

from ..provider.requests import CPU, CUDA
from .onnxruntimes import InferenceSession, onnxruntimes_run

# All names in the code of ``run`` from 1.18 to 1.31. Code with another name was not reviewed, so it is not skipped.
_READ = frozenset(
    (
        "_validate_graph_capture_run_api", "_validate_input", "list", "keys", "_validate_ortvalue_ownership", "values",
        "_outputs_meta", "name", "_sess", "run", "C", "EPFail", "_enable_fallback", "print", "_providers",
        "_fallback_providers", "set_providers", "disable_fallback",
    )
)  # fmt: skip


class DirectRuns:
    """The facts of a session that decide whether a run may be direct.

    Arrays of ``staged_from`` bytes or more are not for direct runs.
    """

    __slots__ = ("_input_names", "_staged_from", "output_names", "stands_in_for")

    def __init__(self, inner: Any, run: FunctionType, staged_from: int) -> None:
        self.stands_in_for = run
        self.output_names = [each.name for each in inner.outputs_meta]
        self._input_names = [each.name for each in inner.inputs_meta]
        self._staged_from = staged_from

    def take(self, feed: Any) -> bool:
        """Return True if the run may be direct. Called before each run, it takes a tenth of a microsecond."""
        if type(feed) is not dict or len(feed) != len(self._input_names):
            return False
        for name in self._input_names:
            value = feed.get(name)
            if type(value) is not ndarray or value.nbytes >= self._staged_from:
                return False
        return True


def direct_runs_of(session: Any) -> DirectRuns | None:
    """Return the DirectRuns of an open session. None if every run must go through ``InferenceSession.run``."""
    run, staging = onnxruntimes_run(session), session._staging
    if run is None or not _READ.issuperset(run.__code__.co_names):
        return None
    if staging is not None and staging.has_large_outputs:
        return None
    if not {CUDA, CPU}.issuperset(InferenceSession.get_providers(session)):  # WebGPU has its own rules for graphs
        return None
    try:
        return DirectRuns(session._sess, run, sys.maxsize if staging is None else staging.staged_from)
    except UnicodeDecodeError:  # in names of inputs or outputs
        return None
