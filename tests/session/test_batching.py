"""What ``batched()`` makes of concurrent requests: who runs with whom, whose failure it is, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import ProviderRequestError
from ortgpu.session.pool import joinable
from tests.support.children import child_environment, run_python
from tests.support.pool_child import child as pool_child


def child(program: str) -> Any:
    return pool_child(program, behind="session.batched")


def test_results_are_those_of_separate_runs_whoever_asks() -> None:
    """Two inputs of different types and two outputs, one of integers: by threads, futures and tasks, of both kinds."""
    found = child("session.batched.results_are_those_of_separate_runs_whoever_asks")
    assert found["session"] == [300, 300, 300, 1, True]
    assert found["pool"] == [300, 300, 300, 1, True]
    assert found["left"] == []


def test_what_comes_while_the_gpu_is_busy_runs_together() -> None:
    found = child("session.batched.what_comes_while_the_gpu_is_busy_runs_together")
    assert found["values"] == list(range(30))
    assert sum(found["sizes"]) == 30
    assert len(found["sizes"]) <= 6
    assert max(found["sizes"]) == 8
    assert not any(found["views"])  # one that is kept would keep the memory of all
    assert found["closed"]["type"] == "ExecutionError"


def test_a_request_waits_for_as_many_as_came_last_and_no_lone_client_waits() -> None:
    found = child("session.batched.a_request_waits_for_as_many_as_came_last_and_no_lone_client_waits")
    assert found["alone"] < 5
    assert found["waiting"] == [False, False, True, True, True]
    assert found["sizes"] == [1, 3, 3]


def test_only_what_is_alike_is_joined_and_the_rest_runs_as_it_is() -> None:
    found = child("session.batched.only_what_is_alike_is_joined_and_the_rest_runs_as_it_is")
    for name, expected in {
        "narrow": [[1.0] * 3],
        "wide": [[2.0] * 5] * 2,
        "narrow again": [[3.0] * 3] * 2,
        "large": [[4.0] * 3] * 7,
        "none": [],
        "order": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
    }.items():
        assert found[name] == {"returned": expected}, name
    assert found["wrong type"]["type"] == found["wrong rank"]["type"] == "InvalidArgument"
    assert found["no mapping"]["type"] == "TypeError"
    for name in ("wrong name", "missing", "scalar", "wrong output"):
        assert "type" in found[name], name
    assert found["names 4"] == found["names 5"] == found["names 11"] == {"returned": [[1.0] * 3]}
    assert found["sizes"].count(5) == 1  # the two narrow ones, and the one in another order
    assert found["sizes"].count(2) == 1


TABLE = "m (int64[n] x) => (float[n] y) <float[10] t = {0,1,2,3,4,5,6,7,8,9}> { y = Gather(t, x) }"


def test_one_that_fails_by_its_values_fails_alone() -> None:
    found = child(f"""
        opened = session("{TABLE}")
        with opened.batched() as service:
            gate = held(opened)
            futures = [service.submit(None, {{"x": np.array([0])}})]
            gate.wait_for(1)
            wrong = weakref.ref(array := np.array([77]))
            asked = [np.array([5]), array, *(np.array([n, 9]) for n in range(9))]
            futures += [service.submit(None, {{"x": each}}) for each in asked]
            del asked, array
            gate.opened.set()
            report("results", [outcome(lambda: each.result()[0].tolist()) for each in futures])
            report("runs", len(gate.sizes))
            gc.disable()
            report("held", wrong() is not None)
    """)
    assert [each.get("returned") for each in found["results"]] == [
        [0.0], [5.0], None, *([float(number), 9.0] for number in range(9))
    ]  # fmt: skip
    assert found["results"][2]["type"] == "InvalidArgument"
    assert "77" in found["results"][2]["text"]
    assert found["runs"] == 13  # the first, the joined ones, and each of these again
    assert found["held"] is False


@pytest.mark.parametrize("failure", ["MEMORY", "CUDNN"])
def test_what_is_about_the_gpu_is_told_to_all_of_them_and_nothing_runs_again(failure: str) -> None:
    found = child(f"""
        opened = session()
        opened.device = dataclasses.replace(opened.device, kind="cuda", ordinal=0, name=None)
        with opened.batched() as service:
            gate = Gate()
            watched = Watched(opened, gate)
            futures = [service.submit(None, rows(1))]
            gate.wait_for(1)
            futures += [service.submit(None, rows(1, n)) for n in range(10)]
            watched.first = raising(*{failure})
            gate.opened.set()
            report("results", [outcome(lambda: each.result()[0].shape) for each in futures])
            report("errors", len({{id(each.exception()) for each in futures[1:]}}))
            report("calls", watched.calls)
            watched.first = lambda: None
            report("after", outcome(lambda: service.run(None, rows(1))[0].shape))
    """)
    kind = {"MEMORY": "GPUOutOfMemoryError", "CUDNN": "ProviderFailureError"}[failure]
    assert found["results"][0] == {"returned": [1, 4]}
    assert [each["type"] for each in found["results"][1:]] == [kind] * 10
    assert found["errors"] == 10  # each has its own frames
    assert found["calls"] == 2
    assert found["after"] == {"returned": [1, 4]}


@pytest.mark.parametrize("sizes", [(), (2, 8)])
def test_everything_resolves_under_load(sizes: tuple[int, ...]) -> None:
    """Threads and tasks with requests of all sizes, of which some fail by their values and some are cancelled."""
    found = child(f"""
        from ortgpu.session.pool import joinable
        joinable.sizes_of = lambda *_: {sizes}
        opened = session("{TABLE}")
        with opened.batched(max_batch=8, max_queue=20) as service:
            ended = []
            def values_of(number):
                return np.array([(number + each) % 10 for each in range(number % 11)], np.int64)
            def judged(number, ask):
                indices = values_of(number)
                if number % 17 == 0 and indices.size:
                    indices[-1] = 77
                try:
                    right = ask({{"x": indices}})[0].tolist() == indices.tolist() and 77 not in indices
                    ended.append("right" if right else "wrong")
                except (CancelledError, asyncio.CancelledError) as error:
                    ended.append("cancelled")
                except Exception as error:
                    ended.append(type(error).__name__ if 77 in indices else "wrong")
            def by_future(number):
                def ask(feed):
                    future = service.submit(None, feed)
                    if number % 5 == 0:
                        future.cancel()
                    return future.result(30)
                judged(number, ask)
            def by_run(number):
                judged(number, lambda feed: service.run(["y"], feed))
            def ask(start, by):
                for number in range(start, start + 150):
                    by(number)
            async def by_tasks():
                async def one(number):
                    indices = values_of(number)
                    task = asyncio.create_task(service.arun(None, {{"x": indices}}))
                    if number % 3 == 0:
                        await asyncio.sleep(0.0001 * (number % 10))
                        task.cancel()
                    try:
                        ended.append("right" if (await task)[0].tolist() == indices.tolist() else "wrong")
                    except asyncio.CancelledError:
                        ended.append("cancelled")
                await asyncio.gather(*[one(number) for number in range(600)])
            threads = [threading.Thread(target=ask, args=(150 * n, by_future if n % 2 else by_run)) for n in range(8)]
            threads.append(threading.Thread(target=lambda: asyncio.run(by_tasks())))
            for each in threads: each.start()
            for each in threads: each.join()
            report("ended", {{each: ended.count(each) for each in set(ended)}})
            until(lambda: not at_work(service))
            report("left", [len(service._service.waiting), service._joining.collector is not None])
        report("threads", service_threads())
    """)
    assert sum(found["ended"].values()) == 1800
    assert set(found["ended"]) <= {"right", "cancelled", "InvalidArgument"}
    assert found["ended"]["right"] > 1200
    assert found["ended"]["InvalidArgument"] > 40
    assert found["left"] == [0, False]
    assert found["threads"] == []


@pytest.mark.slow
def test_storms_of_requests_for_a_minute() -> None:
    """Services of random arguments, half of which are closed meanwhile."""
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = run_python("session.batched.storms", TABLE, env=env, deadline=110).ok().reports
    assert found["ended"]["wrong"] == 0
    assert all(count > 100 for how, count in found["ended"].items() if how != "wrong")
    assert found["threads"] == []


def test_a_full_queue_refuses_or_waits() -> None:
    found = child("session.batched.a_full_queue_refuses_or_waits")
    assert [each["type"] for each in found["asked, raise"]] == ["QueueFullError"] * 3
    assert found["asked, raise"][0]["details"] == {"limit": 3}
    assert found["waits"] is True
    assert found["asked, wait"] == [{"returned": [1, 4]}]
    assert len(found["raise"]) == len(found["wait"]) == 6


def test_cancelled_requests_leave_no_trace() -> None:
    """A storm of them, by futures and by tasks, while three batches are held."""
    found = child("session.batched.cancelled_requests_leave_no_trace")
    assert found["cancelled"] == found["told"] == 490
    assert found["tasks"] == 500
    assert (found["waiting"], found["arrays"]) == (10, 0)  # those that wait were copied
    assert found["running"] == [False] * 3
    assert found["kept"] == list(range(0, 500, 50))
    assert found["after"] == 7
    assert found["state"][1:] == [False, 0]
    assert found["sizes"] == 12 + 10 + 1


def test_an_event_loop_goes_on_meanwhile_and_several_may_share_a_service() -> None:
    found = child("session.batched.an_event_loop_goes_on_meanwhile_and_several_may_share_a_service")
    assert found["one"] == [False, list(range(20))]
    assert found["several"] == [list(range(20))] * 4
    assert found["after"] == 7


def test_what_a_callback_raises_or_does_keeps_no_other_request_waiting() -> None:
    found = child("session.batched.what_a_callback_raises_or_does_keeps_no_other_request_waiting")
    assert found["values"] == [*range(9), *range(9)]


# How it ends


def test_close_waits_for_what_runs_and_refuses_what_waits() -> None:
    found = child("session.batched.close_waits_for_what_runs_and_refuses_what_waits")
    refused = [*found["waiting"], *found["asked"], *found["later"], found["without its session"]]
    assert [each["type"] for each in refused] == ["ExecutionError"] * 7
    assert found["running"] == [[2, 4]] * 3
    assert found["left"] == []
    assert found["session"] == [1, 4]


def test_one_that_is_dropped_is_closed_and_a_program_ends_without_closing_it() -> None:
    found = child("session.batched.one_that_is_dropped_is_closed_and_a_program_ends_without_closing_it")
    assert found["result"] == 3
    assert found["came to the end"] is True


@pytest.mark.lab
def test_a_forked_child_is_refused_and_ends() -> None:
    found = child("session.batched.a_forked_child_is_refused_and_ends")
    assert [each["type"] for each in found["child"][:3]] == ["ForkedSessionError"] * 3
    assert found["child"][3] == {"returned": None}
    assert found["status"] == 0
    assert found["parent"] == [1, 4]


@pytest.mark.lab
def test_an_interrupt_at_any_line_stops_nobody_else() -> None:
    found = child("session.batched.an_interrupt_at_any_line_stops_nobody_else")
    assert found["interrupts"] > 50
    assert found["wrong"] == found["left"] == 0
    assert found["threads"] == []


@pytest.mark.lab
def test_a_caller_that_is_stopped_at_any_line_delays_nobody_else() -> None:
    """So a signal handler may ask the service, whatever its thread was about."""
    found = child("session.batched.a_caller_that_is_stopped_at_any_line_delays_nobody_else")
    assert found["stops"] > 30
    assert found["wrong"] == 0
    assert found["threads"] == []


def test_a_request_is_copied_once() -> None:
    found = child("session.batched.a_request_is_copied_once")
    assert found["right"] is True
    assert found["copies"] == 16


# What is refused


REFUSED = [
    ("(float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis=0>(x) }", "output 'y' of joined requests is off by 0."),
    ("(float[n, 4] x) => (float[n, 4] y) { z = ReduceMean<axes=[0]>(x)  y = Sub(x, z) }", "depend on each other"),
    ("(float[n, 4] x) => (float[n, 4] y) { z = ReduceMax<axes=[0]>(x)  y = Div(x, z) }", "depend on each other"),
    (
        "(float[n, 4] x) => (float[n, 4] y) <float[1] s = {0.001}>"
        " { z = ReduceMean<axes=[0]>(x)  w = Mul(z, s)  y = Add(x, w) }",
        "depend on each other",
    ),
    (
        "(float[n, 4] x) => (float[n, 4] y) <int64[1] s = {-1}, int64[1] e = {-99999}, int64[1] a = {0}>"
        " { y = Slice(x, s, e, a, s) }",
        "depend on each other",
    ),
    ("(float[n, 4] x) => (float[n, 4] y) <int64 a = {0}> { y = CumSum(x, a) }", "depend on each other"),
    (
        "(float[n, 4] x) => (float[n, 4] y) <float[4] o = {1, 1, 1, 1}, float[4] z = {0, 0, 0, 0}>"
        " { y, m, v = BatchNormalization<training_mode=1>(x, o, z, z, o) }",
        "depend on each other",
    ),
    ("(int64[n, 4] x) => (int64[n, 4] y) { z = ReduceMax<axes=[0]>(x)  y = Sub(x, z) }", "differs in"),
    ("(float[n, 4] x) => (float[1, 4] y) { y = ReduceMean<axes=[0]>(x) }", "of 64 items has the shape (1, 4)"),
    ("(float[n, 4] x) => (float[4, n] y) { y = Transpose(x) }", "output 'y' of 64 items has the shape (4, 64)"),
    ("(float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }", "input 'x' has a first axis of 3, which is not free"),
    ("(float x) => (float y) { y = Relu(x) }", "input 'x' has no first axis"),
    ("(float[n] x) => (seq(float[n]) y) { y = SequenceConstruct(x) }", "output 'y' of 64 items has the type list"),
    ("(float[n, 4] x) => (float[n, 4] y) { y = Sub(x, x) }", "every item gave the same outputs"),
    ("(float[n, 4] x, seq(float[n]) s) => (float[n, 4] y) { y = Relu(x) }", "no inputs can be made up"),
    ("() => (float[n] y) { y = Constant<value_floats=[1.0, 2.0]>() }", "there are no inputs"),
    (
        "(float[n, w] x) => (float[n, 4] y) <float[3, 4] t = {1,2,3,4,5,6,7,8,9,10,11,12}> { y = MatMul(x, t) }",
        "does not run on made-up inputs",
    ),
]


@pytest.fixture(scope="module")
def refusals() -> dict[str, Any]:
    found: dict[str, Any] = child(f"""
        for text in {[text for text, _ in REFUSED]!r}:
            opened = session("m " + text)
            refused = outcome(lambda: opened.batched())
            with opened.batched(max_batch=1) as service:  # as it says
                report(text, refused)
            opened.close()
        report("left", service_threads())
    """)
    return found


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_a_model_whose_requests_cannot_be_joined_is_refused(refusals: dict[str, Any], text: str, says: str) -> None:
    assert refusals[text]["type"] == "ProviderRequestError"
    assert says in refusals[text]["text"]
    assert refusals["left"] == []


def test_examples_of_the_caller_are_taken_where_none_can_be_made_up() -> None:
    found = child("session.batched.examples_of_the_caller_are_taken_where_none_can_be_made_up")
    assert found["run"] is True
    assert "every item gave the same outputs" in found["one"]["text"]
    assert found["wrong"]["type"] == "Fail"  # of the caller's own inputs
    assert found["no array"]["type"] == "ProviderRequestError"
    assert found["no mapping"]["type"] == "TypeError"
    assert [each["type"] for each in found["arguments"]] == ["ValueError"] * 5 + ["TypeError"] * 2
    assert found["closed"]["type"] == "ExecutionError"


# Which sizes runs are padded to


class Shapes:
    """A model whose runs take long where the shape is new, or is not that of the run before, on a clock of its own."""

    def __init__(self, *, new: float = 0, changed: float = 0, item: float = 0) -> None:
        self.new, self.changed, self.item = new, changed, item
        self.seen: list[int] = []
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def __call__(self, feed: Any) -> Sequence[Any]:
        count = len(feed["x"])
        self.now += (
            0.005 + self.item * count + self.new * (count not in self.seen) + self.changed * (self.seen[-1:] != [count])
        )
        self.seen.append(count)
        return [feed["x"]]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (Shapes(item=0.001), ()),
        (Shapes(new=0.3, item=0.005), (1, 2, 4, 8, 16)),
        (Shapes(new=0.3, changed=0.004, item=0.001), (1, 2, 4, 8, 16)),  # A lone client's size does not change.
        (Shapes(new=0.3), (16,)),  # all sizes take as long
        (Shapes(changed=0.3, item=0.001), (16,)),  # as convolutions do since 1.20
    ],
)
def test_runs_are_padded_only_where_a_new_shape_is_dear(run: Shapes, expected: tuple[int, ...]) -> None:
    feed = {"x": np.zeros((16, 1), np.float32)}
    assert joinable.sizes_of(run, feed, 2, clock=run.clock) == expected
    assert run.seen.count(16) >= 5
    assert all(run.seen.count(size) >= 3 for size in expected)


def test_runs_are_padded_to_powers_of_two_where_each_has_its_plan() -> None:
    run, feed = Shapes(changed=0.3, item=0.005), {"x": np.zeros((16, 1), np.float32)}
    warmed: list[int] = []

    def warm(feeds: Sequence[Any]) -> None:
        warmed.extend(len(each["x"]) for each in feeds)
        run.changed = 0

    assert joinable.sizes_of(run, feed, 2, warm, run.clock) == (1, 2, 4, 8, 16)
    assert warmed == [16, 8, 4, 2, 1]


def test_sizes_are_timed_in_the_memory_of_batches() -> None:
    """Else the run copies what it would not copy later, and half of a batch may take as long as a whole one."""
    found = child("session.batched.sizes_are_timed_in_the_memory_of_batches")
    assert found["same"] == [True]


def test_each_submitted_request_has_rows_at_the_call() -> None:
    """While a batch waits for the GPU, the callers that find no row open the next joined arrays."""
    found = child("session.batched.each_submitted_request_has_rows_at_the_call")
    assert found["values"] == [1, *range(1, 30)]
    assert found["rows"] == [True, 28]


def test_threads_copy_large_arrays_into_rows() -> None:
    found = child("session.batched.threads_copy_large_arrays_into_rows")
    assert found["right"] == 17
    assert min(found["copied"]) >= 64
    assert found["at once"] == [[64, 96, 128]]
    assert found["joined"] == [2.0] * 2 + [3.0] * 3 + [4.0] * 4


def test_padding_shows_in_no_result() -> None:
    found = child("session.batched.padding_shows_in_no_result")
    assert found["right"] == 200
    assert set(found["sizes"]) <= {4, 16}


def test_an_invalid_item_is_nobodys_padding() -> None:
    found = child(f"""
        from ortgpu.session.pool import joinable
        joinable.sizes_of = lambda *_: (8,)
        with session("{TABLE}").batched(max_batch=8) as service:
            values = [3, 77, 4, 5, 77, 77, 6, 7, 8] * 3
            results = [outcome(lambda: service.run(None, {{"x": np.array([value])}})[0].tolist()) for value in values]
            futures = [service.submit(None, {{"x": np.array([value])}}) for value in values]
            results += [outcome(lambda: future.result()[0].tolist()) for future in futures]
            report("results", [each.get("returned", each.get("type")) for each in results])
    """)
    wanted = ["InvalidArgument" if value == 77 else [value] for value in (3, 77, 4, 5, 77, 77, 6, 7, 8)]
    assert found["results"] == wanted * 6


def test_nothing_is_written_to_memory_of_a_session_that_lost_its_gpu() -> None:
    """A reset of the GPU frees pinned memory, and a write to it ends the process."""
    found = child("session.batched.nothing_is_written_to_memory_of_a_session_that_lost_its_gpu")
    assert found["before"] == found["after"] == [{"returned": [1, 4]}] * 2
    assert found["when it is lost"]["type"] == "ProviderFailureError"
    assert found["same arrays"] == [True, True, False, 4]
    assert found["several"] is True
    assert found["untouched"]
    assert all(found["untouched"])


def test_made_up_items_differ() -> None:
    inputs = [
        SimpleNamespace(name="ids", type="tensor(int64)", shape=["n", 3]),
        SimpleNamespace(name="attention_mask", type="tensor(int64)", shape=["n", 3]),
        SimpleNamespace(name="z", type="tensor(float)", shape=["other", "h"]),
    ]
    made = joinable.example(inputs, None, 6)
    assert made["ids"].tolist() == [[0] * 3, [1] * 3] * 3
    assert made["attention_mask"].all()
    assert made["z"].shape == (6, 1)
    assert len(set(made["z"].ravel().tolist())) == 6
    given = joinable.example(inputs[:1], {"ids": [[1, 2, 3], [4, 5, 6]]}, 5)
    assert given["ids"].tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6], [1, 2, 3]]
    with pytest.raises(ProviderRequestError, match="first axis"):
        joinable.example(inputs[:1], {"ids": np.zeros((0, 3), np.int64)}, 5)


def test_a_signal_in_a_thread_of_the_service_delays_no_request() -> None:
    found = child("session.batched.a_signal_in_a_thread_of_the_service_delays_no_request")
    assert found["answered"] == 1500
