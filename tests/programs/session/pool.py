"""Programs of ``tests/session/test_gpu_session_pool.py``."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future, wait

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as C

import ortgpu
from ortgpu import GPUError, GPUSessionPool
from tests.programs import no_search  # noqa: F401
from tests.programs.pools import MEMORY, Gate, Watched, feed, open_pool, outcome, pool_threads, raising, value_of
from tests.support.children import report


def results_are_those_of_a_session_wherever_it_ran() -> None:
    with open_pool(sessions_per_device=2) as made:
        watched = [Watched(session) for session in made.sessions]
        report("sizes", [len(made), len(made.sessions), len(made.devices), len(made.lost)])
        report("run", value_of(made.run(None, feed(3))))
        report("named", value_of(made.run(output_names=["y"], input_feed=feed(4))))
        report("futures", [value_of(made.submit(None, feed(n)).result()) for n in range(20)])
        report("map", [value_of(outputs) for outputs in made.map(feed(n) for n in range(200))])
        report("calls", [each.calls for each in watched])
        report("most", [each.most for each in watched])
    report("left", pool_threads())


def a_request_goes_to_the_session_that_is_least_busy() -> None:
    with open_pool(3) as made:
        gates = [Gate() for _ in made.sessions]
        watched = [Watched(session, gate) for session, gate in zip(made.sessions, gates)]
        futures = [made.submit(None, feed(n)) for n in range(6)]
        for gate in gates:
            gate.wait_for(2)
        report("spread", [each.calls for each in watched])
        gates[1].opened.set()
        wait([futures[1], futures[4]])
        gates[1].opened.clear()
        futures += [made.submit(None, feed(n)) for n in range(2)]
        gates[1].wait_for(2)
        report("then", [each.calls for each in watched])
        for gate in gates:
            gate.opened.set()
        report("values", [value_of(future.result()) for future in futures])


def what_waits_is_bounded() -> None:
    with open_pool() as made:
        waiting = []
        for session in made.sessions:
            Watched(session, lambda: waiting.append(len(made._service.waiting)))
        futures = [made.submit(None, feed(n)) for n in range(300)]
        report("values", [value_of(future.result()) for future in futures])
        report("most", max(waiting))


def what_waits_can_be_cancelled_and_what_runs_cannot() -> None:
    with open_pool(1) as made:
        gate = Gate()
        watched = Watched(made.sessions[0], gate)
        running = [made.submit(None, feed(n)) for n in range(3)]
        gate.wait_for(3)
        first, second = made.submit(None, feed(3)), made.submit(None, feed(4))
        report("cancelled", [running[0].cancel(), first.cancel()])
        gate.opened.set()
        report("values", [value_of(future.result()) for future in [*running, second]])
        report("calls", watched.calls)


def what_a_request_raises_is_its_own() -> None:
    with open_pool() as made:
        report("wrong input", outcome(lambda: made.run(None, {"x": np.ones(5, np.float32)})))
        report("wrong name", outcome(lambda: made.submit(["nothing"], feed(1)).result()))
        report("no feed", outcome(lambda: made.run(None, None)))
        watched = [Watched(session, raising(*MEMORY)) for session in made.sessions]
        report("memory", outcome(lambda: made.run(None, feed(1))))
        report("calls", sum(each.calls for each in watched))
        for each in watched:
            each.first = lambda: None
        report("after", [value_of(made.run(None, feed(7))), len(made.devices), len(made.lost)])


def arrays_on_a_gpu_are_refused() -> None:
    class Tensor:
        def __init__(self, device):
            self.device = device

        def __dlpack_device__(self):
            return self.device

        def __dlpack__(self, **arguments):
            return np.full(4, 7, np.float32).__dlpack__()

    with open_pool() as made:
        report("run", outcome(lambda: made.run(None, {"x": Tensor((2, 0))})))
        report("submit", outcome(lambda: made.submit(None, {"x": Tensor((2, 1))})))
        report("map", outcome(lambda: list(made.map([{"x": Tensor((13, 0))}]))))
        report("on the CPU", outcome(lambda: value_of(made.run(None, {"x": Tensor((1, 0))}))))


def values_that_are_no_tensors_are_on_no_gpu() -> None:
    import onnx.parser
    import onnxruntime

    def model(text):
        return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()

    twice = model("t (float[n] x) => (seq(float[n]) s) { s = SequenceConstruct(x, x) }")
    length = model("t (seq(float[n]) s) => (int64 n) { n = SequenceLength(s) }")
    given = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))}
    with ortgpu.GPUSession(twice, allow_cpu=True) as session:
        (pair,) = session.run_with_ort_values(None, given)
    with GPUSessionPool(length, allow_cpu=True) as made:
        report("run", outcome(lambda: int(made.run(None, {"s": pair})[0])))
        report("map", outcome(lambda: [int(outputs[0]) for outputs in made.map([{"s": pair}] * 2)]))
        report("wrong", outcome(lambda: made.run(None, {"s": given["x"]})))


def a_failure_that_nobody_looks_at_holds_no_arrays() -> None:
    gc.collect()
    gc.disable()
    with open_pool(1) as made:

        def fail(ask):
            wrong = np.ones(5, np.float32)
            gone = weakref.ref(wrong)
            outcome(lambda: ask({"x": wrong}))
            return gone

        gone = [fail(lambda wrong: made.run(None, wrong)), fail(lambda wrong: made.submit(None, wrong).result())]
        made.run(None, feed(1))
        for thread in range(6):
            made.submit(None, feed(1)).result()
    report("held", [each() is not None for each in gone])


def a_callback_may_submit_and_close() -> None:
    with open_pool(1) as made:
        chained = Future()

        def more(_):
            futures = [made.submit(None, feed(n)) for n in range(20)]  # more than wait, in a thread that serves
            made.submit(None, feed(20)).add_done_callback(lambda done: chained.set_result((futures, done)))

        made.submit(None, feed(0)).add_done_callback(more)
        futures, last = chained.result(30)
        report("values", [value_of(future.result(30)) for future in futures] + [value_of(last.result())])
        closed = threading.Event()

        def close(_):
            made.close()
            closed.set()

        made.submit(None, feed(0)).add_done_callback(close)
        assert closed.wait(30)
        report("closed", outcome(lambda: made.run(None, feed(0))))
    assert not [
        thread
        for thread in threading.enumerate()
        if (thread.name.startswith("ortgpu-pool") and thread.join(30))
        or (thread.is_alive() and thread.name.startswith("ortgpu-pool"))
    ]


def what_a_callback_raises_ends_no_thread() -> None:
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: record.exc_info and logged.append(repr(record.exc_info[1]))
    logging.getLogger("ortgpu").addHandler(handler)
    with open_pool(1) as made:
        count = len(pool_threads())
        for number in range(2 * count):
            future = made.submit(None, feed(number))
            future.add_done_callback(lambda _: sys.exit("enough"))
            future.result(30)
        report("value", value_of(made.submit(None, feed(7)).result(30)))
        report("threads", [count, len(pool_threads())])
    report("logged", logged)


def what_a_callback_raises_keeps_no_other_request_waiting() -> None:
    with open_pool(1) as made:
        gate = Gate()
        Watched(made.sessions[0], gate)
        asked = [made.submit(None, feed(number)) for number in range(6)]
        for future in asked:
            future.add_done_callback(lambda _: sys.exit("enough"))
        gate.opened.set()
        report("values", [value_of(future.result(10)) for future in asked])


def everything_resolves_under_load() -> None:
    made = open_pool(3)
    numbers = itertools.count()
    fails = C.Fail

    def sometimes():
        if next(numbers) % 7 == 0:
            raise MEMORY[0](MEMORY[1])

    for session in made.sessions:
        Watched(session, sometimes)
    ended = []

    def ask(start):
        for n in range(start, start + 100):
            future = made.submit(None, feed(n))
            if n % 5 == 0:
                future.cancel()
            try:
                ended.append("right" if value_of(future.result(30)) == n else "wrong")
            except (CancelledError, GPUError) as error:
                ended.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report("ended", ended)
    report("idle", [len(worker.runs) for worker in made._service.serving])
    made.close()
    report("left", pool_threads())
