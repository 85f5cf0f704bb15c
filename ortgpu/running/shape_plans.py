"""A session with several copies of a model's nodes, each of which keeps the plans of one shape.

The copies are branches of one graph that share their weights, see :mod:`ortgpu.model.branches`. Which branch runs is
chosen by Boolean inputs. A shape that has no branch gets the one that was used least recently: its run plans as any run
of another shape does.

Measured on an H200 with eight batches of ResNet-50 in turn: 2.3 ms a run where one session takes 98.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnxruntime.capi.onnxruntime_inference_collection import IOBinding  # a tracer may replace the public name

from ..model.branches import bits_of
from ..provider import lifetime
from ..provider.devices import Device
from .onnxruntimes import InferenceSession, LastOfOurs
from .plain_runs import PlainRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from .pinned import PinnedMemory

Shape = tuple[Any, ...]


class OneAtATime:
    """The C++ session of a FurtherSession, whose runs follow each other: they share one CUDA stream.

    ONNX Runtime gives each graph a stream with handles of cuBLAS and cuDNN, some 70 MiB on an H100: also each branch,
    and each again for every thread. One stream for all must not be used by two runs at a time, nor must its handles.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.turn = threading.RLock()  # reentrant: a signal handler may run the session
        self.is_busy = False  # a run is at work, as far as another thread can tell

    def run(self, output_names: Any, feed: Any, run_options: Any) -> Any:
        with self.turn:
            self.is_busy = True
            try:
                return self._inner.run(output_names, feed, run_options)
            finally:
                self.is_busy = False

    def run_with_ortvaluevector(self, *arguments: Any) -> Any:
        with self.turn:
            self.is_busy = True
            try:
                return self._inner.run_with_ortvaluevector(*arguments)
            finally:
                self.is_busy = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _WithNativeSession:
    """A FurtherSession as an IOBinding knows it: with the C++ session itself."""

    def __init__(self, session: FurtherSession) -> None:
        self._session = session
        self._sess = session._sess._inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class FurtherSession(LastOfOurs):
    """A further InferenceSession beside one of the caller's. It loses the GPU as other sessions do.

    Args:
        device: the verified device of the session that it serves.
        pinned_memory_limit: that of the same session, whose pinned memory it uses.
        arguments: those of InferenceSession.
    """

    _sess: Any
    _pinned: PinnedMemory | None = None
    _gpu_runner = PlainRunner()

    def __init__(self, device: Device, pinned_memory_limit: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.device = device
        self._pinned_memory_limit = pinned_memory_limit
        self._sess = OneAtATime(self._sess)
        lifetime.watch(self)

    def io_binding(self) -> IOBinding:
        """Return an IOBinding, as InferenceSession does."""
        lifetime.refuse_if_closed(self)
        return IOBinding(_WithNativeSession(self))

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run with an IOBinding, as InferenceSession does."""
        lifetime.refuse_if_closed(self)
        with self._sess.turn:
            InferenceSession.run_with_iobinding(_WithNativeSession(self), iobinding, run_options)

    def _gpu_explained(self, error: Exception) -> Exception:
        return error


@dataclass(slots=True)
class Branch:
    """A copy of the nodes, the inputs that choose it, and the shape that it keeps the plans of."""

    selectors: Mapping[str, NDArray[np.bool_]]
    shape: Shape | None = None
    inputs: Mapping[str, tuple[int, ...]] | None = None  # the shape of each input
    used: int = 0  # grows with the time of the last use
    waits: int = 0  # runs that had to wait for another one


class ShapePlans:
    """The branches, and the shapes that they keep the plans of. Threads may share it.

    Args:
        session: of a model with branches.
        runner: makes the runs of that session.
        selectors: the names of the Boolean inputs.
        branches: their number.
        open_further: opens a session without branches, for one shape, and returns it with its runner.
    """

    def __init__(
        self,
        session: Any,
        runner: PlainRunner,
        selectors: Sequence[str],
        branches: int,
        open_further: Callable[[], tuple[Any, PlainRunner]],
    ) -> None:
        self.session = session
        self.runner = runner
        self.open_further = open_further
        self._branches = [
            Branch({name: np.array(bit) for name, bit in zip(selectors, bits_of(number, len(selectors)), strict=True)})
            for number in range(branches)
        ]
        self._kept: dict[Shape, Branch] = {}
        self._clock = itertools.count(1)
        self._lock = threading.RLock()  # a signal handler may close the session

    def find(self, shape: Shape) -> Branch | None:
        """Return the branch that keeps the plans of a shape, if there is one."""
        return self._kept.get(shape)

    def branch_of(self, shape: Shape) -> Branch:
        """Return the branch that keeps the plans of a shape, or the one whose next run may make them."""
        branch = self._kept.get(shape)
        if branch is None:
            with self._lock:
                branch = self._kept.get(shape) or min(self._branches, key=lambda each: each.used)
                branch.used = next(self._clock)  # another thread takes another one
        branch.used = next(self._clock)
        return branch

    def keep(self, shape: Shape, branch: Branch, inputs: Mapping[str, tuple[int, ...]]) -> None:
        """Note that a branch has made the plans of a shape. A run that failed leaves the shapes as they were."""
        with self._lock:
            if shape in self._kept:  # by another thread, meanwhile
                branch.used = 0
                return
            if branch.shape is not None:
                del self._kept[branch.shape]
            branch.shape, branch.inputs, branch.waits = shape, inputs, 0
            self._kept[shape] = branch

    def tick(self) -> int:
        """Return the number of uses so far, which this one adds to."""
        return next(self._clock)

    def rest(self, shape: Shape) -> None:
        """Count the waits of a shape anew."""
        branch = self._kept.get(shape)
        if branch is not None:
            branch.waits = 0

    def kept(self) -> tuple[Shape, ...]:
        """Return the shapes with plans, the one that was used least recently first."""
        with self._lock:
            return tuple(sorted(self._kept, key=lambda shape: self._kept[shape].used))

    def inputs(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """Return the shapes of the inputs by name, in the order of :meth:`kept`."""
        with self._lock:
            kept = sorted(self._kept.values(), key=lambda branch: branch.used)
            return tuple(branch.inputs for branch in kept if branch.inputs is not None)

    def close(self) -> None:
        """Free the memory of the branches once no run uses them."""
        session, self.session = self.session, None
        self.runner = PlainRunner()
        if session is not None:
            lifetime.abandon_if_context_is_gone(session)
