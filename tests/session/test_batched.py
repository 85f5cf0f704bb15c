"""What ``batched()`` makes of concurrent requests: who runs with whom, whose failure it is, and what is refused."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgpu.errors import ProviderRequestError
from ortgpu.session.pool import joinable
from tests.support.children import child_environment, run_python
from tests.support.pool_child import PRELUDE as POOL_PRELUDE
from tests.support.pool_child import child as pool_child

PRELUDE = """
import asyncio, onnx.parser

def model(text):
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()

def session(text="m (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }"):
    return ortgpu.GPUSession(model(text), allow_cpu=True)

def rows(count, value=1.0, width=4, dtype=np.float32):
    return {"x": np.full((count, width), value, dtype)}

def held(opened):
    '''Holds the runs of a session, and has the number of items of each.'''
    gate, sizes, inner = Gate(), [], opened._sess
    class Held:
        def __getattr__(self, name):
            return getattr(inner, name)
        def run(self, names, feed, options):
            sizes.append(len(feed["x"]))
            gate()
            return inner.run(names, feed, options)
    opened._sess = Held()
    gate.sizes = sizes
    return gate

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)

def at_work(service):
    return service._joining.collector is not None or service._service.runs_of(service._joining)

def service_threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("ortgpu-batched")]
"""


def child(code: str) -> Any:
    return pool_child(PRELUDE + textwrap.dedent(code))


def test_results_are_those_of_separate_runs_whoever_asks() -> None:
    """Two inputs of different types and two outputs, one of integers: by threads, futures and tasks, of both kinds."""
    found = child("""
        TWO = model('''m (float[n, 4] x, int64[n] k) => (float[n, 2] y, int64[n] i) <int64[1] one = {1}> {
            a, b = Split<axis=1>(x)  y = Sub(a, b)
            s = ReduceSum<keepdims=0>(x, one)  t = Cast<to=7>(s)  i = Add(t, k) }''')
        random = np.random.default_rng(0)
        feeds = [{"x": (100 * random.standard_normal((count, 4))).astype(np.float32),
                  "k": random.integers(0, 9, count)} for count in random.integers(1, 6, 300)]
        plain = ortgpu.GPUSession(TWO, allow_cpu=True)
        expected = [plain.run(None, each) for each in feeds]
        def right(results):
            return [all(np.array_equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(*both))
                    for both in zip(results, expected, strict=True)].count(True)
        for name, target in (("session", plain), ("pool", GPUSessionPool(TWO, allow_cpu=True, sessions_per_device=2))):
            with target.batched(max_batch=16) as service:
                futures = [service.submit(None, each) for each in feeds]
                by_threads = [None] * len(feeds)
                def ask(start):
                    for number in range(start, len(feeds), 10):
                        by_threads[number] = service.run(["y", "i"], feeds[number])
                threads = [threading.Thread(target=ask, args=(n,)) for n in range(10)]
                for each in threads: each.start()
                async def ask_all():
                    return await asyncio.gather(*[service.arun(None, each) for each in feeds])
                by_tasks = asyncio.run(ask_all())
                for each in threads: each.join()
                one = service.run(["i"], feeds[0])
                report(name, [right([each.result() for each in futures]), right(by_threads), right(by_tasks),
                              len(one), one[0].tolist() == expected[0][1].tolist()])
            target.close()
        report("left", service_threads() + pool_threads())
    """)
    assert found["session"] == [300, 300, 300, 1, True]
    assert found["pool"] == [300, 300, 300, 1, True]
    assert found["left"] == []


def test_what_comes_while_the_gpu_is_busy_runs_together() -> None:
    found = child("""
        opened = session()
        with opened.batched(max_batch=8) as service:
            gate = held(opened)
            futures = [service.submit(None, rows(1, n)) for n in range(2)]
            gate.wait_for(1)
            futures += [service.submit(None, rows(1, n)) for n in range(2, 30)]
            gate.wait_for(1)  # full: it runs beside the first
            gate.opened.set()
            results = [future.result() for future in futures]
            report("values", [float(result[0][0, 0]) for result in results])
            report("sizes", gate.sizes)
            report("views", [result[0].base is not None for result in results[2:]])
        report("closed", outcome(lambda: service.run(None, rows(1))))
    """)
    assert found["values"] == list(range(30))
    assert sum(found["sizes"]) == 30
    assert len(found["sizes"]) <= 6
    assert max(found["sizes"]) == 8
    assert not any(found["views"])  # one that is kept would keep the memory of all
    assert found["closed"]["type"] == "ExecutionError"


def test_a_request_waits_for_as_many_as_came_last_and_no_lone_client_waits() -> None:
    found = child("""
        opened = session()
        with opened.batched(max_wait=20) as service:
            before = time.monotonic()
            for _ in range(20):
                service.run(None, rows(1))
            report("alone", time.monotonic() - before)
            gate = held(opened)
            futures = [service.submit(None, rows(1))]
            gate.wait_for(1)
            futures += [service.submit(None, rows(1)) for _ in range(3)]
            gate.opened.set()
            wait(futures)
            futures = [service.submit(None, rows(1)) for _ in range(2)]  # of those three clients
            time.sleep(0.2)
            waiting = [future.done() for future in futures]
            futures.append(service.submit(None, rows(1)))
            wait(futures, 10)
            report("waiting", waiting + [future.done() for future in futures])
            report("sizes", gate.sizes)
    """)
    assert found["alone"] < 5
    assert found["waiting"] == [False, False, True, True, True]
    assert found["sizes"] == [1, 3, 3]


def test_only_what_is_alike_is_joined_and_the_rest_runs_as_it_is() -> None:
    found = child("""
        opened = session("m (float[n, w] x) => (float[n, w] y) { y = Relu(x) }")
        with opened.batched(max_batch=6) as service:
            gate = held(opened)
            first = service.submit(None, rows(1))
            gate.wait_for(1)
            given = {
                "narrow": rows(1, 1, 3), "wide": rows(2, 2, 5), "narrow again": rows(2, 3, 3), "large": rows(7, 4, 3),
                "none": rows(0), "wrong type": rows(1, 5, dtype=np.float64), "missing": {}, "no mapping": [1],
                "wrong rank": {"x": np.ones(3, np.float32)}, "wrong name": {"z": np.ones((1, 3), np.float32)},
                "scalar": {"x": 1.0},
                "order": {"x": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))},
            }
            futures = {name: service.submit(None, feed) for name, feed in given.items()}
            futures["wrong output"] = service.submit(["z"], rows(1, 1, 3))
            for number, names in enumerate((np.array(["y", "y"]), [np.ones(2)], 7, "y", ("y",), iter(["y"])) * 2):
                futures[f"names {number}"] = service.submit(names, rows(1, 1, 3))
            gate.opened.set()
            for name, future in futures.items():
                report(name, outcome(lambda: future.result()[0].tolist()))
            report("sizes", gate.sizes)
    """)
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
    assert found["runs"] < 11
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


STORM = """
from ortgpu.session.pool import joinable
import random
random.seed(1)
joinable.sizes_of = lambda _, feed, *__: random.choice([(), (len(feed["x"]),), (2, len(feed["x"]))])
pool = GPUSessionPool(model(TABLE), allow_cpu=True, sessions_per_device=2)
ended = dict.fromkeys(("right", "wrong", "cancelled", "its own error", "full", "closed"), 0)

