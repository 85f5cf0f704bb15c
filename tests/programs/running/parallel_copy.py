"""Programs of ``tests/running/test_copying.py``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import numpy as np

import ortgpu
from ortgpu.running.copying import ParallelCopy, parallel_copy
from tests.programs.on_cpu import report, threads


def threads_of_python_share_it() -> None:
    copies, wrong = ParallelCopy(3), []

    def work(number):
        for step in range(300):
            source, target = np.full(30_000 + step, number, np.uint8), np.zeros(30_000 + step, np.uint8)
            copies.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
            if (target != number).any():
                wrong.append((number, step))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    report(wrong)


def its_threads_end_with_it() -> None:
    def count():
        # Without those that were joined, and are still on their way out of the kernel
        seen = []
        for _ in range(20):
            seen.append(len(os.listdir("/proc/self/task")))
            time.sleep(0.01)
        return min(seen)

    counts = [count()]
    first = parallel_copy(4, 0)
    counts.append(count())
    other = parallel_copy(4, 1)
    counts.append(count())
    again = parallel_copy(4, 0)
    assert again is first and other is not first
    counts.append(count())
    del first, other, again
    counts.append(count())
    report(counts)


def it_is_none_of_the_sessions_of_the_process() -> None:
    ortgpu.install()
    copies = ParallelCopy(2)
    report([len(ortgpu.sessions()), copies is not None])


def a_forked_child_ends_and_makes_its_own() -> None:
    copies = parallel_copy(3, 0)
    source = np.arange(100_000, dtype=np.uint8)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        own = parallel_copy(3, 0)
        target = np.zeros_like(source)
        own.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
        right = own is not copies and (target == source).all()
        del copies, own
        gc.collect()
        os._exit(0 if right else 1)  # faulthandler waits for a thread of the parent
    _, status = os.waitpid(pid, 0)
    target = np.zeros_like(source)
    copies.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    report([os.waitstatus_to_exitcode(status), bool((target == source).all())])


def where_the_threads_cannot_be_started_the_calling_one_copies() -> None:
    from ortgpu.running import copying

    def full(threads):
        raise RuntimeError("can't start new thread")

    copying._check_that_there_can_be = full
    copies = parallel_copy(8, 0)
    source = np.arange(100_000, dtype=np.uint8)
    target = np.zeros_like(source)
    copies.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    report([bool((target == source).all()), copies is parallel_copy(8, 0), threads()])


def where_there_is_room_for_a_part_of_the_threads_it_says_so() -> None:
    import resource

    for line in open("/proc/self/status"):
        if line.startswith("VmSize"):
            size = int(line.split()[1]) << 10
    before = len(os.listdir("/proc/self/task"))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (int(sys.argv[1]) << 20), limits[1]))
    try:
        copies = ParallelCopy(8)
        outcome = "made"
    except RuntimeError:
        outcome = "RuntimeError"
    resource.setrlimit(resource.RLIMIT_AS, limits)
    copies = None
    gc.collect()
    deadline = time.monotonic() + 5  # a thread of Python that has ended is there for a moment
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    report([outcome, len(os.listdir("/proc/self/task")) - before])
