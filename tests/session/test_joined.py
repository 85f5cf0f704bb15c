"""Which requests are joined into one run, how they are put together, and how the results are taken apart.

The service runs functions that are made up: no session, no GPU.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import ExecutionError, ProviderFailureError
from ortgpu.process.threads import Outcome
from ortgpu.provider.devices import Device
from ortgpu.session.pool.batching import Batched, Mailbox
from ortgpu.session.pool.joined import Declared, Joining
from ortgpu.session.pool.serving import Service
from ortgpu.session.pool.workers import Feeds, Request, Worker

DEADLINE = 30


def value(name: str, shape: list[Any], kind: str = "tensor(float)") -> Any:
    return SimpleNamespace(name=name, type=kind, shape=shape)


IMAGE, MASK = value("image", ["n", 3, "w"]), value("mask", ["n", "m"], "tensor(int64)")


def images(count: int, width: int = 4, kind: Any = np.float32, channels: int = 3) -> Any:
    return np.arange(count * channels * width, dtype=kind).reshape(count, channels, width)


def masks(count: int, length: int = 2, kind: Any = np.int64) -> Any:
    return np.ones((count, length), kind)


def form_of(feed: Any, most: int = 8) -> tuple[int, object]:
    return Declared([IMAGE, MASK]).items_and_form(feed, most)


def test_a_request_that_conforms_has_its_items_and_a_form() -> None:
    items, form = form_of({"image": images(3), "mask": masks(3)})
    assert items == 3
    assert form is not None
    assert form_of({"mask": masks(1), "image": images(1)}) == (1, form), "neither order nor length decide"


WRONG: dict[str, Any] = {
    "inputs of two lengths": {"image": images(3), "mask": masks(2)},
    "inputs of two lengths, one of them single": {"image": images(1), "mask": masks(2)},
    "no items": {"image": images(0), "mask": masks(0)},
    "more items than a run": {"image": images(9), "mask": masks(9)},
    "another type": {"image": images(3, kind=np.float64), "mask": masks(3)},
    "another type of a further input": {"image": images(3), "mask": masks(3, kind=np.int32)},
    "a further axis": {"image": images(3)[..., None], "mask": masks(3)},
    "an axis less": {"image": images(3)[:, 0], "mask": masks(3)},
    "another length of a fixed axis": {"image": images(3, channels=4), "mask": masks(3)},
    "a scalar": {"image": np.float32(1), "mask": masks(3)},
    "an array without axes": {"image": np.array(1, np.float32), "mask": masks(3)},
    "a list": {"image": images(3).tolist(), "mask": masks(3)},
    "an input less": {"image": images(3)},
    "an unknown input": {"image": images(3), "masks": masks(3)},
    "an input more": {"image": images(3), "mask": masks(3), "other": masks(3)},
    "no dict": [images(3), masks(3)],
}


@pytest.mark.parametrize("name", WRONG)
def test_any_other_request_runs_alone(name: str) -> None:
    """Joined, it would fail the run of others, or change their results."""
    assert form_of(WRONG[name]) == (1, None)


@pytest.mark.parametrize(
    "other",
    [
        {"image": images(3, width=5), "mask": masks(3)},
        {"image": images(3), "mask": masks(3, length=3)},
    ],
)
def test_other_lengths_of_free_axes_are_another_form(other: Any) -> None:
    _, form = form_of({"image": images(3), "mask": masks(3)})
    _, other_form = form_of(other)
    assert other_form is not None
    assert form != other_form


def test_an_input_of_no_declared_type_has_its_type_in_the_form() -> None:
    declared = Declared([value("x", ["n"], "tensor(complex64)")])
    single, double = (declared.items_and_form({"x": np.ones(2, kind)}, 8) for kind in (np.float32, np.float64))
    assert single[0] == double[0] == 2
    assert single[1] != double[1]


# Requests, and the joined arrays


class Memory(Feeds):
    """Ordinary memory with an identity."""

    def __init__(self) -> None:
        self.identity = (1,)

    def source(self) -> tuple[int, ...]:
        return self.identity

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def pass_through(self, feed: Any) -> Any:
        return feed

    def copied(self, feed: Any, waits: Any = ()) -> tuple[Any, bool]:
        return {name: array.copy() for name, array in feed.items()}, True


class Running(Worker):
    """A worker that runs a function."""

    def __init__(self, function: Callable[[Any], Any], most: int = 1) -> None:
        super().__init__(0, most)
        self.capacity = most
        self.function = function
        self.feeds: list[Any] = []

    @property
    def device(self) -> Device:
        return Device("cuda", 0, "GPU-0", None, None, None, None)

    def run(self, output_names: Any, feed: Any) -> Any:
        self.feeds.append({name: np.array(array) for name, array in feed.items()})
        return self.function(feed)

    def close(self, timeout: float | None) -> None:
        pass


ITEMS = Declared([value("x", ["n", 2])])


@contextmanager
def joining(
    function: Callable[[Any], Any], *, most: int = 8, sizes: tuple[int, ...] = (), memory: Memory | None = None
) -> Iterator[tuple[Joining, Service, Running]]:
    memory = memory or Memory()
    worker, service = Running(function), Service("ortgpu-test", "GPUSessionPool", memory)
    service.workers.append(worker)
    service.open()
    made = Joining(service, most, 0.0)
    made.sizes = sizes
    try:
        yield made, service, worker
    finally:
        service.close(DEADLINE)


def item(number: float, count: int = 1) -> dict[str, Any]:
    return {"x": np.full((count, 2), number, np.float32)}


def request(made: Joining, service: Service, feed: Any, names: Any = None, most: int = 8) -> Request:
    items, form = ITEMS.items_and_form(feed, most)
    return Request(service, names, feed, Outcome(), made, items, form)


class Gate:
    def __init__(self) -> None:
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()

    def hold(self) -> None:
        self.arrived.release()
        assert self.opened.wait(DEADLINE)


def together(
    made: Joining, service: Service, worker: Running, requests: list[Request], *, keep: Any = None
) -> list[Any]:
    """Answer requests that came while the only worker was busy. Return the results or errors."""
    gate, function = Gate(), worker.function

    def first(feed: Any) -> Any:
        gate.hold()
        worker.function = function
        worker.feeds.clear()
        return []

    worker.function = first
    service.ask(Request(service, None, {}, Outcome()), 100)
    assert gate.arrived.acquire(timeout=DEADLINE)
    for each in requests:
        service.ask(each, 100, keep=keep)
    gate.opened.set()
    results: list[Any] = []
    for each in requests:
        try:
            results.append(each.outcome.result())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)
    return results


def negated(feed: Any) -> Any:
    return [-feed["x"], feed["x"].sum(axis=1)]


def test_requests_run_together_and_each_gets_its_own_part() -> None:
    with joining(negated) as (made, service, worker):
        asked = [request(made, service, item(number, count)) for number, count in ((1, 1), (2, 3), (3, 2))]
        results = together(made, service, worker, asked)
        assert [len(feed["x"]) for feed in worker.feeds] == [6]
        for (number, count), (first, second) in zip(((1, 1), (2, 3), (3, 2)), results, strict=True):
            assert first.tolist() == [[-number, -number]] * count
            assert second.tolist() == [2 * number] * count
        owned = [output for outputs in results for output in outputs]
        assert all(output.base is None for output in owned), "no result keeps the memory of all"
        assert len({output.ctypes.data for output in owned}) == len(owned)


@pytest.mark.parametrize(
    "other",
    [
        lambda made, service: Request(service, ["y"], item(2), Outcome(), made, 1, ITEMS.items_and_form(item(2), 8)[1]),
        lambda made, service: Request(
            service,
            None,
            item(2),
            Outcome(),
            Joining(service, 8, 0.0),
            1,
            ITEMS.items_and_form(item(2), 8)[1],
        ),
        lambda made, service: Request(service, None, item(2), Outcome(), made, 1, ("another", "form")),
        lambda made, service: Request(service, None, item(2), Outcome(), made, 1, None),
        lambda made, service: Request(service, None, item(2), Outcome()),
    ],
    ids=["outputs", "service", "form", "alone", "of a pool"],
)
def test_requests_that_differ_run_apart(other: Callable[[Joining, Service], Request]) -> None:
    with joining(negated) as (made, service, worker):
        asked = [request(made, service, item(1)), other(made, service)]
        assert not asked[0].runs_with(asked[1])
        assert not asked[1].runs_with(asked[0])
        assert asked[1].runs_with(asked[1])
        together(made, service, worker, asked)
        assert [len(feed["x"]) for feed in worker.feeds] == [1, 1]


def test_no_run_has_more_items_than_are_allowed() -> None:
    with joining(negated, most=4) as (made, service, worker):
        asked = [request(made, service, item(number, 2), most=4) for number in range(5)]
        results = together(made, service, worker, asked)
        assert [outputs[0][0, 0] for outputs in results] == [-number for number in range(5)]
        assert all(len(feed["x"]) <= 4 for feed in worker.feeds)
        assert sum(len(feed["x"]) for feed in worker.feeds) == 10


def test_a_caller_may_write_to_its_arrays_once_they_are_kept() -> None:
    with joining(negated) as (made, service, worker):
        feeds = [item(number) for number in range(3)]
        asked = [request(made, service, dict(feed)) for feed in feeds]

        def keep(each: Request) -> None:
            made.keep(each)
            feeds[asked.index(each)]["x"][:] = 99

        results = together(made, service, worker, asked, keep=keep)
        assert [outputs[0][0, 0] for outputs in results] == [0, -1, -2]


def test_a_request_that_is_cancelled_between_others_changes_no_result() -> None:
    """Its row lies between theirs, and a run of the first rows would leave one of theirs out."""
    with joining(negated) as (made, service, worker):
        asked = [request(made, service, item(number)) for number in (1, 2, 3)]
        made._last = 4  # so many were joined before: the arrays of callers get rows of the next batch

        def keep(each: Request) -> None:
            made.keep(each)
            assert each.sheet is not None
            if each is asked[2]:
                assert asked[1].outcome.cancel()

        gate, function = Gate(), worker.function

        def first(feed: Any) -> Any:
            gate.hold()
            return []

        worker.function = first
        service.ask(Request(service, None, {}, Outcome()), 100)
        assert gate.arrived.acquire(timeout=DEADLINE)
        for each in asked:
            service.ask(each, 100, keep=keep)
        worker.function = function
        gate.opened.set()
        assert [asked[place].outcome.result()[0].tolist() for place in (0, 2)] == [[[-1, -1]], [[-3, -3]]]


def test_only_the_wrong_request_raises_its_error() -> None:
    def refusing(feed: Any) -> Any:
        if (feed["x"] < 0).any():
            raise ValueError("negative")
        return [feed["x"] * 2]

    with joining(refusing) as (made, service, worker):
        results = together(made, service, worker, [request(made, service, item(number)) for number in (1, 2, -3, 4)])
        assert [type(result).__name__ for result in results] == ["list", "list", "ValueError", "list"]
        assert [results[place][0][0, 0] for place in (0, 1, 3)] == [2, 4, 8]


def test_a_failure_of_the_gpu_is_everybodys_and_nothing_runs_again() -> None:
    error = ProviderFailureError("the GPU reports an uncorrectable memory error", library="CUDA", status="214")

    def failing(feed: Any) -> Any:
        raise error

    with joining(failing) as (made, service, worker):
        results = together(made, service, worker, [request(made, service, item(number)) for number in range(3)])
        assert [type(result) for result in results] == [ProviderFailureError] * 3
        assert len({*map(id, results)}) == 3, "a shared error would collect the frames of all callers"
        assert len(worker.feeds) == 1


@pytest.mark.parametrize("function", [lambda feed: [feed["x"].sum()], lambda feed: [feed["x"][:1]]])
def test_outputs_that_do_not_fit_are_not_taken_apart(function: Callable[[Any], Any]) -> None:
    """Each request runs alone then."""
    with joining(function) as (made, service, worker):
        results = together(made, service, worker, [request(made, service, item(number)) for number in (1, 2)])
        assert [float(np.ravel(outputs[0])[0]) for outputs in results] in ([2.0, 4.0], [1.0, 2.0])
        assert [len(feed["x"]) for feed in worker.feeds] == [2, 1, 1]


def test_a_run_is_padded_to_the_next_size_with_valid_items() -> None:
    with joining(negated, sizes=(2, 4, 8)) as (made, service, worker):
        for count, size in ((3, 3), (3, 4), (5, 8), (2, 2), (1, 2)):  # the first of a form is planned anyhow
            asked = [request(made, service, item(number + 1)) for number in range(count)]
            results = together(made, service, worker, asked)
            assert [outputs[0].tolist() for outputs in results] == [[[-n - 1, -n - 1]] for n in range(count)]
            assert [len(feed["x"]) for feed in worker.feeds] == [size]
            assert {*np.unique(worker.feeds[0]["x"])} <= {1, 2, 3, 4, 5}


def test_an_item_of_a_failed_run_is_nobodys_padding() -> None:
    def refusing(feed: Any) -> Any:
        if not np.isfinite(feed["x"]).all():
            raise ValueError("not finite")
        return [feed["x"] * 2]

    with joining(refusing, sizes=(4, 8)) as (made, service, worker):
        made.known.append(ITEMS.items_and_form(item(1), 8)[1])
        bad = [request(made, service, item(number)) for number in (1, np.nan, np.nan)]
        assert [type(result).__name__ for result in together(made, service, worker, bad)][1:] == ["ValueError"] * 2
        for _ in range(2):
            good = [request(made, service, item(number)) for number in (1, 2)]
            assert [type(result) for result in together(made, service, worker, good)] == [list, list]


def no_service(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


def test_nothing_is_written_to_memory_that_is_gone() -> None:
    """A session has lost its GPU, and its pinned memory with it."""
    memory = Memory()
    made = Joining(no_service(feeds=memory, most=2), 8, 0.0)
    asked = Request(no_service(), None, item(1), Outcome(), None, 1, "form")
    before = made.take(asked, 4)
    made.give_back(before)
    assert made.take(asked, 4).arrays is before.arrays, "memory is used again"
    made.give_back(before)
    memory.identity = (2,)
    after = made.take(asked, 4)
    assert after.arrays is not before.arrays
    assert not made._idle, "memory that is gone is let go"
    made.give_back(before)
    assert made.take(asked, 4).arrays is not before.arrays
    made._idle.append(before)  # as a thread that looked before the loss
    assert made.take(asked, 4).arrays is not before.arrays
    made._idle.clear()
    made.give_back(after)
    made.close()
    assert not made._idle


def test_rows_go_to_one_request_each() -> None:
    made = Joining(no_service(feeds=Memory(), most=2), 3, 0.0)
    asked = [Request(no_service(), None, item(n + 1, n + 1), Outcome(), None, n + 1, "form") for n in range(3)]
    sheet = made.take(asked[0], 3)
    assert [sheet.place(each) for each in asked] == [True, True, False]
    assert sheet.arrays["x"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert [each.row for each in asked[:2]] == [0, 1]
    assert not sheet.takes(asked[0]), "no row is left"
    other = Request(no_service(), ["y"], item(1), Outcome(), None, 1, "form")
    assert not made.take(asked[0], 3).takes(other)
    assert not made.take(other, 3).takes(asked[0])


# Ends


def test_a_service_of_a_pool_that_closes_waits_for_its_batches_and_the_pool_stays() -> None:
    """Its arrays are read until the batch has ended."""
    gate = Gate()

    def hold(feed: Any) -> Any:
        gate.hold()
        return [feed["x"]]

    with joining(hold) as (_, service, _worker):
        batched = Batched.__new__(Batched)
        batched._service, batched._is_alone = service, False
        batched._joining = made = Joining(service, 8, 0.0)
        asked = request(made, service, item(1))
        service.ask(asked, 100)
        assert gate.arrived.acquire(timeout=DEADLINE)
        with pytest.raises(TimeoutError, match=r"after 0\.05 s, joined requests still run"):
            batched.close(0.05)
        with pytest.raises(ExecutionError, match="this service of joined requests is closed"):
            service.ask(request(made, service, item(2)), 100)
        gate.opened.set()
        batched.close(DEADLINE)
        assert not service.runs_of(made)
        assert asked.outcome.result()[0].tolist() == [[1, 1]]
        assert not service.is_closed


def test_a_cancelled_task_takes_no_answer_of_another_along() -> None:
    async def ask() -> list[Any]:
        mailbox, loop = Mailbox(), asyncio.get_running_loop()
        answers = [loop.create_future() for _ in range(4)]
        answers[1].cancel()
        for number, answer in enumerate(answers):
            mailbox.put(answer, number, None if number < 3 else KeyError("of the last"))
        return await asyncio.gather(*answers, return_exceptions=True)

    first, cancelled, third, last = asyncio.run(ask())
    assert (first, third) == (0, 2)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(last, KeyError)
