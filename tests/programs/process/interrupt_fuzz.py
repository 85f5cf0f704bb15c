"""Interrupts at random moments of everything that a session and a pool do: a program for a child with a deadline.

The interrupt is what the handler of a timer raises: Ctrl-C, or the time limit of a job. After each of them another
thread uses the same session and the same pool, and tries every lock of the library. What hangs ends at the deadline."""

from __future__ import annotations

import faulthandler
import gc
import logging
import signal
import sys
import threading
import time

import numpy as np

import ortgpu
from ortgpu import GPUSession
from tests.programs.on_cpu import model, report


def run() -> None:
    import collections
    import random
    from queue import SimpleQueue

    from ortgpu import GPUSessionPool

    logging.disable(logging.CRITICAL)  # the locks of its handlers are the standard library's, entered in Python
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    random.seed(seed)
    SAME = model("same (float[n] x) => (float[n] y) { y = Identity(x) }")
    small, large = (
        np.arange(10, dtype=np.float32),
        np.arange(13 << 18, dtype=np.float32),
    )  # the second is staged on a GPU
    session, pool = GPUSession(SAME), GPUSessionPool(SAME, sessions_per_device=2)
    service = pool.batched(max_queue=3)

    def right(results, expected):
        assert len(results) == len(expected)
        for (found,), array in zip(results, expected):
            assert found.shape == array.shape and found[-1] == array[-1]

    def construct():
        with GPUSession(SAME) as made:
            right([made.run(None, {"x": small})], [small])

    def run():
        right([session.run(None, {"x": array}) for array in (small, large)], [small, large])

    def map_():
        arrays = [small, large, small]
        right(list(session.map({"x": array} for array in arrays)), arrays)

    def pool_run():
        right([pool.run(None, {"x": small})], [small])

    def pool_map():
        right(list(pool.map({"x": array} for array in [small] * 5)), [small] * 5)

    def pool_submit():
        right([future.result() for future in [pool.submit(None, {"x": small}) for _ in range(12)]], [small] * 12)

    def joined_run():
        right(
            [service.run(None, {"x": small[:count]}) for count in (1, 3, 10)], [small[:count] for count in (1, 3, 10)]
        )

    def joined_submit():
        right([future.result() for future in [service.submit(None, {"x": small}) for _ in range(12)]], [small] * 12)

    def joined_open_and_close():
        with session.batched() as made:
            right([made.run(None, {"x": small})], [small])

    def pool_open_and_close():
        with GPUSessionPool(SAME, sessions_per_device=2) as made:
            right(list(made.map([{"x": small}] * 3)), [small] * 3)

    def copies():
        for _ in range(20):
            session.pinned_empty(1000)

    def locks():
        # Of modules, of the session and of the pool, and of what they have
        kinds = type(threading.Lock()), type(threading.RLock())
        holders = [module for name, module in list(sys.modules.items()) if name.startswith("ortgpu")]
        holders += [session, pool._service, service._service]
        holders += [session._pinned, session._gpu_runner, getattr(session._gpu_runner, "_runs", None)]
        holders += [getattr(session._pinned, "ordinary", None)]
        return {
            id(lock): lock
            for holder in holders
            for lock in getattr(holder, "__dict__", {}).values()
            if isinstance(lock, kinds)
        }

    asked, answers = SimpleQueue(), SimpleQueue()

    def another_thread():
        while asked.get():
            held = 0
            for lock in locks().values():
                if lock.acquire(timeout=20):
                    lock.release()
                else:
                    held += 1
            pool_run(), pool_map(), joined_run(), copies(), right(list(session.map([{"x": small}] * 3)), [small] * 3)
            if random.random() < 0.05:
                run(), map_(), construct()
            answers.put(held)

    checking = threading.Thread(target=another_thread, daemon=True)
    checking.start()

    class TimeLimit(Exception):
        pass

    armed = False  # a signal that another thread got may be seen here late

    def handler(*_):
        if armed:
            raise kind

    often = run, map_, pool_run, pool_map, pool_submit, joined_run, joined_submit, copies
    steps = {construct: 5, pool_open_and_close: 3, joined_open_and_close: 3, **dict.fromkeys(often, 9)}
    takes = {}
    for step in steps:
        for _ in range(4):
            before = time.perf_counter()
            step()
            takes[step] = min(time.perf_counter() - before, takes.get(step, 60))
    signal.signal(signal.SIGALRM, handler)
    raised, held, odd, begun = collections.Counter(), 0, [], time.monotonic()
    while raised.total() < count or len(raised) < len(steps):
        faulthandler.dump_traceback_later(60, exit=True)
        (step,) = random.choices(list(steps), list(steps.values()))
        kind = random.choice((KeyboardInterrupt, TimeLimit))
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, random.random() * takes[step] * 1.1 + 1e-5)
            try:
                step()
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except kind:
            raised[step.__name__] += 1
        except Exception as error:
            # The standard library's wait for a future may raise this one in its place
            known = "RuntimeError('cannot release un-acquired lock')"
            if step not in (pool_submit, joined_submit) or repr(error) != known:
                odd.append([step.__name__, repr(error)[:300]])
        asked.put(True)
        held += answers.get()
    seconds = time.monotonic() - begun
    for _ in range(3):
        gc.collect()
    service.close()
    workers = pool._workers
    left = [len(pool._service.waiting), *(len(worker.runs) for worker in workers)]
    left += [each._pinned.bytes_in_use for each in (session, *pool.sessions) if each._pinned]
    turns = session._gpu_runner._runs._slots._slots.qsize() if getattr(session._gpu_runner, "_runs", None) else None  # type: ignore[attr-defined]  # set here, or of the type that it is
    asked.put(False)
    checking.join()
    pool.close()
    session.close()
    deadline = time.monotonic() + 20
    while any(each.is_alive() and each.name.startswith("ortgpu") for each in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    gc.collect()
    alive = sorted(each.name for each in threading.enumerate() if each.is_alive() and each.name.startswith("ortgpu"))
    report(
        {
            "raised": raised.total(),
            "steps": raised,
            "held": held,
            "odd": odd,
            "left": left,
            "turns": turns,
            "alive": alive,
            "sessions": len(ortgpu.sessions()),
            "locks": len(locks()),
            "seconds": round(seconds, 1),
        }
    )
