"""Programs of ``tests/running/test_turns.py``."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, model, outcome, report, threads


def only_one_run_is_at_work() -> None:
    from ortgpu.process.threads import Turns
    from ortgpu.running.plain_runs import PlainRunner
    from ortgpu.running.turns import take_turns

    lock, at_work, highest, barrier = threading.Lock(), 0, 0, threading.Barrier(4)

    class Slow(PlainRunner):
        def run(self, session, output_names, feed, run_options):
            nonlocal at_work, highest
            with lock:
                at_work += 1
                highest = max(highest, at_work)
            time.sleep(0.02)
            with lock:
                at_work -= 1
            if feed == 3:
                raise ValueError("as runs may")
            return feed

    runner = Slow()
    take_turns(runner, Turns())
    made = []

    def run(number):
        barrier.wait()
        try:
            made.append(runner.run(None, None, number, None))
        except ValueError:
            made.append(-1)

    started = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    report([highest, sorted(made), type(runner).__name__])


def a_run_within_a_run_does_not_wait_for_the_turn_of_its_own_thread() -> None:
    from ortgpu.process.threads import Turns
    from ortgpu.running.plain_runs import PlainRunner
    from ortgpu.running.turns import take_turns

    class Interrupted(PlainRunner):
        def run(self, session, output_names, feed, run_options):
            return feed if feed == 3 else [feed, runner.run(None, None, feed + 1, None)]

    runner = Interrupted()
    take_turns(runner, Turns())
    report([runner.run(None, None, 0, None), runner.run(None, None, 2, None)])


def queued():
    """Return the turns of a runner, a way to make a call in its run, and a wait until a thread waits for that."""
    from ortgpu.process.threads import Turns
    from ortgpu.running.plain_runs import PlainRunner
    from ortgpu.running.turns import take_turns

    class Calling(PlainRunner):
        def run(self, session, output_names, feed, run_options):
            return feed()

    def wait_for_first(thread):
        until = time.monotonic() + 30
        while turns.first != thread and time.monotonic() < until:
            time.sleep(0.001)

    runner, turns = Calling(), Turns()
    take_turns(runner, turns)
    return turns, lambda call: runner.run(None, None, call, None), wait_for_first


def a_thread_runs_again_at_once() -> None:
    _, run, wait_for_first = queued()
    order, others = [], []

    def first():
        order.append("first")
        others.append(threading.Thread(target=run, args=(lambda: order.append("other"),)))
        others[0].start()
        wait_for_first(others[0].ident)

    run(first)
    run(lambda: order.append("first again"))
    others[0].join(30)
    report(order)


def a_handler_amid_the_wait() -> None:
    turns, run, wait_for_first = queued()
    main, order, begun, is_handled = threading.get_ident(), [], threading.Event(), threading.Event()

    def other():
        begun.set()
        wait_for_first(main)
        os.kill(os.getpid(), signal.SIGUSR1)
        is_handled.wait(30)
        order.append("other")

    def handle(*_):
        is_handled.set()
        run(lambda: order.append("handler"))

    def refuse(*_):
        is_handled.set()
        raise KeyError("of the handler")

    def run_beside(handler):
        begun.clear()
        is_handled.clear()
        signal.signal(signal.SIGUSR1, handler)
        thread = threading.Thread(target=run, args=(other,))
        thread.start()
        begun.wait(30)
        try:
            run(lambda: order.append("interrupted"))
        except KeyError:
            thread.join(30)
            order.append("raised")
        thread.join(30)

    run_beside(handle)
    found = [*order]
    order.clear()
    run_beside(refuse)
    run(lambda: order.append("after"))
    report([found, [order, turns.first, turns.owner]])


def a_finalizer_amid_other_work_waits_for_a_turn_but_not_for_ever() -> None:
    from ortgpu.process import threads
    from ortgpu.process.background import this_thread

    turns, order = threads.Turns(), []
    begun, is_over = threading.Event(), threading.Event()

    def run(name):
        begun.set()
        is_over.wait(60)
        order.append(name)

    def amid_other_work(name):
        with this_thread.holds:
            turns.run(order.append, name)

    for patience in (60, 0.05):
        threads._LONGEST_WAIT = patience
        begun.clear()
        is_over.clear()
        other = threading.Thread(target=turns.run, args=(run, "a run"))
        other.start()
        begun.wait(60)
        finalizer = threading.Thread(target=amid_other_work, args=("amid other work",))
        finalizer.start()
        finalizer.join(0.3 if patience == 60 else 60)
        is_over.set()
        finalizer.join(60)
        other.join(60)
    report(order)


def an_idle_session_trims_itself_and_leaves_no_thread() -> None:
    text = "two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }"
    session = GPUSession(model(text), trim_idle=0.05)
    before = threads()

    def wait_for(condition):
        until = time.monotonic() + 30
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)

    big = np.ones((64, 1 << 18), np.float32)
    session.run(None, {"x": big[:1, :1]})
    session.run(None, {"x": big})
    wait_for(lambda: session.memory.arena < 64 << 20)
    trimmed = session.memory.arena
    wait_for(lambda: not threads())
    left = before + threads()
    result = float(session.run(None, {"x": big})[0][0, 0])
    wait_for(lambda: session.memory.arena < 64 << 20)
    after = session.memory.arena
    session.run(None, {"x": big})
    session.close()
    closed = threads()
    waiting = GPUSession(NEG, trim_idle=1000)
    waiting.run(None, {"x": np.ones(2, np.float32)})
    del waiting
    wait_for(lambda: not threads())
    report(
        [
            trimmed,
            left,
            result,
            after,
            closed + threads(),
            [outcome(lambda each=each: GPUSession(NEG, trim_idle=each))["type"] for each in (0, -1, "5", True)],
        ]
    )
