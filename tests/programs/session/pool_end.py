"""Programs of ``tests/session/test_pool_end.py``."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import sys
import threading
import weakref

import ortgpu
from ortgpu import GPUSessionPool
from ortgpu.diagnosis.probe.probing import RELU
from tests.programs.pools import Gate, Watched, feed, open_pool, outcome, pool_threads, value_of
from tests.support.children import report


def close_waits_for_what_runs_and_refuses_what_waits() -> None:
    made = open_pool(1)
    session = made.sessions[0]
    gate = Gate()
    Watched(session, gate)
    running = [made.submit(None, feed(n)) for n in range(3)]
    gate.wait_for(3)
    waiting = [made.submit(None, feed(n)) for n in range(3)]
    blocked = []
    threads = [
        threading.Thread(target=lambda: blocked.append(outcome(lambda: made.run(None, feed(1))))) for _ in range(2)
    ]
    threads.append(threading.Thread(target=made.close))
    for thread in threads:
        thread.start()
    report("waiting", [outcome(future.result) for future in waiting])  # before what runs is done
    gate.opened.set()
    for thread in threads:
        thread.join()
    report("running", [value_of(future.result()) for future in running])
    report("blocked", blocked)
    made.close()
    report(
        "later",
        [
            outcome(lambda: made.submit(None, feed(1))),
            outcome(lambda: made.map([])),
            outcome(lambda: session.run(None, feed(1))),
        ],
    )
    report("left", pool_threads())


def a_callback_that_raises_anything_keeps_no_request_from_its_end() -> None:
    made = open_pool(1)
    gate = Gate()
    Watched(made.sessions[0], gate)

    def ends(future):
        raise SystemExit

    running = [made.submit(None, feed(n)) for n in range(3)]
    gate.wait_for(3)
    waiting = [made.submit(None, feed(n)) for n in range(3)]
    for future in (*running, *waiting):
        future.add_done_callback(ends)
    closing = threading.Thread(target=made.close)
    closing.start()
    report("waiting", [outcome(lambda: future.result(10)) for future in waiting])
    gate.opened.set()
    report("running", [value_of(future.result(10)) for future in running])
    closing.join()
    report("left", pool_threads())


def a_pool_that_is_dropped_is_closed() -> None:
    made = open_pool()
    made.run(None, feed(1))
    inner = [weakref.ref(session) for session in made.sessions]
    future = made.submit(None, feed(2))
    del made
    report("result", value_of(future.result()))
    while pool_threads() or any(each() for each in inner):
        gc.collect()
    report("done", True)


def an_interrupt_at_any_line_leaves_no_thread_and_no_session() -> None:
    import linecache

    from ortgpu.environment.gpu.cuda import CudaState
    from ortgpu.provider import devices
    from ortgpu.session import opening

    def no_gpu(*_):  # known beforehand: what takes long is finding out
        raise ortgpu.DriverNotFoundError("no driver")

    MODULES = "session/gpu_session_pool.py", "session/pool/sessions.py", "provider/devices.py"
    opening.open_on_gpu, devices.initialise = no_gpu, lambda: CudaState(None, None, None)  # type: ignore[attr-defined]  # its name in there

    def is_with(frame):
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")

    def interrupted_at(number):
        # Raises KeyboardInterrupt at that line of these modules, of those that this thread runs. Not at
        # those with `with`: Python traces them once more before it leaves the block, where no signal comes.
        lines = itertools.count(1)

        def trace(frame, event, _argument):
            if not frame.f_code.co_filename.endswith(MODULES):
                return None
            if event == "line" and not is_with(frame) and next(lines) == number:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with GPUSessionPool(RELU, range(2), allow_cpu=True) as pool:
                pool.run(None, feed(1))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    left, numbers = {}, itertools.count(1)
    while interrupted_at(number := next(numbers)):
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("ortgpu-pool"):
                thread.join(0.5 if left else 5)
        if pool_threads() or ortgpu.sessions():
            left[number] = [len(pool_threads()), len(ortgpu.sessions())]
    report("interrupts", number - 1)
    report("left", left)


def a_forked_child_is_refused_and_ends() -> None:
    made = open_pool()
    made.run(None, feed(1))
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        report(
            "child",
            [outcome(lambda: made.run(None, feed(1))), outcome(lambda: made.map([feed(1)])), outcome(made.close)],
        )
        os._exit(0)  # as multiprocessing does: at exit plain ONNX Runtime waits for threads that are not there
    report("status", os.waitpid(child, 0)[1])
    report("parent", [value_of(made.run(None, feed(1))), pid])
    made.close()


def it_does_not_pickle() -> None:
    with open_pool() as made:
        report("pickle", outcome(lambda: pickle.dumps(made)))


def what_atexit_calls_after_the_pool_has_closed_itself() -> None:
    import atexit

    def late():
        report("waiting", outcome(waiting.result))
        report("later", [outcome(lambda: made.run(None, feed(1))), outcome(lambda: made.map([feed(1)]))])
        made.close()
        report("left", pool_threads())

    atexit.register(late)
    made = open_pool(1)
    gate = Gate()
    Watched(made.sessions[0], gate)
    running = [made.submit(None, feed(n)) for n in range(3)]
    gate.wait_for(3)
    waiting = made.submit(None, feed(3))
    timer = threading.Timer(0.5, gate.opened.set)
    timer.daemon = True  # the program is at its end before
    timer.start()
