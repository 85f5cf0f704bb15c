"""Measurements of pool.py inside one process, alternately. Started by workers.py."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.throughput_workers import DIFFERENT_FEEDS, refilled, relative_error, take_turns
from benchmarks.workers import feed_of
from tests.support.children import report
from tests.support.plain_session import plain_session

PLAIN_THREADS = 3  # of a session: what brings plain ONNX Runtime to its limit


def pool(model: str, gpus: int, batch: int, batches: int, rounds: int, device: str, *, reused: bool = False) -> None:
    """Report the mean seconds of a batch, of ``batches`` for each GPU: a pool, plain sessions, a pool of one GPU.

    Each plain session has its share beforehand: nobody has to be told which of them is free. With ``reused``, ours get
    theirs from a generator that fills one array again.
    """
    from ortgpu import GPUSessionPool

    sessions = [plain_session(model, device, ordinal) for ordinal in range(gpus)]
    feeds = [feed_of(sessions[0], batch, seed) for seed in range(DIFFERENT_FEEDS)]
    one_feed = feed_of(sessions[0], batch, DIFFERENT_FEEDS)

    def share(count: int) -> Iterator[dict[str, Any]]:
        return itertools.islice(itertools.cycle(feeds), batches * count)

    def some() -> Any:
        return refilled(one_feed, 4 * DIFFERENT_FEEDS) if reused else feeds

    def given(count: int) -> Iterator[dict[str, Any]]:
        return refilled(one_feed, batches * count) if reused else share(count)

    def plain() -> None:
        with contextlib.ExitStack() as stack:
            results = [
                stack.enter_context(ThreadPoolExecutor(PLAIN_THREADS)).map(
                    functools.partial(session.run, None), share(1)
                )
                for session in sessions
            ]
            for each in results:
                deque(each, 0)

    def ours(opened: Any) -> Callable[[], None]:
        # On one GPU as many batches as on all: the share of a single one would be over before all threads have begun.
        def all_of_them() -> None:
            deque(opened.map(given(gpus)), 0)

        return all_of_them

    with (
        GPUSessionPool(model, range(gpus), allow_cpu=device == "cpu") as several,
        GPUSessionPool(model, [0], allow_cpu=device == "cpu") as one,
    ):
        kinds = {each.kind for each in several.devices}
        if kinds != {device}:
            raise RuntimeError(f"the pool is on {', '.join(kinds)}")
        expected = [sessions[0].run(None, feed) for feed in some()]
        errors = [relative_error(found, right) for found, right in zip(several.map(some()), expected, strict=True)]
        report("largest error", max(errors))
        actions = {"ours": ours(several), "plain": plain, "ours, one GPU": ours(one)}
        take_turns(actions, gpus * batches, rounds)


def isolated(model: str, gpus: int, batch: int, batches: int, rounds: int, device: str) -> None:
    """Report the mean seconds of a batch, of ``batches`` for each GPU: a pool with processes, and one with threads.

    Both get a list, and so copy nothing twice. ``batch`` is in floats for the model without any work of its own.
    """
    from ortgpu import GPUSessionPool

    plain = plain_session(model, device, 0)
    feeds = [feed_of(plain, batch, seed) for seed in range(DIFFERENT_FEEDS)]
    given = list(itertools.islice(itertools.cycle(feeds), batches * gpus))
    options = {"allow_cpu": device == "cpu"}

    with (
        GPUSessionPool(model, range(gpus), isolate=True, **options) as processes,
        GPUSessionPool(model, range(gpus), **options) as threads,
    ):
        kinds = {each.kind for each in (*processes.devices, *threads.devices)}
        if kinds != {device}:
            raise RuntimeError(f"the pools are on {', '.join(kinds)}")
        expected = [plain.run(None, feed) for feed in feeds]
        errors = [relative_error(found, right) for found, right in zip(processes.map(feeds), expected, strict=True)]
        report("largest error", max(errors))

        def mapped(pool: Any, feeds: Any = given) -> Callable[[], None]:
            return lambda: deque(pool.map(feeds), 0)

        def refilling(pool: Any) -> Callable[[], None]:
            return lambda: deque(pool.map(refilled(feeds[0], len(given))), 0)

        actions = {
            "ours": mapped(processes),
            "plain": mapped(threads),
            "one array filled again: ours": refilling(processes),
            "one array filled again: plain": refilling(threads),
        }
        take_turns(actions, len(given), rounds)
        report("seconds to replace", [_replaced(processes, feeds[0]) for _ in range(3)])


def _replaced(pool: Any, feed: dict[str, Any]) -> float:
    """Return the seconds from the death of all worker processes to the first result of one that replaces them."""
    started = time.perf_counter()
    pids = [each.pid for each in pool.health()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(each.state == "ready" and each.pid in pids for each in pool.health()):
        time.sleep(0.001)
    pool.run(None, feed)
    taken = time.perf_counter() - started
    while any(each.state != "ready" for each in pool.health()):
        time.sleep(0.01)
    deque(pool.map([feed] * 20), 0)
    return taken


WORKERS: dict[str, Callable[..., None]] = {"pool": pool, "isolated": isolated}
