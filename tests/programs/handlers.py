"""Use pools and joined requests in signal handlers and a finalizer at random moments, for so many seconds.

Every public method is called. A handler also drains and closes the pool: the program opens the next one then.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ortgpu import GPUSession, GPUSessionPool
from ortgpu.errors import ExecutionError
from tests.programs.services import RELU, first, rows
from tests.support.children import report

SECONDS, ISOLATE, SEED = float(sys.argv[1]), sys.argv[2] == "isolate", int(sys.argv[3])
faulthandler.dump_traceback_later(SECONDS + 60, exit=True)
random.seed(SEED)
large = {"x": np.ones((200_000, 4), np.float32)}
counts = Counter[str]()
depth = 0
service: Service | None = None


class Service:
    """A pool, its joined requests, and a session that joins its own."""

    def __init__(self) -> None:
        self.pool = GPUSessionPool(RELU, allow_cpu=True, isolate=ISOLATE)
        self.joined = self.pool.batched(8)
        self.own: Any = session.batched(8)
        self.ends: bool = False

    def state(self) -> int:
        pool = self.pool
        assert pool.health()
        assert pool.queued >= 0
        assert pool.lost == ()
        assert len(pool.devices) == len(pool) == 1
        assert len(pool.sessions) == (not ISOLATE)
        return 3

    def another(self) -> float:
        with self.pool.batched(2) as another:
            return first(another.run(None, rows(1, 3)))

    def warm(self) -> int:
        self.pool.warm([rows(1, 3)])
        return 3

    def awaited(self) -> float:
        coroutine = self.joined.arun(None, rows(1, 3))
        if asyncio._get_running_loop() is None:
            return first(asyncio.run(coroutine))
        coroutine.close()  # asyncio does not run a loop within a loop
        return 3

    def end(self) -> int:
        self.ends = True
        random.choice((self.pool.drain, self.pool.close, self.joined.close, self.own.close))(30)
        self.pool.close()
        self.own.close()
        return 3


def usual() -> list[Callable[[Service], Any]]:
    """Return calls of the public methods, each of which returns 3."""
    feed = rows(1, 3)
    return [
        lambda it: first(it.pool.run(None, feed)),
        lambda it: first(it.pool.submit(None, feed).result(30)),
        lambda it: first(next(iter(it.pool.map([feed])))),
        lambda it: first(next(it.pool.map(each for each in [feed] * 3))),
        lambda it: it.pool.submit(None, feed).cancel() in (True, False) and 3,
        lambda it: first(it.joined.run(None, feed)),
        lambda it: first(it.joined.submit(None, feed).result(30)),
        lambda it: first(it.own.run(None, feed)),
        lambda it: first(it.own.submit(None, feed).result(30)),
        Service.state,
        Service.warm,
        Service.another,
        Service.awaited,
    ]


def use() -> None:
    """Call a public method of the pool or the service. Seldom end them."""
    it = service
    if it is None:
        return
    way = Service.end if random.random() < (0.002 if ISOLATE else 0.02) else random.choice(usual())
    try:
        counts["wrong"] += way(it) != 3
    except ExecutionError:
        counts["wrong"] += not it.ends
    if way is Service.end:
        counts["ended"] += 1


class Dropped:
    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        use()
        counts["finalized"] += 1


def handler(number: int, _: object) -> None:
    global depth
    if depth == 3:  # else handlers that come faster than they end would fill the stack
        return
    depth += 1
    use()
    depth -= 1
    counts[signal.Signals(number).name] += 1


def terminate() -> None:
    while not is_over.wait(random.uniform(1e-3, 2e-2)):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    session = GPUSession(RELU, allow_cpu=True)
    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGTERM, handler)
    is_over = threading.Event()
    other = threading.Thread(target=terminate, daemon=True)
    other.start()
    end = time.monotonic() + SECONDS
    gc.set_threshold(300)
    while time.monotonic() < end or min(counts[name] for name in ("SIGALRM", "SIGTERM", "finalized")) < 10:
        if service is None or service.ends:
            service = None
            service = Service()
        Dropped()
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 5e-3))
        with contextlib.suppress(ExecutionError):
            for _ in range(5):
                service.pool.submit(None, random.choice((large, rows()))).result(30)
                service.joined.submit(None, rows()).result(30)
                service.own.run(None, rows())
                counts["requests"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    is_over.set()
    other.join()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.collect()
    if service is not None:
        service.end()
    report("counts", counts)
    report("left", [each.name for each in threading.enumerate() if each.name.startswith("ortgpu-pool")])
