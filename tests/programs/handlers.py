"""Use pools and joined requests in a signal handler and a finalizer at random moments, for so many seconds."""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import sys
import time
from typing import Any

import numpy as np

from ortgpu import GPUSessionPool
from tests.programs.services import RELU, first, rows
from tests.support.children import report

SECONDS, ISOLATE, SEED = float(sys.argv[1]), sys.argv[2] == "isolate", int(sys.argv[3])
faulthandler.dump_traceback_later(SECONDS + 60, exit=True)
random.seed(SEED)
large = {"x": np.ones((200_000, 4), np.float32)}
counts = {"handled": 0, "finalized": 0, "wrong": 0}


def use(pool: Any, joined: Any) -> None:
    """Call a public method of the pool or the service."""
    ways = (
        lambda: first(pool.run(None, rows(1, 3))),
        lambda: first(pool.submit(None, rows(1, 3)).result(30)),
        lambda: first(next(iter(pool.map([rows(1, 3)])))),
        lambda: first(joined.run(None, rows(1, 3))),
        lambda: first(joined.submit(None, rows(1, 3)).result(30)),
        lambda: pool.health() and pool.queued + len(pool) and 3,
    )
    counts["wrong"] += random.choice(ways)() != 3


class Dropped:
    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        use(pool, joined)
        counts["finalized"] += 1


def handler(*_: object) -> None:
    use(pool, joined)
    counts["handled"] += 1


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGTERM, handler)
    end = time.monotonic() + SECONDS
    gc.set_threshold(300)
    with GPUSessionPool(RELU, allow_cpu=True, isolate=ISOLATE) as pool, pool.batched(8) as joined:
        while time.monotonic() < end:
            Dropped()
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 5e-3))
            for _ in range(5):
                pool.submit(None, random.choice((large, rows()))).result(30)
                joined.submit(None, rows()).result(30)
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        report("counts", counts)
    report("closed", True)
