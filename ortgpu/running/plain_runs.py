"""Runs by ``InferenceSession.run``, and runs that call C++ directly because its Python code has nothing to do for them.

Since 1.30 that code asks whether WebGPU captures a graph. It reads the name and type of each input from C++ to find
missing ones, and the names of the outputs. It looks for OrtValues of other sessions. For a dict with a small NumPy
array for each input, these checks can find nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from ..errors import GPUError
from ..provider.requests import CPU, CUDA
from .kept_shapes import SessionShapes
from .onnxruntimes import InferenceSession, Results, onnxruntimes_method, onnxruntimes_run, run_behind
from .streams import refuse_foreign, wait_for_values

if TYPE_CHECKING:
    from typing import Protocol

    from ..model.files import ModelSource
    from ..provider.interfaces import VerifiedSession
    from .cudart import Stream

    class RunningSession(VerifiedSession, Protocol):
        """A session with a runner."""

        _gpu_runner: PlainRunner
        _stream: Stream | None  # while a session with cuda_graph opens

        def _gpu_tune(self, model: ModelSource, ordinal: int | None) -> None: ...


# All names in the code of ``run`` from 1.18 to 1.31. Code with another name was not reviewed, so it is not skipped.
_READ = frozenset(
    (
        "_validate_graph_capture_run_api", "_validate_input", "list", "keys", "_validate_ortvalue_ownership", "values",
        "_outputs_meta", "name", "_sess", "run", "C", "EPFail", "_enable_fallback", "print", "_providers",
        "_fallback_providers", "set_providers", "disable_fallback",
    )
)  # fmt: skip


# The same of ``run_with_iobinding``. Its further code is for graphs of WebGPU.
_READ_BOUND = frozenset(
    (
        "_session", "_sess", "ValueError", "_graph_annotation_id", "is_webgpu_graph_capture_enabled",
        "_GRAPH_ANNOTATION_SKIP", "_validate_capture_bindings", "_capture_signature", "_captured_graph_bindings", "get",
        "run_with_iobinding", "_iobinding", "weakref", "ref", "_pinned_graph_ids", "add",
    )
)  # fmt: skip


class PlainRunner:
    """The runs of one session.

    The session is passed to each call, because a reference to it would keep its GPU memory. Without a session, or if
    another library stands in for ``InferenceSession.run`` when the runner is made, no run is direct.

    Args:
        direct_below: a run is direct if each of its inputs has fewer bytes.
    """

    caller: tuple[Any, ...] = ()  # the session's order with its caller, see streams.py; empty if unknown
    pace: Any = None  # see pipeline.Pace
    most_shapes = 0  # the number of shapes that may have plans; 0: plans are of no use
    submit: Callable[..., None] | None = None  # replaces Executor.submit for sessions that run in one thread
    use_device: Callable[[], None] | None = None  # called before each run; None: ONNX Runtime sets the device

    def __init__(self, session: RunningSession | None = None, direct_below: int = sys.maxsize) -> None:
        names = _names_for_direct_runs(session) if session is not None else None
        self._input_names, self._output_names = names or ([], [])
        self._input_count = len(self._input_names) if names is not None else -1  # No feed has -1 inputs.
        self._direct_below = direct_below
        self.binds_directly = session is not None and _may_bind_directly(session)
        if session is None:
            self.caller = (None,)

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        """Run the model and return the results. Deciding on a direct run takes a tenth of a microsecond."""
        if run_options is None and type(feed) is dict and len(feed) == self._input_count:
            for name in self._input_names:
                value = feed.get(name)
                if type(value) is not ndarray or value.nbytes >= self._direct_below:
                    break
            else:
                return session._sess.run(output_names or self._output_names, feed, None)
        return self._run_indirectly(session, output_names, feed, run_options)

    def _run_indirectly(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        if isinstance(feed, Mapping) and not all(type(value) is ndarray for value in feed.values()):
            refuse_foreign(feed)
            wait_for_values(session, feed)
        return run_behind(session)(output_names, feed, run_options)

    def through(self, session: RunningSession, feed: Any, run: Callable[..., Any]) -> Any:
        """Return ``run(session, runner, feed)``. A runner with further sessions may pass one of these, and its feed."""
        return run(session, self, feed)

    @property
    def own(self) -> PlainRunner:
        """The runner that makes the runs of the session itself."""
        return self

    def prepare(self, session: RunningSession, feeds: Sequence[Mapping[str, Any]]) -> bool:
        """Make plans for several shapes now if runs of ``feeds`` show that they gain. Return True if there are some."""
        return False

    def widen(self, session: RunningSession, feeds: Sequence[Mapping[str, Any]], runs: int) -> None:
        """Let so many runs of the planned shapes of ``feeds`` use their plans at a time."""

    def shapes(self) -> SessionShapes:
        """Return the shapes that have plans."""
        return SessionShapes((), 0, None)

    def note_bound(self, session: RunningSession, binding: Any, began: float) -> None:
        """Note a run with an IOBinding that began then, in seconds of time.perf_counter()."""

    def stages(self, feed: Any) -> bool:
        """Return True if ``run`` had better copy the arrays of ``feed`` itself, in several threads."""
        return False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return another method that runs the session, as one that waits and is noticed like :meth:`run`."""
        return method

    def note_end(self) -> None:
        """Note the end of a run that did not go through :meth:`run` or :meth:`around`."""

    def check_binding(self) -> None:
        """Raise ProviderRequestError if the session cannot be used with an IOBinding."""

    def let_go(self) -> None:
        """Drop references to the C++ session, because it is about to be opened again."""

    def close(self, error: GPUError) -> None:
        """Free the memory that no array uses. Later runs may raise ``error``."""


def _may_bind_directly(session: RunningSession) -> bool:
    """Return True if ``InferenceSession.run_with_iobinding`` calls C++ for its own binding and does nothing else.

    Before it compared ``_session`` of the binding, it had no code that is worth skipping.
    """
    method = onnxruntimes_method(session, "run_with_iobinding")
    names = method.__code__.co_names if method is not None else ()
    if "_session" not in names or not _READ_BOUND.issuperset(names):
        return False
    return {CUDA, CPU}.issuperset(InferenceSession.get_providers(session))


def _names_for_direct_runs(session: RunningSession) -> tuple[list[str], list[str]] | None:
    """Return the names of inputs and outputs. None if every run must go through ``InferenceSession.run``."""
    run = onnxruntimes_run(session)
    if run is None or not _READ.issuperset(run.__code__.co_names):
        return None
    if not {CUDA, CPU}.issuperset(InferenceSession.get_providers(session)):  # WebGPU has its own rules for graphs
        return None
    try:
        return [value.name for value in session._inputs_meta], [value.name for value in session._outputs_meta]
    except UnicodeDecodeError:  # A name of an input or output is not UTF-8.
        return None
