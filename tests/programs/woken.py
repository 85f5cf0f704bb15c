"""Wait for requests in a thread of the service that was just woken, as a finalizer does that comes there."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from ortgpu import GPUSessionPool
from tests.programs.services import RELU, first, rows
from tests.support.children import report

WAYS: dict[str, Callable[[Any, Any], object]] = {
    "run": lambda pool, joined: first(pool.run(None, rows(1, 3))),
    "submit": lambda pool, joined: first(pool.submit(None, rows(1, 3)).result(20)),
    "map": lambda pool, joined: first(next(iter(pool.map([rows(1, 3)])))),
    "joined run": lambda pool, joined: first(joined.run(None, rows(1, 3))),
    "joined submit": lambda pool, joined: first(joined.submit(None, rows(1, 3)).result(20)),
    "new service": lambda pool, joined: first(pool.batched(2).run(None, rows(1, 3))),
    "warm": lambda pool, joined: pool.warm([rows(1, 3)]) or 3,
    "session's map": lambda pool, joined: first(next(iter(pool.sessions[0].map(iter([rows(1, 3)] * 3))))),
}


class Idle(deque[Any]):
    """The notices of idle threads. The first thread that takes its own out asks the service first."""

    ways: list[Any]
    found: list[Any]

    def remove(self, value: Any) -> None:
        if self.ways:
            self.found.append(self.ways.pop()())
        super().remove(value)


if __name__ == "__main__":
    with GPUSessionPool(RELU, allow_cpu=True) as pool, pool.batched(8) as joined:
        idle = Idle(pool._service._idle)
        idle.ways, idle.found = [lambda: WAYS[sys.argv[1]](pool, joined)], []
        pool._service._idle = idle
        report("asked", first(pool.run(None, rows(1, 5))))
    report("found", idle.found)  # once its threads have ended
