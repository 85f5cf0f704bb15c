"""Programs of ``tests/running/test_memory.py`` with a network whose arena grows."""

from __future__ import annotations

import threading

import numpy as np

from ortgpu import GPUSession
from tests.programs.on_cpu import model, report

MIB = 1 << 20
big, small = np.zeros((64, MIB // 4), np.float32), np.zeros((1, MIB // 4), np.float32)
text = '<ir_version: 8, opset_import: ["": 17]> two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'


def a_session_on_the_cpu_measures_its_arena_in_host_memory() -> None:
    session = GPUSession(model(text.partition("> ")[2]))
    sizes = []
    for feed in (small, big, None, small):
        session.run(None, {"x": feed}) if feed is not None else session.trim()
        sizes.append(session.memory.arena)
    report([sizes, session.memory.pinned, session.memory.process, session.memory.budget])


def a_run_beside_a_trim_gives_the_right_result() -> None:
    session = GPUSession(model(text.partition("> ")[2]))
    given = [np.full((1 << n, 1 << 12), n, np.float32) for n in range(8)]
    wrong, stop = [], threading.Event()

    def run():
        while not stop.is_set():
            for feed in given:
                (result,) = session.run(None, {"x": feed})
                if not np.array_equal(result, feed):
                    wrong.append(feed.shape)

    at_work = [threading.Thread(target=run) for _ in range(2)]
    for each in at_work:
        each.start()
    for _ in range(500):
        session.trim()
    stop.set()
    for each in at_work:
        each.join()
    report(wrong)
