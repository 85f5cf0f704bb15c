"""Many feeds through a session at a time, results in order: what ``GPUSession.map`` does.

Concurrent runs of one session each have a stream of their own, so while one computes, others copy in and out. Threads
that call ``run`` are therefore all it takes; pinned memory lets the copies run at full speed.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

from ..process.signals import is_of_a_handler
from ..process.threads import Executor, Outcome
from ..provider import lifetime
from .pinned import memory_of

Feed = TypeVar("Feed")
Result = TypeVar("Result")

# See FeedCopies.of
Copy = Callable[[Feed, Iterable[Callable[[], object]]], tuple[Feed, bool]]

# Two threads with pinned arrays reach what an H200 can do with batches of 8 and more; batches of 1 gain up to four.
THREADS = 4

# Bytes of an array from which on `run` copies it in threads. Smaller ones each of our threads copies for its own feed.
_COPIED_BY_RUN_FROM = 32 << 20


def map_session(
    session: Any, feeds: Iterable[Mapping[str, Any]], in_flight: int | None, output_names: Any
) -> Iterator[Any]:
    """See GPUSession.map."""
    from .device_arrays import with_values
    from .feed_copies import copies_for

    lifetime.refuse_if_unusable(session)
    source, ahead = check_arguments(feeds, in_flight, 2 * THREADS)
    output_names = for_many_runs(output_names)

    def convert(feed: Any) -> Any:
        return with_values(session, feed) or as_it_is_now(feed)

    copy = copies_for(session).of if may_be_written_to(feeds, ahead) else None
    # Arrays of other libraries are converted here: only the thread that made them knows the stream that it used. Not in
    # a generator, which keeps a feed until it is asked for the next.
    converted = map(convert, source)
    run = functools.partial(staged_run, session, output_names)
    if session._capturing is None:
        return _in_threads(run, converted, ahead, min(THREADS, ahead), copy)
    return _captured_in_order(session, run, converted, ahead, copy)


def may_be_written_to(feeds: Any, in_flight: int) -> bool:
    """Whether the caller may write to a feed that has been taken before it is run: who makes one when he is asked for
    it, and is asked before."""
    return type(feeds) not in (list, tuple) and in_flight > 1


def as_it_is_now(feed: Any) -> Any:
    """The same arrays in a dict of our own: a caller may fill his again for the next feed, before this one is run."""
    return dict(feed) if isinstance(feed, Mapping) else feed


def staged_run(session: Any, output_names: Any, feed: Mapping[str, Any]) -> Any:
    """``session.run`` with the arrays of the feed in pinned memory: copied there by this thread, where ``run`` does not
    copy them in several.

    Raises:
        TypeError: the feed is no mapping.
        Exception: as ``run``.
    """
    if not isinstance(feed, Mapping):
        raise TypeError(f"a feed is a mapping of input names to arrays, not {type(feed).__name__}")
    if session._staging is not None and session._staging.has_input_of(feed, _COPIED_BY_RUN_FROM):
        return session.run(output_names, feed)
    return session.run(output_names, memory_of(session).staged(feed))


def _captured_in_order(
    session: Any, run: Callable[[Any], Result], feeds: Iterator[Any], in_flight: int, copy: Copy[Any] | None
) -> Iterator[Result]:
    """As :func:`in_order`, of a session whose runs come one after the other in a thread that it keeps.

    What is not to be staged goes straight there: the way through two threads takes longer than many a replay.
    """
    with _threads(THREADS) as executor:

        def submit(feed: Any, outcome: Outcome[Result]) -> None:
            capturing = session._capturing
            to = executor if capturing is None or memory_of(session).would_stage(feed) else capturing
            to.submit(outcome, run, feed)

        yield from results_of(submit, feeds, in_flight, copy)


def in_order(
    function: Callable[[Feed], Result], feeds: Iterable[Feed], in_flight: int | None, threads: int
) -> Iterator[Result]:
    """Results of ``function`` for each of ``feeds``, in their order, computed in up to ``threads`` threads.

    See :func:`results_of`; ``in_flight`` None is twice the threads.
    """
    source, ahead = check_arguments(feeds, in_flight, 2 * threads)
    return _in_threads(function, source, ahead, min(threads, ahead), None)


def check_arguments(feeds: Iterable[Feed], in_flight: int | None, default: int) -> tuple[Iterator[Feed], int]:
    """The feeds, and how many of them may be in flight. Raises TypeError, ValueError."""
    most = default if in_flight is None else operator.index(in_flight)
    if most < 1:
        raise ValueError(f"in_flight must be at least 1, not {most}")
    if isinstance(feeds, Mapping):
        raise TypeError("feeds must be an iterable of feeds, not one feed: pass that to run, or in a list")
    return iter(feeds), most


def for_many_runs(output_names: Any) -> Any:
    """The names of an iterator as a list: the first run would leave none for the second."""
    return list(output_names) if isinstance(output_names, Iterator) else output_names


def _in_threads(
    function: Callable[[Feed], Result], feeds: Iterator[Feed], in_flight: int, threads: int, copy: Copy[Feed] | None
) -> Iterator[Result]:
    with _threads(threads) as executor:
        yield from results_of(lambda feed, outcome: executor.submit(outcome, function, feed), feeds, in_flight, copy)


def results_of(
    submit: Callable[[Feed, Outcome[Result]], object],
    feeds: Iterator[Feed],
    in_flight: int,
    copy: Copy[Feed] | None,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> Iterator[Result]:
    """Results of what ``submit`` starts for each of ``feeds``, in their order. It is called with an outcome to fill.

    At most ``in_flight`` feeds have been taken and their results not handed out. Feeds are taken in the thread that
    iterates, and copied there by ``copy`` if there is one; the next is then not asked for while a run may read what is
    the caller's. An exception, of a run or of the feeds, comes out at its place, and ends the iteration. However that
    ends, what has not begun is cancelled, and what has is waited for.
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
                pending.append(outcome)  # before it is started: what an interrupt comes after is waited for at the end
                try:
                    feed, is_copied = next(feeds), True
                    if copy is not None:
                        feed, is_copied = copy(feed, [each.wait for each in pending][:-1])
                    submit(feed, outcome)
                    del feed  # the caller's array must not outlive its result here
                    if not is_copied:
                        outcome.wait()
                except StopIteration:
                    ended = True
                    pending.pop()
                except Exception as raised:
                    if is_of_a_handler(raised):  # a time limit may be up long before its place
                        raise
                    ended = True
                    outcome.fail(raised)  # after the results of the feeds before it
                del outcome
            if not pending:
                break
            pending[0].wait()  # an interrupt meanwhile leaves it among those that are waited for at the end
            yield pending.popleft().result()
    finally:
        # By argument: at the end of the interpreter this module has no names left. Its threads have ended by then.
        if not is_finalizing() and os.getpid() == pid:
            begun = [outcome for outcome in pending if not outcome.cancel()]
            if _may_wait():
                for outcome in begun:
                    outcome.wait()


@contextlib.contextmanager
def _threads(most: int, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> Iterator[Executor]:
    executor = Executor(most, "ortgpu-map")
    try:
        yield executor
    finally:
        if not is_finalizing():  # as in results_of
            if _may_wait():
                executor.close()
            else:
                executor.stop()


def _may_wait() -> bool:
    """Whether this thread may wait for those of an iteration.

    The garbage collector ends one that was dropped in whatever thread it works, and wherever that is: one that runs a
    feed would wait for itself, and with a lock held for who waits for that.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_globals.get("_WORKS_AT_FEEDS"):
        frame = frame.f_back
    return frame is None