async def ask(service, by, cancels):
    indices = np.array([random.randrange(10) for _ in range(random.randrange(1, 9))])
    if is_wrong := random.random() < 0.03:
        indices[-1] = 77
    given = {"x": indices}
    try:
        if by == "tasks":
            results = await asyncio.wait_for(service.arun(None, given), random.random() / 300 if cancels else 60)
        elif by == "run":
            results = service.run(None, given)
        else:
            future = service.submit(None, given)
            if cancels:
                future.cancel()
            results = future.result(60)
        how = "wrong" if is_wrong or results[0].tolist() != indices.tolist() else "right"
    except (CancelledError, asyncio.CancelledError, asyncio.TimeoutError):
        how = "cancelled"
        await asyncio.sleep(0)
    except ortgpu.QueueFullError:
        how = "full"
        await asyncio.sleep(0)
    except ortgpu.ExecutionError:
        how = "closed"
    except C.InvalidArgument:
        how = "its own error" if is_wrong else "wrong"
    with lock:
        ended[how] += 1
    return how != "closed"

async def client(service, by, until):
    while time.monotonic() < until and await ask(service, by, random.random() < 0.3):
        pass

async def clients(service, until):
    await asyncio.gather(*[client(service, "tasks", until) for _ in range(20)])

over = time.monotonic() + 60
while time.monotonic() < over:
    service = pool.batched(random.choice([1, 2, 5, 16, 64]), random.choice([0, 0.001, 0.01]),
                           max_queue=random.choice([1, 3, 50, 1000]), when_full=random.choice(["wait", "raise"]))
    until = time.monotonic() + random.random()
    works = [clients(service, until), *(client(service, by, until) for by in ("run", "submit") * 3)]
    threads = [threading.Thread(target=asyncio.run, args=(each,)) for each in works]
    for each in threads: each.start()
    if random.random() < 0.5:
        time.sleep(random.random() / 2)
        service.close()
    for each in threads: each.join()
    end = time.monotonic() + 10
    while at_work(service) or service._service.waiting:
        assert time.monotonic() < end, "something is left"
        time.sleep(0.001)
    service.close()
