"""Programs of ``tests/session/test_pool_map.py``."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np

from tests.programs import no_search  # noqa: F401
from tests.programs.pools import Gate, Watched, feed, open_pool, outcome, value_of
from tests.support.children import report


def map_takes_no_more_feeds_than_allowed() -> None:
    with open_pool() as made:
        taken = []

        def feeds():
            for n in range(50):
                taken.append(n)
                yield feed(n)

        ahead = [len(taken) - n - 1 for n, _ in enumerate(made.map(feeds(), in_flight=4))]
        report("ahead", ahead)
        taken.clear()
        ahead = [len(taken) - n - 1 for n, _ in enumerate(made.map(feeds()))]
        report("ahead by itself", max(ahead))
        taken.clear()
        made.map(feeds())
        report("not asked", taken)
        report("empty", list(made.map([])))
        report("named", [outputs[0].shape for outputs in made.map([feed(1)], output_names=["y"])])
        report("bad", [outcome(lambda: made.map([], in_flight=0)), outcome(lambda: made.map([], in_flight="many"))])


def map_raises_at_the_place() -> None:
    with open_pool() as made:

        def feeds(wrong):
            for n in range(30):
                if n == 5:
                    yield wrong()
                yield feed(n)

        def collect(wrong):
            seen = []
            done = outcome(lambda: seen.extend(value_of(outputs) for outputs in made.map(feeds(wrong))))
            return [seen, done["type"], made.queued, [each.in_flight for each in made.health()]]

        report("request", collect(lambda: {"x": np.ones(5, np.float32)}))
        report("feeds", collect(lambda: 1 // 0))
        report("after", value_of(made.run(None, feed(1))))


def map_that_is_left_early_leaves_nothing_running() -> None:
    with open_pool(1) as made:
        watched = Watched(made.sessions[0])
        results = made.map((feed(n) for n in itertools.count()), in_flight=5)
        report("first", value_of(next(results)))
        results.close()
        report("left", [len(made._service.waiting), made.health()[0].in_flight, watched.calls <= 5])
        report("after", value_of(made.run(None, feed(1))))


def an_interrupt_while_it_waits_for_a_result_leaves_nothing_running() -> None:
    with open_pool(1) as made:
        watched = Watched(made.sessions[0], gate := Gate())
        results = made.map([feed(1)] * 3, in_flight=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background

        def interrupt():
            gate.wait_for(1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            gate.opened.set()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        raised = outcome(lambda: next(results))["type"]
        report("left", [raised, watched.at_once, made.health()[0].in_flight, watched.calls, next(results, "ended")])
        interrupting.join()
        report("after", value_of(made.run(None, feed(1))))
