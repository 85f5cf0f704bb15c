"""Programs of ``tests/behaviour/test_after_the_main_thread.py``."""

from __future__ import annotations

import threading

from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, feeds, outcome, report, threads

_kept: list[object] = []  # until the end of the program


def the_end_of_the_program_waits_for_what_is_computed() -> None:
    from ortgpu.process.threads import Executor, Outcome

    done, begun = [], threading.Event()

    def work():
        begun.set()
        threading.Event().wait(0.2)
        done.append(1)
        report(done)

    executor = Executor(1, "ortgpu-test")
    _kept.append(executor)
    for _ in range(3):
        executor.submit(Outcome(), work)
    begun.wait()


def a_map_where_the_system_gives_no_thread() -> None:
    def refuse(*_, **__):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    session = GPUSession(NEG)
    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            setattr(threading, name, refuse)
    results = session.map([*feeds(3), {"wrong": 1}])
    report([[int(next(results)[0][0]) for _ in range(3)], outcome(lambda: next(results))["type"], threads()])
