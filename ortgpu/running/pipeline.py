"""The implementation of ``GPUSession.map``: many feeds at a time, with results in order.

Concurrent runs of a session use separate streams, so some runs copy while another computes. Threads that call ``run``
are therefore enough. Pinned memory lets the copies run at full speed. Runs so short that threads only delay them are
made by the thread that iterates.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..process.background import Thread, is_of_a_handler, may_wait_for_runs
from ..process.late import late
from ..process.threads import Executor, Outcome, drop_own_frames
from ..provider import lifetime
from ..provider.settings import DEPTH, MAP_DEPTH, STAGING
from .pinned import may_be_staged, memory_of

if TYPE_CHECKING:
    from . import device_arrays, feed_copies
    from .plain_runs import RunningSession
else:
    device_arrays, feed_copies = late("ortgpu.running.device_arrays"), late("ortgpu.running.feed_copies")

Feed = TypeVar("Feed")
Result = TypeVar("Result")

# See FeedCopies.of
Copy = Callable[[Feed, Iterable[Callable[[], object]]], tuple[Feed, bool]]

_SHORT = 1e-3  # seconds: runs in the iterating thread are tried for shorter feeds
_BLOCK = 4  # times the feeds in flight are timed together, since threads take feeds in bursts
_FIRST = 2  # feeds that the iterating thread runs before it is timed
_KEPT = 64, 1024  # blocks until both ways are timed again: the first time, and at most


def map_session(
    session: RunningSession, feeds: Iterable[Mapping[str, Any]], in_flight: int | None, output_names: Any
) -> Iterator[Any]:
    """Yield the results of ``session`` for ``feeds``; see GPUSession.map."""
    lifetime.refuse_if_unusable(session)
    options = session._verified.options_chosen
    threads = int(options[DEPTH][0]) if DEPTH in options else MAP_DEPTH
    source, ahead = check_arguments(feeds, in_flight, 2 * threads)
    output_names = copy_names(output_names)
    wrap_arrays = device_arrays.wrap_arrays

    def convert(feed: Any) -> Any:
        return wrap_arrays(session, feed) or copy_feed(feed)

    def run_inline(feed: Any) -> Any:
        return session.run(output_names, mapping(feed))

    copy = feed_copies.copies_for(session).of if may_be_written_to(feeds, ahead) else None
    run = run_inline if STAGING in options else functools.partial(staged_run, session, output_names)

    def run_in_threads(feeds: Iterator[Any]) -> Iterator[Any]:
        # Convert arrays of other libraries in this thread, since only the thread that made them knows their stream. Use
        # map, because a generator would keep a feed until the next is requested.
        return iterate_in_order(run, map(convert, feeds), ahead, threads, copy, session._gpu_runner.submit)

    if ahead == 1:
        return run_in_threads(source)
    return _choose_while_running(session, source, ahead, run_in_threads, run_inline)


def may_be_written_to(feeds: Any, in_flight: int) -> bool:
    """Return True if the caller may write to a feed after it was taken and before it runs.

    A generator may do this if it is asked for the next feed before the last one has run.
    """
    return type(feeds) not in (list, tuple) and in_flight > 1


def copy_feed(feed: Any) -> Any:
    """Return a new dict with the same arrays, since the caller may reuse the dict before this feed runs."""
    return dict(feed) if isinstance(feed, Mapping) else feed


def staged_run(session: RunningSession, output_names: Any, feed: Mapping[str, Any]) -> Any:
    """Call ``session.run`` with the arrays of the feed in pinned memory.

    This thread copies them there, unless ``run`` copies them itself in several threads.

    Raises:
        TypeError: the feed is no mapping.
        Exception: as ``run`` raises.
    """
    if type(feed) is not dict:
        mapping(feed)
    if session._gpu_runner.stages(feed) or not any(map(may_be_staged, feed.values())):
        return session.run(output_names, feed)
    return session.run(output_names, memory_of(session).staged(feed))


def mapping(feed: Any) -> Any:
    """Return ``feed``. Raises TypeError if it is no mapping."""
    if not isinstance(feed, Mapping):
        raise TypeError(f"a feed is a mapping of input names to arrays, not {type(feed).__name__}")
    return feed


def _choose_while_running(
    session: RunningSession,
    feeds: Iterator[Feed],
    in_flight: int,
    in_threads: Callable[[Iterator[Feed]], Iterator[Result]],
    in_line: Callable[[Feed], Result],
) -> Iterator[Result]:
    """Yield the results of each stretch of feeds. The session's next iteration begins in the last way of this one."""
    runner = session._gpu_runner
    # Taken from the runner, so that iterations at the same time do not share it.
    pace, runner.pace = runner.pace or Pace(), None
    pace.begin(feeds, in_flight)
    try:
        while not pace.has_ended:
            yield from map(in_line, pace) if pace.in_line else in_threads(pace)
    except Exception as error:  # noqa: BLE001 - it is raised again
        raise drop_own_frames(error)  # noqa: B904 - the same error
    finally:
        pace.end()
        runner.pace = pace


