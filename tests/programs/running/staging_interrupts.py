"""Programs of ``tests/running/test_staging_interrupts.py``."""

from __future__ import annotations

import signal
import sys
import threading

from tests.programs.on_cpu import NEG, outcome, report
from tests.programs.staged import Before, big, copies_left, ran, staged, stub


def an_interrupt_anywhere_leaves_no_copy_under_way() -> None:
    from ortgpu.running import copying, cudart

    session, places = staged(NEG, piece=100_000), set()
    names = []
    files = {module.__file__ for module in (copying, cudart)}

    def interrupt(frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            callers = frame.f_back, frame.f_back.f_back
            place = event, frame.f_lineno, frame.f_code, *(caller.f_code for caller in callers)
            if place not in places:  # each one once
                sys.setprofile(None)
                places.add(place)
                names.append(frame.f_code.co_name)
                raise KeyboardInterrupt

    feed, bad, ends = big(1), [], 0
    session.run(None, feed)
    while ends < 3:  # runs without a new place: which ones there are depends on who is faster, here or the GPU
        sys.setprofile(interrupt)
        try:
            session.run(None, feed)
            ends += 1
        except KeyboardInterrupt:
            pass
        sys.setprofile(None)
        number = len(names)
        if stub.stub_late_copies() or (session.run(None, big(number))[0] != -number).any():
            bad.append(names[-1])
    session.close()
    left = copies_left(), stub.stub_streams(), stub.stub_events()
    unseen = {"fill", "empty", "_join", "stream", "synchronise"}.difference(names)
    report([bad, len(names) > 40, list(unseen), left])


def what_a_handler_of_a_signal_raises_is_not_lost() -> None:
    import functools

    class TimeLimit(Exception):
        pass

    class Slow(Before):
        def run_with_ortvaluevector(self, *arguments):
            signal.raise_signal(signal.SIGALRM)
            return self.inner.run_with_ortvaluevector(*arguments)

    class Job:
        def limit(self, *_):
            raise TimeLimit("of the job")

        def __call__(self, *_):
            self.limit()

    session = staged(NEG)
    session._sess = Slow(session._sess)
    found = []
    for handler in (Job().limit, functools.partial(Job.limit, None), Job(), lambda *_: Job().limit()):
        signal.signal(signal.SIGALRM, handler)
        found.append(outcome(lambda: session.run(None, big(3))).get("type"))
    report([found, session._pinned.bytes_in_use])


def an_interrupt_anywhere_costs_no_run_its_turn() -> None:
    from ortgpu.running import staged_runs

    session, places = staged(NEG, piece=100_000), set()
    own = staged_runs.__file__, threading.__file__

    def interrupt(frame, event, argument):
        if event in ("call", "return", "c_return") and frame.f_code.co_filename in own:
            place = event, frame.f_lineno, frame.f_code, getattr(argument, "__name__", None)
            if place not in places:  # each one once
                sys.setprofile(None)
                places.add(place)
                raise KeyboardInterrupt

    session.run(None, big(1))
    ends = 0
    while ends < 3:
        signal.alarm(20)
        sys.setprofile(interrupt)
        try:
            session.run(None, big(1))
            ends += 1
        except KeyboardInterrupt:
            pass
        sys.setprofile(None)
    waiting = threading.Barrier(2)

    class Waiting(Before):
        def run_with_ortvaluevector(self, *arguments):
            waiting.wait(10)  # one alone would not go on
            return self.inner.run_with_ortvaluevector(*arguments)

    session._sess = Waiting(session._sess)
    del ran[:]
    results = [int(result[0][0]) for result in session.map([big(number) for number in range(6)])]
    report([results, all(ran), len(places) > 20])
