"""Programs of ``tests/process/test_interrupts.py``."""

from __future__ import annotations

import os
import signal
import threading

from tests.programs.on_cpu import report


def a_lock_is_free_in_a_forked_child_whoever_held_it() -> None:
    from ortgpu.process.background import fork_safe_lock

    lock, taken, over = fork_safe_lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    if not (pid := os.fork()):
        with lock, lock:
            os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    over.set()
    thread.join()
    report([status, type(lock).__module__])


def a_forked_child_computes_what_a_thread_of_its_parent_was_computing() -> None:
    from ortgpu.process.background import cached_property

    class Answers:
        def __init__(self, wait):
            self._wait = wait

        @cached_property
        def answer(self):
            self._wait()
            return 42

    computing, over = threading.Event(), threading.Event()

    def wait():
        computing.set()
        over.wait(30)

    slow = Answers(wait)
    thread = threading.Thread(target=lambda: slow.answer)
    thread.start()
    computing.wait(30)
    if not (pid := os.fork()):
        signal.alarm(20)
        os._exit(Answers(lambda: None).answer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    over.set()
    thread.join()
    report([status, slow.answer])
