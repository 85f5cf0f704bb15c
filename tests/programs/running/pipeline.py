"""Programs of ``tests/running/test_pipeline.py``."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import threading
import time

import numpy as np

import ortgpu
from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, outcome, report, threads


def results_are_those_of_run_in_order() -> None:
    session = GPUSession(NEG)
    given = [{"x": np.random.default_rng(n).standard_normal(n % 7 * 1000 + 1, np.float32)} for n in range(60)]
    plain = [session.run(None, feed) for feed in given]
    mapped = list(session.map(given))
    named = list(session.map(iter(given), output_names=["y"], in_flight=3))
    report(
        [
            len(mapped),
            all(len(a) == len(b) == 1 and (a[0] == b[0]).all() for a, b in zip(plain, mapped)),
            all((a[0] == b[0]).all() for a, b in zip(plain, named)),
            threads(),
        ]
    )


def short_runs_of_a_generator_that_fills_one_array_give_the_results_of_run() -> None:
    here = threading.current_thread()

    class Seen(GPUSession):
        seen, takes = [], 0

        def run(self, *arguments):
            self.seen.append(threading.current_thread() is here)
            if self.takes:
                time.sleep(self.takes)
            return super().run(*arguments)

    session = Seen(NEG)

    def refilled(count):
        array = np.empty(4, np.float32)
        for number in range(count):
            array[:] = number
            yield {"x": array}

    def mapped(count):
        session.seen.clear()
        right = [int(result[0][0]) for result in session.map(refilled(count))] == [-n for n in range(count)]
        return right, sum(session.seen)

    short = mapped(3000)
    session.takes = 0.005
    long = mapped(100)
    report([short[0], short[1] >= 32, long[0], long[1] <= 32, mapped(20), threads()])


def failures_of_short_runs_come_out_at_their_place() -> None:
    session = GPUSession(NEG)

    def outcome_of(given):
        handed_out = []
        failed = outcome(lambda: handed_out.extend(session.map(given)))
        return [len(handed_out), failed["type"]]

    def broken():
        yield from feeds(700)
        raise LookupError

    bad = feeds(1000)
    bad[700] = {"x": np.zeros((2, 2), dtype=np.float32)}
    none = [*feeds(700), 5]
    report([outcome_of(each) for _ in range(2) for each in (broken(), bad, none)] + [threads()])


def names_of_outputs_from_a_generator_are_for_every_feed() -> None:
    session, pool = GPUSession(NEG), ortgpu.GPUSessionPool(NEG)
    report(
        [
            [int(result[0][0]) for result in each.map(feeds(3), output_names=(name for name in ["y"]))]
            for each in (session, pool)
        ]
    )


def a_feed_that_fails_comes_out_at_its_place_and_ends_the_iteration() -> None:
    session = GPUSession(NEG)
    given = feeds(10)
    given[4] = {"x": np.zeros((2, 2), dtype=np.float32)}
    results, handed_out = session.map(given), []
    failed = outcome(lambda: [handed_out.append(int(result[0][0])) for result in results])
    report([handed_out, failed["type"], next(results, "ended"), threads(), int(session.run(None, given[1])[0][0])])


def an_exception_of_the_feeds_comes_out_at_its_place() -> None:
    session = GPUSession(NEG)

    def failing():
        yield from feeds(3)
        raise OSError("the disk is gone")

    results, handed_out = session.map(failing()), []
    failed = outcome(lambda: [handed_out.append(int(result[0][0])) for result in results])
    report([handed_out, failed, next(results, "ended"), threads()])


def what_a_handler_of_a_signal_raises_in_the_feeds_comes_out_at_once() -> None:
    class TimeLimit(Exception):
        pass

    def limit(*_):
        raise TimeLimit("of the job")

    signal.signal(signal.SIGALRM, limit)

    def limited():
        yield from feeds(3)
        signal.raise_signal(signal.SIGALRM)
        yield from feeds(3)

    results = GPUSession(NEG).map(limited())
    report([outcome(lambda: len(list(itertools.islice(results, 2)))), next(results, "ended"), threads()])


def collected_with_a_lock_held_that_its_threads_need() -> None:
    from collections import deque

    from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession

    gc.disable()
    plain, dropped = InferenceSession.run, threading.Event()

    def run(self, *given):
        given[1]["x"][0] == 0 or dropped.wait()
        return plain(self, *given)

    InferenceSession.run = run

    class Waiting(deque):
        def append(self, request):
            super().append(request)
            dropped.set()
            gc.collect()

    pool = ortgpu.GPUSessionPool(NEG)
    results = pool.map(feeds(100), in_flight=2)
    cycle = [results]
    cycle.append(cycle)
    next(results)
    del results, cycle
    pool._service.waiting = Waiting()
    report(int(pool.run(None, feeds(3)[2])[0][0]))


def a_feed_is_let_go_before_the_next_is_taken() -> None:
    import weakref

    taken, kept = [], []

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            deadline = time.monotonic() + 20  # a result is there before its thread lets go
            while taken and taken[-1]() is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            kept.append(sum(each() is not None for each in taken))
            if len(taken) == 5:
                raise StopIteration
            array = np.ones(4, np.float32)
            taken.append(weakref.ref(array))
            return {"x": array}

    report([len(list(GPUSession(NEG).map(Source(), in_flight=1))), kept])


def a_dict_that_is_filled_again_for_the_next_feed() -> None:
    def refilled():
        feed = {}
        for number in range(40):
            feed["x"] = np.full(100_000, number, np.float32)
            yield feed

    session, pool = GPUSession(NEG), ortgpu.GPUSessionPool(NEG)
    expected = [-number for number in range(40)]
    requests = [pool.submit(None, feed) for feed in refilled()]
    report(
        [
            [int(result[0][0]) for result in session.map(refilled())] == expected,
            [int(result[0][0]) for result in pool.map(refilled())] == expected,
            [int(request.result()[0][0]) for request in requests] == expected,
        ]
    )


def the_interpreter_ends_while_an_iteration_stands_still() -> None:
    results = GPUSession(NEG).map(itertools.cycle(feeds(3)))
    report(int(next(results)[0][0]))


def what_is_no_feed() -> None:
    session = GPUSession(NEG)
    report(
        [
            outcome(lambda: session.map(feeds(1)[0])),
            outcome(lambda: session.map(5)),
            outcome(lambda: session.map([], in_flight=0)),
            outcome(lambda: session.map([], in_flight="2")),
            outcome(lambda: list(session.map([feeds(1)[0]["x"]]))),
            outcome(lambda: list(session.map([]))),
        ]
    )


def a_session_that_is_closed_says_so() -> None:
    session, other = GPUSession(NEG), GPUSession(NEG)
    session.close()
    results = other.map(feeds(100), in_flight=1)
    first = int(next(results)[0][0])
    other.close()
    report(
        [
            outcome(lambda: session.map([])),
            outcome(lambda: session.pinned_empty(3)),
            first,
            outcome(lambda: next(results)),
            threads(),
        ]
    )


def iterations_of_several_threads_do_not_disturb_each_other() -> None:
    session = GPUSession(NEG)
    wrong = []

    def work(number):
        given = [{"x": np.full(50_000, number * 1000 + each, np.float32)} for each in range(40)]
        for each, result in zip(range(40), session.map(given, in_flight=number + 1)):
            if (result[0] != -(number * 1000 + each)).any():
                wrong.append((number, each))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    report([wrong, threads()])


def a_forked_child_is_refused_and_does_not_hang() -> None:
    results = GPUSession(NEG).map(itertools.cycle(feeds(3)))
    next(results)
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        refused = outcome(lambda: next(results))
        del results
        os.write(write, json.dumps(refused).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    report([json.loads(os.read(read, 10_000)), int(next(results)[0][0])])


def under_wrappers_like_tqdm_and_itertools() -> None:
    session = GPUSession(NEG)

    def progress(iterable):  # what tqdm does: a generator around it, closed before it
        for each in iterable:
            yield each

    shown = progress(session.map(itertools.cycle(feeds(3))))
    some = [int(result[0][0]) for result in itertools.islice(shown, 5)]
    del shown
    report([some, threads()])


def a_record_sets_depth_and_staging() -> None:
    from ortgpu.running import pipeline

    class Slow(GPUSession):
        def run(self, *arguments):
            at_work.append(1)
            seen.append(len(at_work))
            time.sleep(0.02)
            at_work.pop()
            return super().run(*arguments)

    at_work, seen, staged = [], [], []
    session = Slow(NEG)
    session._verified.options_chosen.update({name: (value, "") for name, value in json.loads(sys.argv[1]).items()})
    plain = pipeline.staged_run
    pipeline.staged_run = lambda *arguments: staged.append(1) or plain(*arguments)
    results = [int(y[0]) for (y,) in session.map(feeds(24))]
    report([results, max(seen), len(staged)])


def what_is_no_feed_is_told_without_staging_too() -> None:
    session = GPUSession(NEG)
    session._verified.options_chosen["map_staging"] = "0", ""
    report(outcome(lambda: list(session.map([feeds(1)[0]["x"]]))))
