"""Sessions with several copies of a model's nodes: each copy keeps the plans of one shape.

The copies are branches of one graph that share their weights, see :mod:`ortgpu.model.branches`. Boolean inputs choose
the branch that runs. A shape that has no branch gets the one that was used least recently: its run plans as any run of
another shape does. There is one such session until threads wait for each other, and then up to eight: the lanes.

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
from ..process.background import this_thread
from ..provider import lifetime
from ..provider.devices import Device
from .cudart import device_setter
from .onnxruntimes import InferenceSession, LastOfOurs
from .plain_runs import PlainRunner
from .results import agree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from .pinned import PinnedMemory

    Opening = AbstractContextManager[tuple[int, Callable[[], "Lane"]]]

Shape = tuple[Any, ...]


class OneAtATime:
    """The C++ session of a FurtherSession. Its runs follow each other, because they share one CUDA stream.

    ONNX Runtime gives each graph a stream with handles of cuBLAS and cuDNN, some 70 MiB on an H100. Each branch gets
    one, too, and each thread gets its own. This session has one stream for all. Two runs must not use it or its handles
    at the same time.
    """

    def __init__(self, inner: Any, use_device: Callable[[], None] | None = None) -> None:
        self._inner = inner
        self._use_device = use_device  # see one_stream.py
        self._turn = threading.RLock()  # reentrant: a signal handler may run the session
        self.queue: list[None] = []  # an item for each run at work or waiting, as far as another thread can tell

    def run(self, *arguments: Any) -> Any:
        return self.take_turn(self._inner.run, *arguments)

    def run_with_ortvaluevector(self, *arguments: Any) -> Any:
        return self.take_turn(self._inner.run_with_ortvaluevector, *arguments)

    def take_turn(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that runs the session, once the runs before it have ended."""
        try:
            self.queue.append(None)
            with this_thread.holds, self._turn:
                if self._use_device is not None:
                    self._use_device()
                return run(*arguments)
        finally:
            if self.queue:  # an interrupt may have come before the item
                self.queue.pop()

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
        pinned_memory_limit: the limit of the same session. It uses that session's pinned memory.
        arguments: the arguments of InferenceSession.
    """

    _sess: Any
    _pinned: PinnedMemory | None = None
    _gpu_runner = PlainRunner()

    def __init__(self, device: Device, pinned_memory_limit: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.device = device
        self._pinned_memory_limit = pinned_memory_limit
        self._sess = OneAtATime(self._sess, device_setter(device))
        lifetime.watch(self)

    def io_binding(self) -> IOBinding:
        """Return an IOBinding, as InferenceSession does."""
        lifetime.refuse_if_closed(self)
        return IOBinding(_WithNativeSession(self))

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run with an IOBinding, as InferenceSession does."""
        lifetime.refuse_if_closed(self)
        self._sess.take_turn(InferenceSession.run_with_iobinding, _WithNativeSession(self), iobinding, run_options)

    def _gpu_explained(self, error: Exception) -> Exception:
        return error


@dataclass(slots=True)
class Branch:
    """A copy of the nodes, the inputs that choose it, and the shape that it keeps the plans of."""

    selectors: Mapping[str, NDArray[np.bool_]]
    shape: Shape | None = None
    claimed: int = 0  # the larger, the later a run was last sent there to make plans


class Lane:
    """A session with branches. Its runs follow each other. Further lanes make further runs at the same time.

    Args:
        session: a session of a model with branches.
        runner: makes the runs of that session.
        selectors: the names of the Boolean inputs.
        branches: the number of branches.
    """

    def __init__(self, session: FurtherSession, runner: PlainRunner, selectors: Sequence[str], branches: int) -> None:
        self.session: Any = session  # None once it is closed
        self.is_planning = False  # A run makes plans. It takes as long as a hundred runs.
        self.is_filled = False  # A thread of ShapePlans.fill is at work in it.
        self.is_verified = False  # Its results agree with another lane's. ShapedRunner verifies the first lane.
        self.runner = runner
        self.branches = [
            Branch({name: np.array(bit) for name, bit in zip(selectors, bits_of(number, len(selectors)), strict=True)})
            for number in range(branches)
        ]

    @property
    def queue(self) -> int:
        """The number of runs at work or waiting."""
        session = self.session
        return len(session._sess.queue) if session is not None else 0

    @property
    def load(self) -> int:
        """The number of runs, or much more if one makes plans. Runs go to the lane with the smallest load."""
        return self.queue + 100 * self.is_planning

    def place_as(self, pinned: PinnedMemory | None, other: PlainRunner) -> None:
        """Use the pinned memory of another session, and put results where its runner does."""
        session, runner = self.session, self.runner
        if session is not None:  # Another thread may have closed it.
            session._pinned = pinned
        if hasattr(runner, "place"):  # A worker process wants its results there.
            runner.place = getattr(other, "place", None)

    def close(self) -> None:
        """Free the memory once no run uses it."""
        session, self.session = self.session, None
        self.runner = PlainRunner()
        if session is not None:
            lifetime.abandon_if_context_is_gone(session)


