"""The runner of a session with varying shapes: each shape that comes back gets a plan of its own.

ONNX Runtime's Conv keeps one cuDNN plan (conv.cc, 1.20 to 1.31). It makes a new plan if its input has another shape
than in the run before. That takes 40 to 140 ms. The runner measures whether shapes come back and whether their runs are
as slow as the first ones. Then a second session is made in a thread: :mod:`ortgpu.running.shape_plans`. It serves all
further runs if it proves faster, and if its results agree with the session's.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy import ndarray
from onnxruntime import OrtValue

from ..errors import GPUError, GPUOutOfMemoryError, PerformanceWarning
from ..process.background import holds_lock, is_of_a_handler, may_wait, this_thread
from ..process.threads import Executor, Outcome
from ..provider.living import stacklevel
from . import arena
from .kept_shapes import SessionShapes
from .pinned import memory_of
from .plain_runs import PlainRunner
from .results import agree
from .shape_returns import PATIENCE, Policy, Replanning, Returns, Shape, median
from .warming import arrays_of, types_of

if TYPE_CHECKING:
    from .onnxruntimes import Results
    from .plain_runs import RunningSession
    from .shape_plans import KeptShape, ShapePlans

logger = logging.getLogger("ortgpu")

_OPEN_AT_A_TIME = 4  # lanes
_FILL_AT_A_TIME = 2  # Lanes that plan serve no runs meanwhile.

Run = Callable[["RunningSession", PlainRunner, Mapping[str, Any]], Any]


class ShapedRunner(PlainRunner):
    """The runs of a session with cuDNN's plans and with inputs of several shapes.

    Args:
        first: the runner that makes the runs of the session itself.
        make: makes the plans for so many shapes. It must not refer to the session.
    """

    def __init__(
        self,
        session: RunningSession,
        first: PlainRunner,
        make: Callable[[int], ShapePlans],
        policy: Policy | None = None,
    ) -> None:
        super().__init__(session)
        self.submit = first.submit
        self.most_shapes = (policy or Policy()).most
        self._first = first
        self._make = make
        self._policy = policy or Policy()
        self._current: Shape | None = None  # the shape of the session's last run, while it has no plans
        self._returns = Returns(self._policy)
        self._replanning = Replanning(self._policy.window)
        self._bound: Shape | None = None  # the shape of the last run with an IOBinding
        self._bound_returns = Returns(self._policy)
        self._bound_replanning = Replanning(self._policy.window)
        self._lock = threading.RLock()
        self._plans: ShapePlans | None = None
        self._builder: Executor | None = None
        self._built: Outcome[None] | None = None
        self._is_closed = False
        self._patience = 1
        self._is_verified = False
        self._most_lanes = self._policy.lanes  # fewer once the GPU has no room; 0 once one fails
        self._at_once = 1  # the most runs at a time that were seen to wait
        self._spreader: Executor | None = None
        self._gains: list[float] | None = []  # times of planned runs over times of slow ones, until they are judged
        self.why_none: str | None = None  # why the session has no plans, once that is decided

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        """Run the model. Looking at the shapes takes a twentieth of a microsecond for each input."""
        if run_options is None and type(feed) is dict and len(feed) == self._input_count:
            shape: Shape = ()
            below = self._first._direct_below
            for name in self._input_names:
                value = feed.get(name)
                if type(value) is not ndarray or value.nbytes >= below:
                    break
                shape += value.shape
            else:
                if shape == self._current:
                    return session._sess.run(output_names or self._output_names, feed, None)
                if self._gains is None:
                    return self._run_kept(session, shape, output_names, feed)
        return self._run_indirectly(session, output_names, feed, run_options)

    def _run_kept(self, session: RunningSession, shape: Shape, output_names: Any, feed: Any) -> Results:
        """Run a shape that has plans, as :meth:`through` does but with fewer checks. Pass other shapes on to it."""
        plans = self._plans
        kept_shape = plans.find(shape) if plans is not None else None
        if plans is not None and kept_shape is not None:
            try:
                for lane, branch in kept_shape.places:
                    inner = lane.session._sess
                    if not inner.queue:
                        kept_shape.used = plans.tick()
                        self._replanning.quick += 1
                        feed_with_choice = {**feed, **branch.selectors}
                        results: Results = inner.run(output_names or self._output_names, feed_with_choice, None)
                        return results
            except Exception as error:
                if is_of_a_handler(error):
                    raise
                logger.debug("a run with plans failed: %s", str(error))
        return self._run_indirectly(session, output_names, feed, None)

    def _run_indirectly(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        if run_options is not None:
            return self._first.run(session, output_names, feed, run_options)

        def run(target: RunningSession, runner: PlainRunner, feed: Any) -> Any:
            return runner.run(target, output_names, feed, None)

        results: Results = self.through(session, feed, run)
        return results

    def through(self, session: RunningSession, feed: Any, run: Run) -> Any:
        """Return the result of ``run``, called for the session and its runner, or for a session of the plans."""
        shape = self.shape_of(feed)
        plans = self._plans
        if shape is None:
            return run(session, self._first, feed)
        if plans is not None:
            return self._run_planned(session, plans, shape, feed, run)
        if shape == self._current:
            return run(session, self._first, feed)
        began = time.perf_counter()
        results = run(session, self._first, feed)
        seconds = time.perf_counter() - began
        with this_thread.holds, self._lock:
            if self._plans is None:  # Another thread may have made plans meanwhile.
                self._current = shape
        is_slow = self._returns.note(shape, seconds)
        if self.why_none is not None:
            self._note_change(session, seconds, planned=is_slow)
        elif self._returns.suffice:
            self._begin(session)
        return results

    def note_bound(self, session: RunningSession, binding: Any, began: float) -> None:
        """Warn of runs with an IOBinding that plan again and again: they run the session itself, with one plan."""
        shape = getattr(binding, "shape", None)
        if shape == self._bound or shape is None:
            return
        seconds, self._bound = time.perf_counter() - began, shape
        if self._bound_replanning.note(seconds, planned=self._bound_returns.note(shape, seconds)):
            _warn(session, self._bound_replanning, "runs with an IOBinding keep the plan of one shape, others of more")

    def stages(self, feed: Any) -> bool:
        return self._first.stages(feed)

    def close(self, error: GPUError) -> None:
        """Free the plans. This waits for threads that make them: with closed plans they end soon."""
        self._is_closed = True
        self._first.close(error)
        self._give_up("the session is closed")
        for executor in (self._builder, self._spreader):
            if executor is not None:
                executor.close()

    def kept(self) -> tuple[Shape, ...]:
        """Return the shapes that have plans, the one that was used least recently first."""
        return self._plans.kept() if self._plans is not None else ()

    def bytes_held(self) -> int | None:
        """Return the bytes of GPU memory of the plans; None if they are unknown. See ``memory.Holder``."""
        plans = self._plans
        if plans is None:
            return 0
        sizes = [arena.reserved_bytes(lane.session) for lane in plans.lanes if lane.session is not None]
        known_sizes = [size for size in sizes if size is not None]
        return sum(known_sizes) if len(known_sizes) == len(sizes) else None

    def give_back(self) -> None:
        """Free the plans. They are made again once many more shapes have come back."""
        with this_thread.holds, self._lock:
            plans, self._plans = self._plans, None
            if plans is not None:
                self._patience *= PATIENCE
                self._returns = Returns(
                    dataclasses.replace(self._policy, returns=self._policy.returns * self._patience)
                )
                self._built = None
                self._is_verified = False
                self._most_lanes = self._policy.lanes
                self._gains = []
        if plans is not None:
            plans.close()

    @property
    def own(self) -> PlainRunner:
        return self._first

    def prepare(self, session: RunningSession, feeds: Sequence[Mapping[str, Any]]) -> bool:
        if self._plans is None and self.why_none is None and self._are_slow(session, feeds):
            self._begin(session)
            built = self._built
            if built is not None and may_wait():
                built.wait()
        return self._plans is not None

    def widen(self, session: RunningSession, feeds: Sequence[Mapping[str, Any]], runs: int) -> None:
        plans = self._plans
        for feed in feeds if plans is not None and runs > 1 else ():
            shape = self.shape_of(feed)
            kept_shape = plans.find(shape) if plans is not None and shape is not None else None
            if kept_shape is not None:
                self._want(session, kept_shape, feed, runs)
        outcome = self._spread(plans, runs, runs) if plans is not None else None
        if outcome is not None and may_wait():
            outcome.wait()

    def _are_slow(self, session: RunningSession, feeds: Sequence[Mapping[str, Any]]) -> bool:
        """Run feeds in turn, and return True if those that come back are slow: if each run plans again."""
        for feed in (*feeds, *feeds):
            session.run(None, dict(feed))
        return bool(self._returns.slow)

    def shapes(self) -> SessionShapes:
        plans = self._plans
        return SessionShapes(plans.inputs() if plans is not None else (), self.most_shapes, self.why_none)

    def shape_of(self, feed: Any) -> Shape | None:
        """Return the shapes of the arrays of a feed; None if a value is no tensor.

        It only chooses a plan: two feeds with one ``Shape`` and different shapes would be slow, and not wrong.
        """
        shape: Shape = ()
        try:
            if len(feed) == self._input_count:
                for name in self._input_names:
                    shape += _shape(feed[name])
            else:
                for name in feed:
                    shape += (name, *_shape(feed[name]))
        except (AttributeError, KeyError, TypeError, RuntimeError):
            return None
        return shape

    def _begin(self, session: RunningSession) -> None:
        """Make the plans in a thread, once."""
        with this_thread.holds, self._lock:
            if self._built is not None or self._is_closed:
                return
            self._built = Outcome()
            builder = self._builder = Executor(1, "ortgpu-shapes")
        logger.debug("shapes of a session come back, and each is planned again: making plans for them")
        builder.submit(self._built, _build, weakref.ref(self), self._make, self._policy.most, builder)

    def _take(self, plans: ShapePlans | None, why_none: str) -> None:
        """Take the plans that were made, or the reason why there are none."""
        with this_thread.holds, self._lock:
            if plans is not None and not self._is_closed:
                self._current, self._plans = None, plans
                plans = None
            else:
                self.why_none = self.why_none or why_none
            self._builder = None  # its thread ends
        if plans is not None:
            plans.close()

    def _give_up(self, why: str) -> None:
        with this_thread.holds, self._lock:
            plans, self._plans = self._plans, None
            self.why_none = self.why_none or why
        if plans is not None:
            plans.close()
            logger.debug("a session has no plans for its shapes any more: %s", why)

    def _run_planned(
        self,
        session: RunningSession,
        plans: ShapePlans,
        shape: Shape,
        feed: Any,
        run: Run,
        most: int | None = None,
    ) -> Any:
        """Run a shape in the lane that is free, of the first ``most``."""
        if holds_lock():  # a handler or finalizer amid another run, and a lane makes one run at a time
            return run(session, self._first, feed)
        first, kept_shape = plans.lanes[0], plans.find(shape)
        lane, branch = plans.choose(shape, plans.lanes[:most])
        target, runner, is_new = lane.session, lane.runner, branch.shape != shape
        if target is None:  # another thread gave them up
            return run(session, self._first, feed)
        if not self._is_verified:
            lane.place_as(memory_of(session), self._first)
        if kept_shape is not None and lane.queue and self._gains is None:
            self._note_wait(session, plans, kept_shape, feed)
        began = time.perf_counter()
        try:
            lane.is_planning = lane.is_planning or is_new
            results = run(target, runner, {**feed, **branch.selectors})
        except Exception as error:
            if is_of_a_handler(error):
                raise
            del target, runner  # their memory is free once the plans are given up
            if lane is not first:
                return self._run_in_first_lane(session, plans, shape, feed, run)
            return self._run_after(error, session, feed, run)
        finally:
            lane.is_planning = lane.is_planning and not is_new
        seconds = time.perf_counter() - began
        if is_new:
            plans.keep(shape, lane, branch, {name: _shape(value) for name, value in feed.items()})
        if not self._is_verified:
            return self._verified(session, feed, run, results)
        if self._gains is not None:
            self._judge(shape, seconds, is_new=is_new)
        self._note_change(session, seconds, planned=is_new)
        return results

    def _run_in_first_lane(self, session: RunningSession, plans: ShapePlans, shape: Shape, feed: Any, run: Run) -> Any:
        """Run a shape again, after its run in a further lane failed. The first lane has more memory."""
        results = self._run_planned(session, plans, shape, feed, run, 1)
        logger.debug("a session goes on without further lanes: a run there failed, and not in the first one")
        self._most_lanes = 0
        plans.drop(plans.lanes[1:])
        return results

    def _note_wait(self, session: RunningSession, plans: ShapePlans, kept: KeptShape, feed: Mapping[str, Any]) -> None:
        """Note that a run waits for others. Have threads open further lanes if many runs of its shape do."""
        self._at_once = max(self._at_once, 1 + sum(lane.queue for lane in plans.lanes))
        now = time.monotonic()
        if now - kept.since > self._policy.waited:
            kept.since, kept.waits = now, 0
        kept.waits += 1
        if kept.waits < self._policy.waits:
            return
        kept.since, kept.waits = now, 0
        self._want(session, kept, feed, len(kept.places) + 1)
        self._spread(plans, self._at_once, _FILL_AT_A_TIME)

    def _want(self, session: RunningSession, kept: KeptShape, feed: Mapping[str, Any], wanted: int) -> None:
        try:
            if kept.feed is None:
                # A copy, since the caller may write to its arrays once the run has ended
                copies = {
                    name: value.copy() if isinstance(value, ndarray) else _shape(value) for name, value in feed.items()
                }
                kept.feed = arrays_of(copies, types_of(session))
            kept.wanted = wanted
        except (ValueError, TypeError, MemoryError) as error:  # The type has no arrays.
            logger.debug("a shape gets no further lane: %s", str(error))

    def _spread(self, plans: ShapePlans, at_once: int, fillers: int) -> Outcome[None] | None:
        """Have threads open lanes for so many runs at a time, and plan the shapes that lanes lack."""
        further = min(self._most_lanes, at_once) - len(plans.lanes)
        if further <= 0 and plans.lacks() is None:
            return None
        with this_thread.holds, self._lock:
            if self._is_closed or not self._most_lanes or self._spreader is not None:
                return None
            spreader = self._spreader = Executor(1 + max(_OPEN_AT_A_TIME, fillers), "ortgpu-shapes")
        outcome: Outcome[None] = Outcome()
        spreader.submit(outcome, _spread, weakref.ref(self), plans, further, fillers, spreader)
        return outcome

    def _end_spread(self, most_lanes: int | None) -> None:
        with this_thread.holds, self._lock:
            if most_lanes is not None:
                self._most_lanes = most_lanes
            self._spreader = None  # its threads end

    def _run_after(self, error: Exception, session: RunningSession, feed: Any, run: Run) -> Any:
        """Run the session itself after its plans failed. Give the plans up unless the feed is to blame."""
        why = f"a run with them failed: {type(error).__name__}: {error}"
        has_no_room = isinstance(session._gpu_explained(error), GPUOutOfMemoryError)
        del error  # its frames hold the run's arrays
        if has_no_room:
            self._give_up("the GPU has no room for them")
        results = run(session, self._first, feed)
        if not has_no_room:
            self._give_up(why)
        logger.warning("a session continues without plans for its shapes: %s", self.why_none)
        return results

    def _verified(self, session: RunningSession, feed: Any, run: Run, results: Any) -> Any:
        """Compare the first results of the plans with the session's results, and return the latter.

        The file of the model may have changed since it was opened, for instance.
        """
        expected = run(session, self._first, feed)
        if agree(results, expected):
            self._is_verified = True
            arena.shrink(session)  # The session itself has no further runs to make.
        else:
            self._give_up("their results differ from those of the session")
            logger.warning("a session has no plans for its shapes: %s", self.why_none)
        return expected

    def _judge(self, shape: Shape, seconds: float, *, is_new: bool) -> None:
        """Give the plans up if runs with them are no faster than slow ones: a release may keep plans by itself."""
        slow, gains = self._returns.slow.get(shape), self._gains
        if is_new:
            self._returns.slow[shape] = seconds
        if is_new or slow is None or gains is None:
            return
        gains.append(seconds / slow)
        if len(gains) >= self._policy.judged:
            if median(gains) > self._policy.worth:
                self._give_up("they are no faster than the session itself")
            self._gains = None

    def _note_change(self, session: RunningSession, seconds: float, *, planned: bool) -> None:
        if self._replanning.note(seconds, planned=planned):
            what = (
                f"this session has plans for {self._policy.most} shapes, and its inputs have more"
                if self._plans is not None
                else f"this session has no plans for several shapes: {self.why_none}"
            )
            _warn(session, self._replanning, what)


def _warn(session: RunningSession, replanning: Replanning, why: str) -> None:
    text = f"{replanning}; {why}. Use fewer shapes: pad inputs to a few sizes, for instance"
    warnings.warn(text, PerformanceWarning, stacklevel=stacklevel(session))


def _build(
    runner: weakref.ref[ShapedRunner], make: Callable[[int], ShapePlans], most: int, _executor: Executor
) -> None:
    plans, why = None, ""
    try:
        plans = make(most)
    except Exception as error:  # noqa: BLE001 - a session goes on without plans, whatever kept them from being made
        why = f"{type(error).__name__}: {error}"
        logger.info("a session has no plans for its shapes: %s", why)
    taker = runner()
    if taker is not None:
        taker._take(plans, why)
    elif plans is not None:
        plans.close()


def _spread(runner: weakref.ref[ShapedRunner], plans: ShapePlans, count: int, fillers: int, executor: Executor) -> None:
    """Open so many further lanes, and plan the shapes that lanes lack, in so many threads.

    Other threads of ``executor`` open and plan. Each lane first gets one shape, so that it soon serves.
    """
    failures: list[str] = []
    wanted = len(plans.lanes) + max(0, count)

    def in_threads(number: int, function: Callable[..., None], *arguments: Any) -> None:
        outcomes: list[Outcome[None]] = []
        try:
            for _ in range(number):
                outcome: Outcome[None] = Outcome()
                executor.submit(outcome, _noting, failures, function, *arguments)
                outcomes.append(outcome)
        finally:
            for outcome in outcomes:
                outcome.wait()

    def open_lanes() -> None:
        with plans.opening(count) as (number, open_lane):
            in_threads(number, plans.add_lane, open_lane)

    if count > 0:
        _noting(failures, open_lanes)
    if not failures:
        _noting(failures, in_threads, fillers, plans.fill)
    if failures:  # Runs go on in the lanes that there are.
        logger.debug("a shape gets no further lane: %s", failures[0])
        plans.drop([lane for lane in plans.lanes if not lane.is_verified])
    most_lanes = None
    if not plans.is_closed and (failures or len(plans.lanes) < wanted):
        most_lanes = 0 if failures else len(plans.lanes)
    taker = runner()
    if taker is not None:
        taker._end_spread(most_lanes)


def _noting(failures: list[str], function: Callable[..., None], *arguments: Any) -> None:
    """Call a function. Note the text of its error alone, since the error would keep frames and their memory."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - a session goes on without what failed
        failures.append(f"{type(error).__name__}: {error}")


def _shape(value: Any) -> Shape:
    """Return the shape of an array or an OrtValue. Raises TypeError or RuntimeError for other values."""
    if isinstance(value, ndarray):
        return tuple(value.shape)
    if isinstance(value, OrtValue) and getattr(value, "_session", None) is None:  # No session owns the value.
        return tuple(value.shape())
    raise TypeError("no tensor of ONNX Runtime's")
