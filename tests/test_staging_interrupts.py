"""Interrupts of runs that are staged: what is raised, and that nothing is under way then. See staged_sessions.py."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("way", ["in", "out"])
def test_interrupts_are_raised_when_no_other_thread_copies_any_more(staged_child: Any, way: str) -> None:
    """However often: whoever waits for a copy, and is impatient, asks again."""
    found = staged_child(f"""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in the background
        session, interrupted = staged(NEG, piece=50_000), 3
        owner, name = (runtime, "copy_pinned") if "{way}" == "in" else (ortgpu.copying._Whole, "empty")
        plain, entered, go = getattr(owner, name), threading.Event(), threading.Event()
        ended = []
        def copy(*arguments):
            is_caller = threading.current_thread() is threading.main_thread()
            if is_caller:
                entered.wait(20)  # or it could copy everything before another thread begins
            else:
                entered.set()
                assert go.wait(20)
            plain(*arguments)
            if not is_caller:
                ended.append(1)
        def interrupt():
            entered.wait(20)
            for _ in range(interrupted):
                time.sleep(0.2)  # the caller has done the rest, and waits
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
            go.set()
        setattr(owner, name, copy)
        worker = threading.Thread(target=interrupt)
        worker.start()
        try:
            session.run(None, big(3))
        except KeyboardInterrupt:
            setattr(owner, name, plain)
            raised = go.is_set(), len(ended) > 0, stub.stub_late_copies()
        worker.join()
        gc.collect()
        in_use = session._pinned.bytes_in_use
        again, memory = session.run(None, big(4))[0][-1].item(), session._pinned
        session.close()
        del session
        report([raised, in_use, again, wait_for_no_threads(), memory.bytes_in_use, stub.stub_pinned_bytes()])
    """)
    assert found == [[True, True, 0], 0, -4, [], 0, 0]


def test_an_interrupt_anywhere_leaves_no_copy_under_way(staged_child: Any) -> None:
    """At each call of the code that copies, and at the end of each call that it makes of C: where the interpreter looks
    whether there was a signal. What was left to be made would be made in the memory of another run."""
    found = staged_child(
        """
        from ortgpu import copying, cudart, threads as helping
        session, plain_copy, places = staged(NEG, piece=100_000), runtime.copy_pinned, set()
        names = []
        files = {module.__file__ for module in (copying, cudart, helping)}

        def slow_copy(*arguments):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.002)
            plain_copy(*arguments)

        def interrupt(frame, event, argument):
            if event in ("call", "c_return") and frame.f_code.co_filename in files:
                callers = frame.f_back, frame.f_back.f_back
                place = event, frame.f_lineno, frame.f_code, *(caller.f_code for caller in callers)
                if place not in places:  # each one once
                    sys.setprofile(None)
                    places.add(place)
                    names.append(frame.f_code.co_name)
                    raise KeyboardInterrupt

        runtime.copy_pinned = slow_copy
        feed, bad, ends = big(1), [], 0
        session.run(None, feed)
        while ends < 3:  # runs without a new place: which ones there are depends on who is faster
            sys.setprofile(interrupt)
            try:
                session.run(None, feed)
                ends += 1
            except KeyboardInterrupt:
                pass
            sys.setprofile(None)
            before = stub.stub_late_copies()
            time.sleep(0.005)  # helpers that nobody waited for
            number = len(names)
            if before or stub.stub_late_copies() or (session.run(None, big(number))[0] != -number).any():
                bad.append(names[-1])
        session.close()
        left = wait_for_no_threads(), stub.stub_streams(), stub.stub_events()
        report([bad, len(names) > 50, {"together", "end", "_stream", "synchronise"} - set(names) == set(), left])
        """,
        deadline=120,
    )
    assert found == [[], True, True, [[], 0, 0]]


def test_what_a_handler_of_a_signal_raises_is_not_lost(staged_child: Any) -> None:
    """The time limit of a job, in the main thread: queues and test runners set one with SIGALRM."""
    found = staged_child("""
        import functools
        class TimeLimit(Exception):
            pass
        class Slow:
            def __init__(self, inner):
                self.inner = inner
            def __getattr__(self, name):
                return getattr(self.inner, name)
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
    """)
    assert found == [["TimeLimit"] * 4, 0]
