"""Programs about what sessions take and give back, opened and closed many times; see programs.py."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import CUDA, attempt, cpu_reference, free_memory, random_feed, relative_error
from tests.support.children import report


def resources(uuid: str | None) -> dict[str, Any]:
    gc.collect()
    return {
        "free": free_memory(uuid),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def settled(uuid: str | None, before: dict[str, Any]) -> dict[str, Any]:
    """Resources, once threads and descriptors are back, or after five seconds: a thread takes a moment to end."""
    deadline = time.monotonic() + 5
    while True:
        now = resources(uuid)
        back = now["threads"] <= before["threads"] and now["files"] <= before["files"]
        if back or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def repeat(name: str, count: int, budget: float, uuid: str | None, step: Callable[[int], object]) -> None:
    """`step` as often as asked, or as the budget of seconds allows; what the process held before and after."""
    before = resources(uuid)
    started = time.monotonic()
    done = 0
    while done < count and time.monotonic() - started < budget:
        step(done)
        done += 1
        if done % 100 == 0:
            report("progress", done)
    seconds = time.monotonic() - started
    report(name, {"done": done, "seconds": seconds, "before": before, "after": settled(uuid, before)})


def open_and_close(model: str, count: int, budget: float) -> None:
    from ortgpu import GPUSession

    session = GPUSession(model)
    uuid, feed = session.device.uuid, random_feed(session, 2)
    session.close()

    def step(number: int) -> None:
        # each way of letting go in its turn: close(), the with block, and nothing but the end of the last reference
        session = GPUSession(model)
        session.run(None, feed)
        if number % 3 == 0:
            session.close()
        elif number % 3 == 1:
            with session:
                pass

    for number in range(30):
        step(number)
    repeat("sessions", count, budget, uuid, step)


def fail_to_open(model: str, count: int, budget: float) -> None:
    from ortgpu import GPUSession

    attempts: list[Callable[[], Any]] = [
        lambda: GPUSession(model, providers=[(CUDA, {"no_such_option": "1"})]),
        lambda: GPUSession(model, device=4096),
        lambda: GPUSession(b"this is no model"),
    ]
    with GPUSession(model) as session:
        uuid = session.device.uuid
    raised: Counter[str] = Counter()
    slowest = [0.0, 0.0, 0.0]

    def step(number: int) -> None:
        kind = number % len(attempts)
        started = time.perf_counter()
        try:
            attempts[kind]()
            raised[f"{kind}: nothing"] += 1
        except Exception as error:  # noqa: BLE001 - its type is the fact
            raised[f"{kind}: {type(error).__name__}"] += 1
        slowest[kind] = max(slowest[kind], time.perf_counter() - started)

    for number in range(9):
        step(number)
    raised.clear()
    repeat("failures", count, budget, uuid, step)
    report("raised", dict(raised))
    report("slowest", slowest)
    with GPUSession(model) as session:
        feed = random_feed(session, 2)
        report("still right", relative_error(session.run(None, feed), cpu_reference(model).run(None, feed)))


def close_large(model: str) -> None:
    """What one large session takes and gives back, after a first one has loaded every kernel that stays loaded."""
    from ortgpu import GPUSession

    with GPUSession(model) as session:
        uuid, feed = session.device.uuid, random_feed(session, 4)
        session.run(None, feed)
    del session
    gc.collect()
    before = free_memory(uuid)
    session = GPUSession(model)
    session.run(None, feed)
    during = free_memory(uuid)
    session.close()
    after = free_memory(uuid)  # the object lives on: close() alone must have given the memory back
    report("free", {"before": before, "during": during, "after": after})
    attempt("run after close", lambda: len(session.run(None, feed)))
    attempt("close again", session.close)


PROGRAMS: dict[str, Callable[..., None]] = {
    "open_and_close": open_and_close,
    "fail_to_open": fail_to_open,
    "close_large": close_large,
}
