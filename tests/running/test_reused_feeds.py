"""Generators that fill one array again for each feed: ``map``, ``pool.map`` and ``submit`` give what ``run`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.cpu_session import child

pytestmark = pytest.mark.lab


def reused(program: str, *arguments: str, deadline: float = 60) -> Any:
    return child(program, *arguments, behind="running.reused_feeds running.pinned_feeds", deadline=deadline)


def test_every_kind_of_feed_on_the_cpu() -> None:
    found = reused(
        "running.reused_feeds.every_kind_of_feed_on_the_cpu",
        deadline=200,
    )
    assert found[0] > 30
    assert found[1:] == [{}, []]


@pytest.fixture
def with_stub(stubs: Stubs) -> Callable[..., Any]:
    return lambda program, *arguments, **named: reused(program, str(stubs.cudart), *arguments, **named)


@pytest.mark.parametrize("kind", ["GPUSession(NEG)", "ortgpu.GPUSessionPool(NEG)"])
def test_the_copy_is_in_pinned_memory_which_is_used_again(with_stub: Any, kind: str) -> None:
    """And no run copies it once more."""
    found = with_stub(f"""
        watch()
        each = with_pinned({kind})
        results = last(each.map(counted(60, np.zeros(SIZE, np.float32))))
        session = getattr(each, "sessions", [each])[0]
        report([results == [-n for n in range(60)], read.count(True), stub.stub_allocations() <= 8,
                session._pinned.bytes_in_use])
    """)
    assert found == [True, 60, True, 0]


def test_submit_waits_for_a_run_where_pinned_memory_is_full(with_stub: Any) -> None:
    """Not for one that was cancelled, nor in a callback of a future, where a run would wait for itself."""
    found = with_stub("running.pinned_feeds.submit_waits_for_a_run_where_pinned_memory_is_full")
    assert found == [True, [30, 0], True, True, [0, 1, 2, 3], 0]


def test_submit_copies_to_pinned_memory(with_stub: Any) -> None:
    found = with_stub("running.pinned_feeds.submit_copies_to_pinned_memory")
    assert found == [True, 30, 0]


@pytest.mark.parametrize("kind", ["GPUSession(NEG)", "ortgpu.GPUSessionPool(NEG)"])
def test_a_full_memory_is_waited_for(with_stub: Any, kind: str) -> None:
    """Copies have half of it: results need some as well."""
    found = with_stub(f"""
        watch()
        each = with_pinned({kind}, 5 * MIB)
        results, pinned = [], []
        for result in each.map(counted(30, np.zeros(SIZE, np.float32))):
            results.append(result)
            pinned.append(stub.stub_pinned_bytes())
        report([last(results) == [-n for n in range(30)], read.count(True), max(pinned), most[1]])
    """)
    assert found == [True, 30, 2 << 20, 2]


@pytest.mark.parametrize("limit", [0, 5])
def test_what_does_not_fit_is_copied_to_ordinary_memory_without_waiting(with_stub: Any, limit: int) -> None:
    """Where no memory is pinned, or the caller has all of it."""
    found = with_stub(f"""
        watch()
        session = with_pinned(GPUSession(NEG), {limit} * MIB)
        held = [session.pinned_empty(SIZE) for _ in range({limit})]
        results = last(session.map(counted(30, np.zeros(SIZE, np.float32))))
        report([results == [-n for n in range(30)], read.count(True), most[1] > 1])
    """)
    assert found == [True, 0, True]


def test_an_array_that_never_fits_is_not_waited_for(with_stub: Any) -> None:
    """The others of its feed fit, and are given back when runs end: waiting for that would leave one run at a time."""
    found = with_stub("running.pinned_feeds.an_array_that_never_fits_is_not_waited_for")
    assert found == [True, 20, True]


def test_a_feed_larger_than_the_memory(with_stub: Any) -> None:
    found = with_stub("running.pinned_feeds.a_feed_larger_than_the_memory")
    assert found == [True, 0]


@pytest.mark.parametrize(
    "end", ["results.close()", "del results", "outcome(lambda: list(results))", "interrupted(results)"]
)
def test_an_iteration_that_ends_early_gives_its_memory_back(with_stub: Any, end: str) -> None:
    found = with_stub(f"""
        session = with_pinned(GPUSession(NEG))
        def failing():
            array = np.zeros(SIZE, np.float32)
            yield from counted(20, array)
            raise (KeyboardInterrupt if {end!r}.startswith("interrupted") else OSError)
        def interrupted(results):
            try:
                list(results)
            except KeyboardInterrupt:
                pass
        results = session.map(failing())
        next(results)
        {end}
        gc.collect()
        before = session._pinned.bytes_in_use
        session.close()
        report([before, stub.stub_pinned_bytes(), threads()])
    """)
    assert found == [0, 0, []]


def test_lists_and_tuples_are_not_copied() -> None:
    """Nor is what is run before the next is asked for. A class of the caller's may do what a generator does."""
    found = reused("running.reused_feeds.lists_and_tuples_are_not_copied")
    assert found == [[False, False, True, True]] * 2 + [[False, False]]


def test_what_cannot_be_copied_is_run_before_the_next_is_asked_for() -> None:
    found = reused("running.reused_feeds.what_cannot_be_copied_is_run_before_the_next_is_asked_for")
    assert found == [[-n for n in range(6)]] * 3 + [[*range(6)] * 3]


def test_a_value_that_cannot_be_copied_on_the_gpu_is_left_to_the_run(with_stub: Any) -> None:
    """Of a context that is lost, say: the run tells it by a typed error, and the copy raised CudaCallError."""
    found = with_stub("running.pinned_feeds.a_value_that_cannot_be_copied_on_the_gpu_is_left_to_the_run")
    assert found == [[-1] * 4] * 3


def test_copies_of_any_array(with_stub: Any) -> None:
    """Large ones are copied in threads."""
    found = with_stub("running.pinned_feeds.copies_of_any_array")
    assert found == [[], True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["GPUSession", "GPUSessionPool"])
def test_any_feeds_of_a_generator_for_minutes(with_stub: Any, kind: str) -> None:
    """Arrays of any size and order, exchanged and filled again; limits that do not suffice; iterations that end
    anywhere."""
    found = with_stub(
        "running.pinned_feeds.any_feeds_of_a_generator_for_minutes",
        kind,
        deadline=400,
    )
    assert found == [True, [], []]