@dataclass(slots=True, eq=False)
class KeptShape:
    """A shape that has plans.

    Attributes:
        inputs: the shape of each input.
        places: the branches that keep the plans, each in another lane.
        used: grows with the time of the last use.
        waits: the runs that had to wait for others since ``since``, in seconds of time.monotonic().
        wanted: the number of lanes that are to have its plans, as far as there are so many.
        feed: arrays to plan it with in further lanes.
    """

    inputs: Mapping[str, tuple[int, ...]]
    places: tuple[tuple[Lane, Branch], ...] = ()
    used: int = 0
    waits: int = 0
    since: float = 0.0
    wanted: int = 1
    feed: Mapping[str, Any] | None = None


class ShapePlans:
    """The lanes, and the shapes that their branches keep the plans of. Threads may share it.

    Args:
        first: the first lane. Each has as many branches as shapes are kept.
        opening: prepares so many further lanes, or fewer. Gives their number and a function that opens each. Both raise
            the error that keeps them from opening one.
    """

    def __init__(self, first: Lane, opening: Callable[[int], Opening]) -> None:
        self.lanes: tuple[Lane, ...] = (first,)
        first.is_verified = True
        self.opening = opening
        self._most = len(first.branches)
        self._kept: dict[Shape, KeptShape] = {}
        self._clock = itertools.count(1)
        self._is_closed = False
        self._lock = threading.RLock()  # a signal handler may close the session

    def find(self, shape: Shape) -> KeptShape | None:
        """Return the KeptShape of a shape. None if the shape has no plans."""
        return self._kept.get(shape)

    def tick(self) -> int:
        """Return the number of uses so far, including this one."""
        return next(self._clock)

    def choose(self, shape: Shape, lanes: Sequence[Lane]) -> tuple[Lane, Branch]:
        """Return the lane for a run, and the branch that keeps the plans of its shape or may make them.

        Of the possible lanes in ``lanes``, it is the one with the smallest load.
        """
        kept_shape = self._kept.get(shape)
        if kept_shape is not None:
            kept_shape.used = self.tick()
            places = [place for place in kept_shape.places if place[0] in lanes]
            if places:
                return min(places, key=lambda place: place[0].load)
        lane = min((candidate for candidate in lanes if candidate.is_verified), key=lambda each: each.load)
        return lane, self.spare_branch(lane)

    def spare_branch(self, lane: Lane) -> Branch:
        """Return a branch of a lane without plans, or else the branch of the least recently used shape."""
        with this_thread.holds, self._lock:
            spare = [branch for branch in lane.branches if branch.shape is None] or lane.branches
            branch = min(spare, key=self._last_use)
            branch.claimed = self.tick()  # another thread takes another one
        return branch

    def _last_use(self, branch: Branch) -> int:
        kept_shape = self._kept.get(branch.shape) if branch.shape is not None else None
        return max(branch.claimed, kept_shape.used) if kept_shape is not None else branch.claimed

    def keep(self, shape: Shape, lane: Lane, branch: Branch, inputs: Mapping[str, tuple[int, ...]]) -> None:
        """Note that a branch has made the plans of a shape. A run that failed leaves the shapes as they were."""
        with this_thread.holds, self._lock:
            if self._is_closed:
                return
            if branch.shape is not None:
                self._forget(branch.shape)
            kept_shape = self._kept.get(shape)
            if kept_shape is None:
                if len(self._kept) == self._most:
                    self._forget(min(self._kept, key=lambda each: self._kept[each].used))
                kept_shape = self._kept[shape] = KeptShape(inputs, used=self.tick())
            if all(lane is not other for other, _ in kept_shape.places):  # Another thread may have made them.
                # Runs prefer the first place, so the lanes share the first places of all shapes.
                place, places = ((lane, branch),), kept_shape.places
                comes_first = not places or self._count_first(places[0][0]) > self._count_first(lane) + 1
                kept_shape.places = place + places if comes_first else places + place
                branch.shape = shape

    def _count_first(self, lane: Lane) -> int:
        return sum(kept.places[0][0] is lane for kept in self._kept.values() if kept.places)

    def _forget(self, shape: Shape) -> None:
        for _, branch in self._kept.pop(shape).places:
            branch.shape = None

    def add_lane(self, open_lane: Callable[[], Lane]) -> None:
        """Open a further lane with ``open_lane``, unless the plans are closed, and plan a first shape there."""
        lane = open_lane() if not self._is_closed else None
        with this_thread.holds, self._lock:
            if lane is not None and not self._is_closed:
                first = self.lanes[0]
                lane.place_as(first.session._pinned, first.runner)
                self.lanes = (*self.lanes, lane)
        if lane is not None and self._is_closed:
            lane.close()
        self.fill(1)

    def lacks(self) -> tuple[Lane, Shape] | None:
        """Return a lane, and a shape that is to be planned there. None if no lane lacks a shape.

        Lanes and shapes that have the fewest plans come first.
        """
        with this_thread.holds, self._lock:
            for lane in sorted(self.lanes, key=lambda each: sum(branch.shape is not None for branch in each.branches)):
                lacking = [
                    (len(kept.places), -kept.used, shape)
                    for shape, kept in self._kept.items()
                    if len(kept.places) < kept.wanted and all(lane is not place for place, _ in kept.places)
                ]
                if lacking and not lane.is_filled:
                    return lane, min(lacking, key=lambda each: each[:2])[2]
        return None

    def fill(self, most: int | None = None) -> None:
        """Plan up to ``most`` shapes in the lanes that lack them. Several threads may do so, each in another lane.

        Raises:
            ValueError: the results of two lanes differ.
            Exception: as the run of a session raises.
        """
        for _ in itertools.count() if most is None else range(most):
            with this_thread.holds, self._lock:
                lacking = self.lacks()
                if lacking is None:
                    return
                lane, shape = lacking
                lane.is_filled = True
            try:
                self._plan_in(lane, shape)
            finally:
                lane.is_filled = False

    def _plan_in(self, lane: Lane, shape: Shape) -> None:
        """Make the plans of a kept shape in a further lane, too."""
        kept_shape = self._kept.get(shape)
        if kept_shape is None or not kept_shape.places or kept_shape.feed is None:
            return
        home, source = kept_shape.places[0]
        branch = self.spare_branch(lane)
        expected = home.session.run(None, {**kept_shape.feed, **source.selectors})
        lane.is_planning = True
        try:
            results = lane.session.run(None, {**kept_shape.feed, **branch.selectors})
        finally:
            lane.is_planning = False
        if not agree(results, expected):
            raise ValueError("the results of two lanes differ")
        lane.is_verified = True
        self.keep(shape, lane, branch, kept_shape.inputs)

    def drop(self, lanes: Sequence[Lane]) -> None:
        """Close lanes. The first one must not be among them."""
        with this_thread.holds, self._lock:
            self.lanes = tuple(lane for lane in self.lanes if lane not in lanes)
            for shape, kept_shape in list(self._kept.items()):
                kept_shape.places = tuple(place for place in kept_shape.places if place[0] not in lanes)
                if not kept_shape.places:
                    del self._kept[shape]
        for lane in lanes:
            lane.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def kept(self) -> tuple[Shape, ...]:
        """Return the shapes with plans, the one that was used least recently first."""
        with this_thread.holds, self._lock:
            return tuple(sorted(self._kept, key=lambda shape: self._kept[shape].used))

    def inputs(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """Return the shapes of the inputs by name, in the order of :meth:`kept`."""
        with this_thread.holds, self._lock:
            return tuple(kept_shape.inputs for kept_shape in sorted(self._kept.values(), key=lambda kept: kept.used))

    def close(self) -> None:
        """Free the memory of the lanes once no run uses it."""
        with this_thread.holds, self._lock:
            self._is_closed = True
            self._kept = {}
        for lane in self.lanes:
            lane.close()
