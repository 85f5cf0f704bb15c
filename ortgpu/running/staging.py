"""The runner that has :mod:`ortgpu.running.staged_runs` make the runs with large arrays."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from ..errors import GPUError
from ..model.tensor_types import DTYPES
from ..process.background import fork_safe_lock, is_of_a_handler, this_thread
from ..provider.lifetime import device_of, refuse_if_gone
from ..provider.requests import CPU, CUDA
from .cudart import runtime_of
from .onnxruntimes import InferenceSession, onnxruntimes_run
from .plain_runs import PlainRunner
from .staged_runs import StagedRuns

if TYPE_CHECKING:
    from ..provider.interfaces import VerifiedSession
    from .plain_runs import RunningSession
    from .staged_runs import Place

logger = logging.getLogger("ortgpu")

# Measured on an H200 with 16 cores (benchmarks/thresholds.py, 2026-11-20). Runs with outputs as large as the inputs
# gain from 2 MiB on and take 0.7 of the time with 8 MiB. Runs with small outputs gain from 8 MiB on. If the caller
# keeps many results, they need new memory: such runs took 1.4 times as long with 4 MiB, as long with 8, and 0.85 of
# the time with 12.
STAGED_FROM = 12 << 20  # bytes of one array

# Bytes. `run` copies arrays of this size also for `map`. The threads of `map` copy smaller arrays themselves.
_COPIED_BY_RUN_FROM = 32 << 20

# Not staged: captured graphs have their own rules for the addresses of inputs. With a stream of the caller, memory may
# be free only in the order of that stream.
_REFUSED = ("enable_cuda_graph", "has_user_compute_stream")

_creating = fork_safe_lock()


class StagedRunner(PlainRunner):
    """The runs of a session that :func:`may_stage` accepts. A run is staged if an array has ``staged_from`` bytes."""

    def __init__(self, session: RunningSession, staged_from: int = STAGED_FROM) -> None:
        super().__init__(session, 0)
        self._large = staged_from
        # A run is staged if its largest input has so many bytes: any run, if the model declares large outputs. A free
        # dimension counts as 1 here, because runs show whether their outputs are large.
        has_large_output = any(_bytes(value, unknown=1) >= staged_from for value in session._sess.outputs_meta)
        self._staged_from = 0 if has_large_output else staged_from
        self._runs: StagedRuns | None = None
        self.place: Place | None = None  # returns the array for a large result, or None; set before the first run

    def stages(self, feed: Any) -> bool:
        return _largest(feed) >= _COPIED_BY_RUN_FROM

    def close(self, error: GPUError) -> None:
        """Let the threads end. A running run ends normally."""
        self._runs = None

    def _run_indirectly(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Any:
        size = _largest(feed) if run_options is None else -1
        if size >= self._staged_from:
            results = self._run_staged(session, output_names, feed)
            if results is not None:
                return results
        results = super()._run_indirectly(session, output_names, feed, run_options)
        if size >= self._direct_below:
            self._learn(size, results)
        return results

    def _learn(self, size: int, results: Any) -> None:
        """Learn from a run: if its outputs are large, stage runs with such inputs, and else make them directly."""
        if any(result.nbytes >= self._large for result in results):
            self._staged_from = min(self._staged_from, size)
        elif len(results) >= len(self._output_names):  # the caller may ask for other outputs the next time
            self._direct_below = size + 1
        self._direct_below = min(self._direct_below, self._staged_from)

    def _run_staged(self, session: RunningSession, output_names: Any, feed: Any) -> list[Any] | None:
        """Run the model and return the results. None: plain ``run`` has to run it, or to raise the error.

        Raises:
            ExecutionError: the session lost its context, and with it the pinned memory.
            Exception: raised by a signal handler meanwhile.
        """
        refuse_if_gone(session)
        try:
            runs = self._runs or self._make_runs(session)
            return runs.run(session, output_names, feed) if runs is not None else None
        except Exception as error:  # plain run raises the error that the caller expects
            if is_of_a_handler(error):
                raise
            logger.debug("a run is not staged: %s", str(error))  # the text alone, as an error keeps its frames
            return None

    def _make_runs(self, session: RunningSession) -> StagedRuns | None:
        with this_thread.holds, _creating:
            if self._runs is None:
                runtime = runtime_of(device_of(session))
                if runtime is not None:
                    self._runs = StagedRuns(session, runtime, self._large)
                    self._runs.place = self.place
            return self._runs


def may_stage(session: RunningSession) -> bool:
    """Return False for an open session if its arrays are small, or if staging would behave otherwise than ``run``."""
    inner = session._sess
    if not session._pinned_memory_limit or onnxruntimes_run(session) is None or not gives_memory(session):
        return False
    values = (*inner.inputs_meta, *inner.outputs_meta)
    if any(value.type not in DTYPES for value in values):
        return False
    try:
        sizes = [_bytes(value, unknown=STAGED_FROM) for value in values]
    except UnicodeDecodeError:  # Plain run does not read names of dimensions.
        return False
    return max(sizes, default=0) >= STAGED_FROM


def gives_memory(session: VerifiedSession) -> bool:
    """Return True if inputs may be copied into GPU memory of the session."""
    if not hasattr(session._sess, "create_ortvalue_from_shape_and_type") or not device_of(session).is_gpu:
        return False  # before 1.30, or on the CPU
    providers = InferenceSession.get_provider_options(session)
    if not {CUDA, CPU}.issuperset(providers):
        return False  # TensorRT has its own rules for the addresses of inputs
    return all(providers[CUDA].get(option, "0") == "0" for option in _REFUSED)


def _largest(feed: Any) -> int:
    """Return the bytes of the largest array. -1 if not all are arrays: ONNX Runtime takes or refuses these."""
    try:
        return max((int(value.nbytes) for value in feed.values()), default=0)
    except (AttributeError, TypeError):
        return -1


def _bytes(value: Any, unknown: int) -> int:
    """Return the bytes of an input or output as the model declares it."""
    sizes = (size if isinstance(size, int) else unknown for size in value.shape)
    return math.prod(sizes) * DTYPES[value.type].itemsize
