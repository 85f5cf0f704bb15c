"""``map``: order, bounds, exceptions at their place, nothing left behind. Sessions are real, and on the CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.process.background import Thread, this_thread
from ortgpu.process.threads import Turns
from ortgpu.running.pipeline import Pace, _may_wait, iterate_in_order
from tests.support.cpu_session import child


def test_results_are_those_of_run_in_order() -> None:
    found = child("running.pipeline.results_are_those_of_run_in_order")
    assert found == [60, True, True, []]


class Clock:
    """A session's feeds in both ways, by a clock that goes on by what each takes."""

    def __init__(self, threads_take: float, line_takes: float) -> None:
        self.takes = {False: threads_take, True: line_takes}
        self.now = 0.0
        self.pace = Pace(lambda: self.now)

    def iterate(self, count: int, in_flight: int = 8, pauses: int = 0) -> list[bool]:
        """Return for each feed of an iteration whether the iterating thread ran it.

        The caller pauses after each so many feeds.
        """
        in_line: list[bool] = []
        self.pace.begin(iter(range(count)), in_flight)
        while not self.pace.has_ended:
            way = self.pace.in_line
            for _ in self.pace:
                in_line.append(way)
                self.now += self.takes[way] + (0.1 if pauses and not len(in_line) % pauses else 0)
        self.pace.end()
        self.now += 60  # nothing that an iteration took
        assert len(in_line) == count
        return in_line


PACES = pytest.mark.parametrize(
    ("threads_take", "line_takes", "least", "most"),
    [
        pytest.param(1.8e-4, 1e-4, 9_800, 9_900, id="a short run"),
        pytest.param(3e-4, 9e-4, 16, 64, id="a run that copies while another computes"),
        pytest.param(9e-4, 1.8e-3, 32, 64, id="a run that is long in one thread"),
        pytest.param(0.025, 0.052, 0, 0, id="a long run"),
    ],
)


@PACES
def test_the_faster_way_is_kept(threads_take: float, line_takes: float, least: int, most: int) -> None:
    assert least <= sum(Clock(threads_take, line_takes).iterate(10_000)) <= most