class Pace(Iterator[Any]):
    """Feeds in stretches: threads and the iterating thread run them alternately.

    Passing a feed to another thread and its result back takes longer than a short run. Both ways are timed, with the
    caller's own work between results, and the faster one is kept for many feeds. Threads keep feeds that take longer
    than a millisecond. One object serves the iterations of a session, one after another: they may be too short for both
    ways to be timed in one.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.in_line = False  # the way of this stretch; at its end, of the next
        self.has_ended = True
        self._feeds: Iterator[Any] = iter(())
        self._block = self._left = 0  # the number of feeds that are timed together, and the rest of it
        self._clock = clock
        self._began = 0.0  # when the block began, as if iterations followed each other at once
        self._spent = 0.0  # seconds of the block up to the end of the last iteration
        self._most = 0.0  # seconds of a block of short feeds
        self._limit = 0.0  # seconds after which a block in the iterating thread cannot be the faster one
        self._is_timed = False  # the block after a change of ways is not
        self._in_threads: float | None = None  # seconds of the last block, while the other way is tried
        self._due = 0  # blocks until both ways are timed
        self._kept = _KEPT[0]

    def begin(self, feeds: Iterator[Any], in_flight: int) -> None:
        """Begin an iteration. Its threads take ``in_flight`` feeds ahead."""
        self._feeds, self.has_ended = feeds, False
        if self._block != _BLOCK * in_flight:
            self._block = self._left = _BLOCK * in_flight
            self._most = self._limit = _SHORT * self._block
            self._spent, self._is_timed, self._in_threads = 0.0, False, None
        self._began = self._clock() - self._spent

    def end(self) -> None:
        """End an iteration. The time until the next one does not count."""
        self._spent = self._clock() - self._began
        self._feeds = iter(())

    def __next__(self) -> Any:
        if not self._left or (self.in_line and self._is_timed and self._clock() - self._began > self._limit):
            in_line = self.in_line
            self._judge()
            if self.in_line is not in_line:
                raise StopIteration
        self._left -= 1
        try:
            return next(self._feeds)
        except BaseException:
            self.has_ended = True
            raise

    def _judge(self) -> None:
        """Choose the way of the next block, by the time of the last one."""
        now, was_in_line = self._clock(), self.in_line
        took = now - self._began
        if self._is_timed:
            if self._in_threads is not None:
                self.in_line = took < self._in_threads
                self._in_threads, self._due = None, self._kept
                self._kept = min(2 * self._kept, _KEPT[1])
            elif took > self._most:  # Feeds are long, or the caller paused. Try the other way again soon.
                self.in_line, self._due = False, 0
            elif self._due:
                self._due -= 1
            elif self.in_line:
                self.in_line = False
            else:
                self._in_threads, self.in_line = took, True
        self._is_timed = self.in_line is was_in_line
        self._left = _FIRST if self.in_line and not self._is_timed else self._block
        self._limit = min(self._most, self._in_threads or self._most)
        self._began = now


def check_arguments(feeds: Iterable[Feed], in_flight: int | None, default: int) -> tuple[Iterator[Feed], int]:
    """Return an iterator of the feeds and the number that may be in flight. Raises TypeError, ValueError."""
    most = default if in_flight is None else operator.index(in_flight)
    if most < 1:
        raise ValueError(f"in_flight must be at least 1, not {most}")
    if isinstance(feeds, Mapping):
        raise TypeError("feeds must be an iterable of feeds, not one feed: pass that to run, or in a list")
    return iter(feeds), most


def copy_names(output_names: Any) -> Any:
    """Return the names as they are now: the caller may change a list, and the first run would use an iterator up."""
    return list(output_names) if isinstance(output_names, (list, tuple, Iterator)) else output_names


def iterate_in_order(
    function: Callable[[Feed], Result],
    feeds: Iterator[Feed],
    in_flight: int,
    threads: int,
    copy: Copy[Feed] | None = None,
    submit: Callable[..., object] | None = None,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> Iterator[Result]:
    """Yield the result of ``function`` for each of ``feeds``, in their order, from up to ``threads`` threads.

    ``submit`` replaces Executor.submit. See :func:`results_of`.
    """
    if not may_wait_for_runs():  # the threads may need what this one holds
        yield from map(function, feeds)
        return
    start = submit or Executor.submit
    executor = Executor(min(threads, in_flight), "ortgpu-map")
    try:
        yield from results_of(lambda feed, outcome: start(executor, outcome, function, feed), feeds, in_flight, copy)
    finally:
        if not is_finalizing():  # as in results_of
            if _may_wait():
                executor.close()
            else:
                executor.stop()


def results_of(
    submit: Callable[[Feed, Outcome[Result]], object],
    feeds: Iterator[Feed],
    in_flight: int,
    copy: Copy[Feed] | None,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> Iterator[Result]:
    """Yield a result for each of ``feeds``, in their order. ``submit`` starts a run that fills the given outcome.

    At most ``in_flight`` feeds have been taken without their results being yielded. The iterating thread takes the
    feeds and copies them by ``copy`` if it is given. It asks for no further feed while a run may read an array of the
    caller. An exception of a run or of the feeds is raised in its place and ends the iteration. When the iteration
    ends, runs that have not begun are cancelled, and the others are waited for.
    """
    pid = os.getpid()
    pending: deque[Outcome[Result]] = deque()
    ended = False
    try:
        while True:
            if os.getpid() != pid:
                raise lifetime.forked(
                    "this iteration's threads stayed in the process that was forked",
                    f"map was called in process {pid}; this is process {os.getpid()}",
                    pid,
                )
            while not ended and len(pending) < in_flight:
                outcome: Outcome[Result] = Outcome()
                pending.append(outcome)  # first, so that the end waits for it even after an interrupt
                try:
                    feed, is_copied = next(feeds), True
                    if copy is not None:
                        feed, is_copied = copy(feed, [earlier.wait for earlier in pending][:-1])
                    submit(feed, outcome)
                    del feed  # the caller's array must not outlive its result here
                    if not is_copied:
                        outcome.wait()
                except StopIteration:
                    ended = True
                    pending.pop()
                except Exception as raised:
                    if is_of_a_handler(raised):  # a time limit must not wait for its place
                        raise
                    ended = True
                    pending[-1] = outcome = Outcome()  # frames of the error refer to the other one
                    outcome.fail(raised)  # after the results of the feeds before it
                del outcome
            if not pending:
                break
            pending[0].wait()  # stays pending meanwhile, so that after an interrupt the end waits for it
            yield pending.popleft().result()
    finally:
        # An argument, since at the end of the interpreter the names of this module are gone; so are its threads.
        if not is_finalizing() and os.getpid() == pid:
            running = [outcome for outcome in pending if not outcome.cancel()]
            if _may_wait():
                for outcome in running:
                    outcome.wait()


def _may_wait() -> bool:
    """Return True if this thread may wait for the threads of an iteration.

    The garbage collector may end a dropped iteration in any thread, at any point. A thread of this library may run one
    of its feeds, and would wait for itself. A thread that holds a lock, or has the next turn, would wait for a thread
    that needs it.
    """
    return may_wait_for_runs() and not isinstance(threading.current_thread(), Thread)
