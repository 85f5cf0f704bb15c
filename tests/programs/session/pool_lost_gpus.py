"""Programs of ``tests/session/test_pool_lost_gpus.py``."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np

import ortgpu
from ortgpu.diagnosis.probe.probing import RELU
from tests.programs.pools import (
    CUDNN,
    ECC,
    STICKY,
    UNKNOWN,
    Gate,
    Watched,
    feed,
    open_pool,
    outcome,
    pool_threads,
    raising,
    value_of,
)
from tests.support.children import report


def another_gpu_reads_what_the_feed_was() -> None:
    def refilled():
        array = np.empty(4, np.float32)
        for number in range(20):
            array[:] = number
            yield {"x": array}

    for way in ("map", "submit"):
        made = open_pool(2)
        Watched(made.sessions[0], lambda: (time.sleep(0.02), raising(*ECC)()))
        if way == "map":
            report(way, [value_of(outputs) for outputs in made.map(refilled())])
        else:
            requests = [made.submit(None, feed) for feed in refilled()]
            report(way, [value_of(request.result()) for request in requests])
        report(way + ", lost", len(made.lost))
        made.close()


def a_request_that_fails_on_two_gpus_takes_out_neither() -> None:
    with open_pool(3) as made:
        watched = [Watched(session, raising(*CUDNN)) for session in made.sessions]
        report("raised", outcome(lambda: made.run(None, feed(1))))
        report("calls", sum(each.calls for each in watched))
        report("sizes", [len(made.devices), len(made.lost)])


def a_request_is_tried_again_once_only() -> None:
    with open_pool(3) as made:
        watched = [Watched(session, raising(*ECC)) for session in made.sessions]
        report("raised", outcome(lambda: made.run(None, feed(1))))
        report("calls", sum(each.calls for each in watched))
        report("sizes", [len(made.devices), len(made.lost)])
        for each in watched:
            each.first = lambda: None
        report("after", value_of(made.run(None, feed(5))))


def without_another_gpu_the_error_is_raised_and_a_doubtful_one_takes_nothing_out() -> None:
    with open_pool(1) as made:
        watched = Watched(made.sessions[0], raising(*CUDNN))
        report("doubtful", outcome(lambda: made.run(None, feed(1))))
        watched.first = lambda: None
        report("after", value_of(made.run(None, feed(5))))


def failures_that_come_and_go_leave_one_gpu() -> None:
    with open_pool(3) as made:
        ran = itertools.count()

        def now_and_then():
            if next(ran) % 3 == 2:
                raise CUDNN[0](CUDNN[1])

        for session in made.sessions:
            Watched(session, now_and_then)
        ended = [outcome(lambda: value_of(made.run(None, feed(n)))) for n in range(30)]
        report("types", sorted({str(each.get("type")) for each in ended}))
        report("sizes", [len(made.devices), len(made.lost)])


def when_none_is_left_everybody_is_told_the_causes() -> None:
    made = open_pool()
    gates = [Gate(), Gate()]
    for session, gate, failure in zip(made.sessions, gates, [ECC, UNKNOWN]):

        def first(gate=gate, failure=failure):
            gate()
            raise failure[0](failure[1])

        Watched(session, first)
    running = [made.submit(None, feed(n)) for n in range(6)]
    for gate in gates:
        gate.wait_for(3)
    waiting = [made.submit(None, feed(n)) for n in range(6)]
    blocked = []
    thread = threading.Thread(target=lambda: blocked.append(outcome(lambda: made.run(None, feed(1)))))
    thread.start()
    for gate in gates:
        gate.opened.set()
    thread.join()
    report("running", [outcome(future.result)["type"] for future in running])
    report("waiting", [outcome(future.result) for future in waiting])
    report("blocked", blocked)
    report("later", [outcome(lambda: made.run(None, feed(1))), outcome(lambda: list(made.map([feed(1)])))])
    report("sizes", [len(made), len(made.devices), len(made.lost)])
    made.close()
    report("left", pool_threads())


def a_sticky_error_ends_the_pool_as_it_ends_the_process() -> None:
    made = open_pool(3)
    watched = [Watched(session) for session in made.sessions]
    for each in watched:  # whichever has a free thread takes the request
        each.first = raising(*STICKY)
    report("raised", outcome(made.submit(None, feed(1)).result))
    report("later", outcome(lambda: made.run(None, feed(1))))
    report("sizes", [len(made), len(made.lost)])
    report("session", outcome(lambda: ortgpu.GPUSession(RELU, allow_cpu=False)))
    made.close()
    report("left", pool_threads())