@PACES
@pytest.mark.parametrize("count", [5, 20, 80, 125])
def test_the_faster_way_is_found_by_iterations_that_are_too_short_for_both(
    count: int, threads_take: float, line_takes: float, least: int, most: int
) -> None:
    """An iteration of 80 feeds ended while the other way was tried, and all later ones were made in that way."""
    clock = Clock(threads_take, line_takes)
    assert least <= sum(sum(clock.iterate(count)) for _ in range(10_000 // count)) <= most


def test_a_pause_of_the_caller_is_no_long_run() -> None:
    """After one, up to 32,000 short feeds went to the threads."""
    assert sum(Clock(1.8e-4, 1e-4).iterate(10_000, pauses=500)) >= 8_000


def test_feeds_that_become_long_go_back_to_the_threads() -> None:
    clock = Clock(1.8e-4, 1e-4)
    assert clock.iterate(1000)[-1] is True
    clock.takes = {False: 0.02, True: 0.05}
    assert [sum(clock.iterate(10)) for _ in range(5)] == [1, 0, 0, 0, 0]
    clock.takes = {False: 3e-4, True: 9e-4}
    assert sum(sum(clock.iterate(10)) for _ in range(1000)) <= 64


def test_short_runs_of_a_generator_that_fills_one_array_give_the_results_of_run() -> None:
    found = child("running.pipeline.short_runs_of_a_generator_that_fills_one_array_give_the_results_of_run")
    assert found == [True, True, True, True, [True, 0], []]


def test_failures_of_short_runs_come_out_at_their_place() -> None:
    found = child("running.pipeline.failures_of_short_runs_come_out_at_their_place")
    assert found == [[700, "LookupError"], [700, "InvalidArgument"], [700, "TypeError"]] * 2 + [[]]


def test_names_of_outputs_from_a_generator_are_for_every_feed() -> None:
    found = child("running.pipeline.names_of_outputs_from_a_generator_are_for_every_feed")
    assert found == [[0, -1, -2]] * 2


@pytest.mark.parametrize("in_flight", [1, 2, 5, None])
def test_no_more_is_taken_than_in_flight(in_flight: int | None) -> None:
    found = child(f"""
        session = GPUSession(NEG)
        taken = handed_out = most = 0
        def endless():
            global taken
            for feed in itertools.cycle(feeds(5)):
                taken += 1
                yield feed
        results = session.map(endless(), in_flight={in_flight})
        for result in results:
            most = max(most, taken - handed_out)
            handed_out += 1
            if handed_out == 50:
                break
        results.close()
        report([most, threads()])
    """)
    assert found == [in_flight or 8, []]


def test_a_feed_that_fails_comes_out_at_its_place_and_ends_the_iteration() -> None:
    found = child("running.pipeline.a_feed_that_fails_comes_out_at_its_place_and_ends_the_iteration")
    assert found == [[0, -1, -2, -3], "InvalidArgument", "ended", [], -1]


def test_an_exception_of_the_feeds_comes_out_at_its_place() -> None:
    found = child("running.pipeline.an_exception_of_the_feeds_comes_out_at_its_place")
    assert found == [[0, -1, -2], {"type": "OSError", "text": "the disk is gone"}, "ended", []]


def test_what_a_handler_of_a_signal_raises_in_the_feeds_comes_out_at_once() -> None:
    """The time limit of a job: who takes no more results than there are before it would go on without one."""
    found = child("running.pipeline.what_a_handler_of_a_signal_raises_in_the_feeds_comes_out_at_once")
    assert found == [{"type": "TimeLimit", "text": "of the job"}, "ended", []]


@pytest.mark.parametrize("end", ["results.close()", "del results", "gc.collect()"])
def test_ended_early_it_leaves_nothing_running(end: str) -> None:
    setup = "cycle = [results]; cycle.append(cycle); del results, cycle" if end == "gc.collect()" else ""
    found = child(f"""
        session = GPUSession(NEG)
        results = session.map(feeds(1000))
        before = threads()
        next(results)
        during = threads()
        {setup}
        {end}
        report([before, bool(during), threads()])
    """)
    assert found == [[], True, []]


@pytest.mark.parametrize("kind", ["GPUSession", "ortgpu.GPUSessionPool"])
def test_collected_in_a_thread_that_it_waits_for(kind: str) -> None:
    """The garbage collector works in any thread: also in one that runs a feed of an iteration that was dropped."""
    found = child(f"""
        from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession
        gc.disable()
        plain, dropped, begun, ended = InferenceSession.run, threading.Event(), [], []
        def run(self, *given):
            if given[1]["x"][0] > 0:
                begun.append(0)
                dropped.wait()
                gc.collect()
                ended.append(0)
            return plain(self, *given)
        InferenceSession.run = run
        session = {kind}(NEG)
        results = session.map(feeds(100))
        cycle = [results]
        cycle.append(cycle)
        next(results)
        del results, cycle
        dropped.set()
        deadline = time.monotonic() + 10
        while len(ended) < max(len(begun), 1) and time.monotonic() < deadline:
            time.sleep(0.01)
        report([len(ended) > 0, len(begun) - len(ended)])
        sys.stdout.flush()
        os._exit(0)  # a thread that waits for itself would be waited for
    """)
    assert found == [True, 0]


def test_collected_with_a_lock_held_that_its_threads_need() -> None:
    found = child("running.pipeline.collected_with_a_lock_held_that_its_threads_need")
    assert found == -2


def test_who_waits_for_the_threads_of_an_iteration_that_was_dropped() -> None:
    """The thread of a program does. No thread of the library does, nor one with a lock or a turn."""
    answers = [_may_wait()]
    with this_thread.holds:
        answers.append(_may_wait())

    def ask() -> None:
        answers.append(_may_wait())

    Turns().run(ask)
    for thread in (Thread(ask, "of the library"), threading.Thread(target=ask)):
        thread.start()
        thread.join()
    assert answers == [True, False, False, False, True]


def test_a_dropped_iteration_is_not_waited_for_with_the_next_turn() -> None:
    """The collector may come amid the wait for a turn, and the threads of the iteration wait for the turn after it."""
    turns, free, answers = Turns(), threading.Lock(), list[bool]()

    class Collected:
        """A lock in whose wait the collector ends an iteration."""

        def acquire(self, timeout: float) -> bool:
            answers.append(_may_wait())
            return free.acquire(timeout=timeout)

        def release(self) -> None:
            free.release()

    turns.lock = Collected()  # type: ignore[assignment]  # a stand-in
    assert turns.run(lambda: 5) == 5
    assert answers == [False]


def test_a_feed_is_let_go_before_the_next_is_taken() -> None:
    found = child("running.pipeline.a_feed_is_let_go_before_the_next_is_taken")
    assert found == [5, [0] * 6]


@pytest.mark.parametrize("kind", ["list", "iter"])
def test_a_result_is_let_go_when_it_was_handed_out(kind: str) -> None:
    found = child(f"""
        import weakref
        kept = []
        for results in (each.map({kind}(feeds(8, 100_000))) for each in (GPUSession(NEG), ortgpu.GPUSessionPool(NEG))):
            for result in results:
                handed_out = weakref.ref(result[0])
                del result
                end = time.monotonic() + 5  # The thread of the run may not have left its frame yet.
                while handed_out() is not None and time.monotonic() < end:
                    time.sleep(0.001)
                kept.append(handed_out() is not None)
        report([len(kept), sum(kept)])
    """)
    assert found == [16, 0]


def test_a_dict_that_is_filled_again_for_the_next_feed() -> None:
    """With another array in it: what was taken is run, not what the dict has by then."""
    found = child("running.pipeline.a_dict_that_is_filled_again_for_the_next_feed")
    assert found == [True, True, True]


def test_the_interpreter_ends_while_an_iteration_stands_still() -> None:
    assert child("running.pipeline.the_interpreter_ends_while_an_iteration_stands_still") == 0


def test_what_is_no_feed() -> None:
    found = child("running.pipeline.what_is_no_feed")
    assert [each.get("type") for each in found] == [
        "TypeError",
        "TypeError",
        "ValueError",
        "TypeError",
        "TypeError",
        None,
    ]
    assert "not one feed" in found[0]["text"]
    assert "a mapping of input names to arrays, not ndarray" in found[4]["text"]
    assert found[5] == {"returned": []}


def test_a_session_that_is_closed_says_so() -> None:
    found = child("running.pipeline.a_session_that_is_closed_says_so")
    closed = [found[0], found[1], found[3]]
    assert [each["type"] for each in closed] == ["ExecutionError"] * 3
    assert all("closed" in each["text"] for each in closed)
    assert found[2] == 0
    assert found[4] == []


def test_iterations_of_several_threads_do_not_disturb_each_other() -> None:
    found = child("running.pipeline.iterations_of_several_threads_do_not_disturb_each_other")
    assert found == [[], []]


def test_a_forked_child_is_refused_and_does_not_hang() -> None:
    found = child("running.pipeline.a_forked_child_is_refused_and_does_not_hang")
    assert found[0]["type"] == "ForkedSessionError"
    assert found[1] == -1


def test_under_wrappers_like_tqdm_and_itertools() -> None:
    found = child("running.pipeline.under_wrappers_like_tqdm_and_itertools")
    assert found == [[0, -1, -2, 0, -1], []]


def test_only_as_many_run_at_a_time_as_there_are_threads() -> None:
    lock, running, most = threading.Lock(), 0, 0
    at_work = threading.Barrier(3)

    def function(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        at_work.wait(30)  # three at a time, or this breaks
        with lock:
            running -= 1
        return -number

    assert list(iterate_in_order(function, iter(range(9)), in_flight=7, threads=3)) == [-number for number in range(9)]
    assert most == 3


@pytest.mark.parametrize(("chosen", "most", "staged"), [({}, 4, 24), ({"map_depth": "2", "map_staging": "0"}, 2, 0)])
def test_a_record_sets_depth_and_staging(chosen: dict[str, str], most: int, staged: int) -> None:
    found = child(
        "running.pipeline.a_record_sets_depth_and_staging",
        json.dumps(chosen),
    )
    assert found == [[-number for number in range(24)], most, staged]


def test_what_is_no_feed_is_told_without_staging_too() -> None:
    found = child("running.pipeline.what_is_no_feed_is_told_without_staging_too")
    assert found == {"type": "TypeError", "text": "a feed is a mapping of input names to arrays, not ndarray"}


def test_feeds_are_taken_in_the_thread_that_iterates() -> None:
    seen = []

    def source() -> Iterator[int]:
        for number in range(20):
            seen.append(threading.current_thread())
            yield number

    assert sum(iterate_in_order(abs, source(), 8, 4)) == sum(range(20))
    assert set(seen) == {threading.current_thread()}


class MadeUpError(Exception):
    pass


@settings(deadline=None, max_examples=150)
@given(
    length=st.integers(0, 25),
    in_flight=st.integers(1, 12),
    threads=st.integers(1, 4),
    bad=st.sets(st.integers(0, 25)),
    source_fails_at=st.none() | st.integers(0, 25),
    consumed=st.integers(0, 30),
)
def test_any_lengths_and_failures(
    length: int, in_flight: int, threads: int, bad: set[int], source_fails_at: int | None, consumed: int
) -> None:
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for number in range(length):
            if number == source_fails_at:
                raise MadeUpError("source")
            taken += 1
            yield number

    def function(number: int) -> int:
        if number in bad:
            raise MadeUpError(number)
        return number * 10

    # What a plain loop over the same feeds gives, one after the other
    expected: list[int] = []
    failure: object = None
    for number in range(length + 1):
        if number == source_fails_at and number < length:
            failure = "source"
        elif number < length and number in bad:
            failure = number
        elif number < length:
            expected.append(number * 10)
            continue
        break

    results = iterate_in_order(function, source(), in_flight, threads)
    got: list[int] = []
    raised: object = None
    ended = False
    while len(got) < consumed and not ended:
        try:
            got.append(next(results))
        except StopIteration:
            ended = True
        except MadeUpError as error:
            raised, ended = error.args[0], True
        else:
            assert taken - len(got) < in_flight
    assert got == expected[:consumed]
    if ended:
        assert raised == failure
        assert next(results, None) is None
    results.close()  # type: ignore[attr-defined]  # of a generator
    assert not [each for each in threading.enumerate() if each.name.startswith("ortgpu-map")]