report("ended", ended)
report("threads", service_threads())
"""


@pytest.mark.slow
def test_storms_of_requests_for_a_minute() -> None:
    """Services of random arguments, half of which are closed meanwhile."""
    program = f"TABLE = {TABLE!r}\n{STORM}"
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = run_python(POOL_PRELUDE + PRELUDE + program, env=env, deadline=110).ok().reports
    assert found["ended"]["wrong"] == 0
    assert all(count > 100 for how, count in found["ended"].items() if how != "wrong")
    assert found["threads"] == []


def test_a_full_queue_refuses_or_waits() -> None:
    found = child("""
        opened = session()
        for when in ("raise", "wait"):
            with opened.batched(max_batch=2, max_queue=3, when_full=when) as service:
                inner = opened._sess
                gate = held(opened)
                futures = [service.submit(None, rows(2)) for _ in range(3)]
                gate.wait_for(3)  # all threads have a full batch
                futures += [service.submit(None, rows(1)) for _ in range(3)]
                asked = []
                threads = [threading.Thread(target=lambda: asked.append(outcome(action)), daemon=True) for action in (
                    lambda: service.submit(None, rows(1)).result()[0].shape,
                )]
                for each in threads: each.start()
                if when == "raise":
                    threads[0].join()
                    async def ask():
                        return await service.arun(None, rows(1))
                    asked += [outcome(lambda: service.run(None, rows(1))), outcome(lambda: asyncio.run(ask()))]
                    futures[-1].cancel()  # which makes room at once
                    futures.append(service.submit(None, rows(1)))
                    futures.pop(-2)
                else:
                    time.sleep(0.2)
                    report("waits", threads[0].is_alive())
                gate.opened.set()
                report(when, [future.result()[0].shape for future in futures])
                for each in threads: each.join()
                report("asked, " + when, asked)
                opened._sess = inner
    """)
    assert [each["type"] for each in found["asked, raise"]] == ["QueueFullError"] * 3
    assert found["asked, raise"][0]["details"] == {"limit": 3}
    assert found["waits"] is True
    assert found["asked, wait"] == [{"returned": [1, 4]}]
    assert len(found["raise"]) == len(found["wait"]) == 6


def test_cancelled_requests_leave_no_trace() -> None:
    """A storm of them, by futures and by tasks, while three batches are held."""
    found = child("""
        opened = session()
        with opened.batched(max_batch=4) as service:
            gate = held(opened)
            running = [service.submit(None, rows(4)) for _ in range(3)]
            gate.wait_for(3)
            gc.collect()
            gc.disable()
            gone = []
            def some(count):
                for number in range(count):
                    feed = rows(1, number)
                    gone.append(weakref.ref(feed["x"]))
                    yield service.submit(None, feed)
            futures = list(some(500))
            kept = futures[::50]
            cancelled = [each for each in futures if each not in kept]
            report("cancelled", sum(each.cancel() for each in cancelled))
            report("told", len(wait(cancelled, 10).done))
            async def storm():
                tasks = []
                for number in range(500):
                    feed = rows(1, number)
                    gone.append(weakref.ref(feed["x"]))
                    tasks.append(asyncio.create_task(service.arun(None, feed)))
                del feed
                await asyncio.sleep(0)
                for each in tasks: each.cancel()
                return sum(isinstance(each, asyncio.CancelledError)
                           for each in await asyncio.gather(*tasks, return_exceptions=True))
            report("tasks", asyncio.run(storm()))
            report("waiting", len(service._service.waiting))
            report("arrays", sum(each() is not None for each in gone))
            report("running", [each.cancel() for each in running])
            gate.opened.set()
            report("kept", [float(each.result()[0][0, 0]) for each in kept])
            report("after", float(service.run(None, rows(1, 7))[0][0, 0]))
            report("state", [False, service._joining.collector is not None, len(service._service.waiting)])
            report("sizes", sum(gate.sizes))
    """)
    assert found["cancelled"] == found["told"] == 490
    assert found["tasks"] == 500
    assert (found["waiting"], found["arrays"]) == (10, 0)  # those that wait were copied
    assert found["running"] == [False] * 3
    assert found["kept"] == list(range(0, 500, 50))
    assert found["after"] == 7
    assert found["state"][1:] == [False, 0]
    assert found["sizes"] == 12 + 10 + 1


def test_an_event_loop_goes_on_meanwhile_and_several_may_share_a_service() -> None:
    found = child("""
        opened = session()
        with opened.batched(max_batch=2, max_queue=1) as service:
            gate = held(opened)
            async def ask():
                tasks = [asyncio.create_task(service.arun(None, rows(1, n))) for n in range(20)]  # no room for most
                for _ in range(20):
                    await asyncio.sleep(0.01)
                waiting = [each.done() for each in tasks]
                gate.opened.set()
                return any(waiting), [float(each[0][0, 0]) for each in await asyncio.gather(*tasks)]
            report("one", asyncio.run(ask()))
            several = []
            threads = [threading.Thread(target=lambda: several.append(asyncio.run(ask()))) for _ in range(4)]
            for each in threads: each.start()
            for each in threads: each.join()
            report("several", [values for _, values in several])
            gate.opened.clear()
            loop = asyncio.new_event_loop()
            task = loop.create_task(service.arun(None, rows(1)))
            loop.run_until_complete(asyncio.sleep(0.01))
            loop.close()  # nobody is there any more for the answer
            gate.opened.set()
            report("after", float(service.run(None, rows(1, 7))[0][0, 0]))
            report("mailboxes", len(service._mailboxes) <= 1)
    """)
    assert found["one"] == [False, list(range(20))]
    assert found["several"] == [list(range(20))] * 4
    assert found["after"] == 7


def test_what_a_callback_raises_or_does_keeps_no_other_request_waiting() -> None:
    found = child("""
        logging.getLogger("ortgpu").setLevel(logging.CRITICAL)
        opened = session()
        with opened.batched() as service:
            gate = held(opened)
            futures = [service.submit(None, rows(1, n)) for n in range(9)]
            more = Future()
            for future in futures[:-1]:
                future.add_done_callback(lambda _: sys.exit("enough"))
            def ask_again(_):
                more.set_result([service.submit(None, rows(1, n)) for n in range(9)])
            futures[-1].add_done_callback(ask_again)
            gate.opened.set()
            report("values", [float(each.result(30)[0][0, 0]) for each in futures + more.result(30)])
            service.submit(None, rows(1)).add_done_callback(lambda _: service.close())
            until(lambda: not service_threads())
    """)
    assert found["values"] == [*range(9), *range(9)]


# How it ends


def test_close_waits_for_what_runs_and_refuses_what_waits() -> None:
    found = child("""
        opened = session()
        service = opened.batched(max_batch=2)
        gate = held(opened)
        running = [service.submit(None, rows(2)) for _ in range(3)]
        gate.wait_for(3)
        waiting = [service.submit(None, rows(1)) for _ in range(3)]
        async def ask():
            return await service.arun(None, rows(1))
        asked = []
        threads = [threading.Thread(target=lambda: asked.append(outcome(lambda: asyncio.run(ask()))))]
        threads[0].start()
        until(lambda: len(service._service.waiting) == 4)
        threads.append(threading.Thread(target=service.close))
        threads[1].start()
        report("waiting", [outcome(each.result) for each in waiting])
        gate.opened.set()
        for each in threads: each.join()
        report("asked", asked)
        report("running", [each.result()[0].shape for each in running])
        service.close()
        report("later", [outcome(lambda: service.submit(None, rows(1))), outcome(lambda: asyncio.run(ask()))])
        report("left", service_threads())
        report("session", opened.run(None, rows(1))[0].shape)
        with opened.batched() as service:
            opened.close()
            report("without its session", outcome(lambda: service.run(None, rows(1))))
    """)
    refused = [*found["waiting"], *found["asked"], *found["later"], found["without its session"]]
    assert [each["type"] for each in refused] == ["ExecutionError"] * 7
    assert found["running"] == [[2, 4]] * 3
    assert found["left"] == []
    assert found["session"] == [1, 4]


def test_one_that_is_dropped_is_closed_and_a_program_ends_without_closing_it() -> None:
    found = child("""
        opened = session()
        service = opened.batched()
        gone = weakref.ref(service)
        future = service.submit(None, rows(1, 3))
        del service
        report("result", float(future.result()[0][0, 0]))
        until(lambda: not service_threads() and gone() is None)
        service = opened.batched()
        for number in range(50):
            service.submit(None, rows(1))
        report("came to the end", True)
    """)
    assert found["result"] == 3
    assert found["came to the end"] is True


@pytest.mark.lab
def test_a_forked_child_is_refused_and_ends() -> None:
    found = child("""
        opened = session()
        service = opened.batched()
        service.run(None, rows(1))
        async def ask():
            return await service.arun(None, rows(1))
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            report("child", [outcome(lambda: service.run(None, rows(1))), outcome(lambda: asyncio.run(ask())),
                             outcome(lambda: service.submit(None, rows(1))), outcome(service.close)])
            os._exit(0)
        report("status", os.waitpid(pid, 0)[1])
        report("parent", service.run(None, rows(1))[0].shape)
    """)
    assert [each["type"] for each in found["child"][:3]] == ["ForkedSessionError"] * 3
    assert found["child"][3] == {"returned": None}
    assert found["status"] == 0
    assert found["parent"] == [1, 4]


@pytest.mark.lab
def test_an_interrupt_at_any_line_stops_nobody_else() -> None:
    found = child("""
        import linecache
        opened = session()
        service = opened.batched(max_batch=4, max_queue=8)

        def is_with(frame):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")

        def interrupted_at(number, action):
            lines = itertools.count(1)
            def trace(frame, event, _argument):
                if "/session/pool/" not in frame.f_code.co_filename:
                    return None
                if event == "line" and not is_with(frame) and next(lines) == number:
                    raise KeyboardInterrupt
                return trace
            sys.settrace(trace)
            try:
                action()
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(None)
            return False

        raised = wrong = 0
        for action in (lambda: service.run(None, rows(1)), lambda: service.submit(None, rows(1)).result()):
            numbers = itertools.count(1)
            while interrupted_at(next(numbers), action):
                raised += 1
                elsewhere = []
                thread = threading.Thread(target=lambda: elsewhere.append(service.run(None, rows(2))[0].shape))
                thread.start()
                thread.join(20)
                wrong += elsewhere != [(2, 4)]
        report("interrupts", raised)
        report("wrong", wrong)
        report("left", len(service._service.waiting))
        service.close()
        report("threads", service_threads())
    """)
    assert found["interrupts"] > 50
    assert found["wrong"] == found["left"] == 0
    assert found["threads"] == []


@pytest.mark.lab
def test_a_caller_that_is_stopped_at_any_line_delays_nobody_else() -> None:
    """So a signal handler may ask the service, whatever its thread was about."""
    found = child("""
        opened = session()
        service = opened.batched(max_batch=4, max_wait=0)

        def stopped_at(number, is_stopped, goes_on, has_ended):
            lines = itertools.count(1)
            def trace(frame, event, _argument):
                if "/session/pool/" not in frame.f_code.co_filename:
                    return None
                if event == "line" and next(lines) == number:
                    is_stopped.set()
                    goes_on.wait()
                return trace
            results = []
            def ask():
                sys.settrace(trace)
                future = service.submit(None, rows(1, 5))
                sys.settrace(None)
                has_ended.set()
                is_stopped.set()
                results.append(value_of(future.result(20)[0]))
            thread = threading.Thread(target=ask)
            thread.start()
            return thread, results

        stops, wrong = 0, 0
        for number in itertools.count(1):
            for future in [service.submit(None, rows(1)) for _ in range(8)]:  # so that rows are there
                future.result(20)
            is_stopped, goes_on, has_ended = threading.Event(), threading.Event(), threading.Event()
            thread, results = stopped_at(number, is_stopped, goes_on, has_ended)
            is_stopped.wait()
            if has_ended.is_set():
                thread.join()
                break
            others = [service.submit(None, rows(1, value)) for value in range(6)]
            wrong += [value_of(each.result(20)[0]) for each in others] != list(range(6))
            goes_on.set()
            thread.join()
            wrong += results != [5]
            stops += 1
        report("stops", stops)
        report("wrong", wrong)
        service.close()
        report("threads", service_threads())
    """)
    assert found["stops"] > 30
    assert found["wrong"] == 0
    assert found["threads"] == []


def test_a_request_is_copied_once() -> None:
    found = child("""
        copies, copyto = 0, np.copyto
        def counted(*arrays):
            global copies
            copies += 1
            copyto(*arrays)
        np.copyto = counted
        opened = session("m (float[n, 65536] x) => (float[n] y) { y = ReduceMax<axes=[1], keepdims=0>(x) }")
        with opened.batched(max_batch=16) as service:
            array = np.ones((1, 65536), np.float32)
            full = {"x": np.ones((16, 65536), np.float32)}
            for _ in range(2):
                service.run(None, full)
            gate = held(opened)
            running = [service.submit(None, full) for _ in range(3)]
            gate.wait_for(3)
            copies, waiting = 0, []
            for number in range(16):
                array[:] = number
                waiting.append(service.submit(None, {"x": array}))
            gate.opened.set()
            report("right", [float(each.result()[0][0]) for each in running + waiting] == [1, 1, 1, *range(16)])
            report("copies", copies)
    """)
    assert found["right"] is True
    assert found["copies"] == 16


# What is refused


REFUSED = [
    ("(float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis=0>(x) }", "output 'y' of joined requests is 0."),
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
    found = child("""
        text = "m (float[n, w] x) => (float[n, 2] y) <float[3, 2] t = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, t) }"
        opened = session(text)
        examples = np.random.default_rng(0).random((5, 3), np.float32)
        with opened.batched(inputs={"x": examples}) as service:
            report("run", np.allclose(service.run(None, {"x": examples})[0], opened.run(None, {"x": examples})[0]))
        report("one", outcome(lambda: opened.batched(inputs={"x": examples[:1]})))
        report("wrong", outcome(lambda: opened.batched(inputs={"x": np.ones((2, 7), np.float32)})))
        report("no array", outcome(lambda: opened.batched(inputs={"x": 3.0})))
        report("no mapping", outcome(lambda: opened.batched(inputs=[examples])))
        report("arguments", [outcome(lambda: opened.batched(**each)) for each in (
            {"max_batch": 0}, {"max_wait": -1}, {"max_wait": float("nan")}, {"max_queue": 0}, {"when_full": "never"},
            {"max_batch": 2.5}, {"no_such": 1})])
        report("closed", outcome(lambda: (opened.close(), opened.batched())))
    """)
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


def test_padding_shows_in_no_result() -> None:
    found = child("""
        from types import SimpleNamespace
        from ortgpu.session.pool import batching, joinable
        joinable.sizes_of = lambda *_: (4, 16)
        opened = session("m (float[n, 4] x) => (float[n, 4] y) { y = Sqrt(x) }")
        with opened.batched(max_batch=16) as service:
            gate = held(opened)
            gate.opened.set()
            feeds = [rows(1 + n % 5, n) for n in range(200)]
            async def ask():
                return await asyncio.gather(*[service.arun(None, each) for each in feeds])
            answers = asyncio.run(ask())
            report("right", sum(each[0].shape == feed["x"].shape and np.array_equal(each[0], np.sqrt(feed["x"]))
                                for each, feed in zip(answers, feeds)))
            report("sizes", sorted(set(gate.sizes)))
    """)
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
    found = child("""
        from ortgpu.session.pool import joinable
        joinable.sizes_of = lambda *_: (8,)
        opened = session()
        service = opened.batched(max_batch=8)
        memories, lost, runs = (1, 2), False, []
        def source():
            if lost:
                raise ortgpu.ProviderFailureError("it was reset")
            return memories
        service._service.feeds.source = source
        class Watching:
            def __getattr__(self, name, inner=opened._sess):
                return getattr(inner, name)
            def run(self, names, feed, options, inner=opened._sess):
                runs.append(feed["x"].__array_interface__["data"][0])
                return inner.run(names, feed, options)
        opened._sess = Watching()
        def ask():
            return outcome(lambda: service.run(None, rows(1))[0].shape)
        report("before", [ask(), ask()])
        lost = True
        report("when it is lost", ask())
        lost, memories = False, (1,)
        kept = service._joining.buffers._idle[0].arrays["x"]
        report("after", [ask(), ask()])
        report("same arrays", [runs[0] == runs[1], runs[2] == runs[3], runs[1] == runs[2], len(runs)])
        def several():
            return [value_of(each.result(20)[0]) for each in [service.submit(None, rows(1, n)) for n in range(8)]]
        several()
        arrays = [each.arrays["x"] for each in (service._joining.sheet, *service._joining.buffers._idle)]
        memories = (3,)
        for each in arrays:
            each[:] = 99
        report("several", several() == list(range(8)))
        report("untouched", [bool((each == 99).all()) for each in arrays])
        service.close()
    """)
    assert found["before"] == found["after"] == [{"returned": [1, 4]}] * 2
    assert found["when it is lost"]["type"] == "ProviderFailureError"
    assert found["same arrays"] == [True, True, False, 4]
    assert found["several"] is True
    assert len(found["untouched"]) >= 2
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
    found = child("""
        opened = session()
        signal.signal(signal.SIGALRM, lambda *_: None)
        with opened.batched(max_wait=0.0005) as service:
            for future in [service.submit(None, rows(1)) for _ in range(16)]:
                future.result()
            ended = False
            def disturb():
                while not ended:
                    for thread in service._service.threads:
                        signal.pthread_kill(thread.ident, signal.SIGALRM)
                    time.sleep(0.0001)
            disturbing = threading.Thread(target=disturb)
            disturbing.start()
            answered = 0
            for _ in range(300):  # each of two waits for the time to be over, as the last run had more items
                asked = [service.submit(None, rows(4, n)) for n in range(4)]
                answered += sum(value_of(each.result(20)[0]) == n for n, each in enumerate(asked))
                answered += value_of(service.submit(None, rows(1, 9)).result(20)[0]) == 9
            ended = True
            disturbing.join()
        report("answered", answered)
    """)
    assert found["answered"] == 1500
