"""Programs of ``tests/session/test_batching.py``."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, wait

import numpy as np
import onnx.parser
from onnxruntime.capi import onnxruntime_pybind11_state as C

import ortgpu
from ortgpu import GPUSessionPool
from ortgpu.session.pool import joinable
from tests.programs import no_search  # noqa: F401
from tests.programs.pools import Gate, lock, outcome, pool_threads, value_of
from tests.support.children import report

joinable.sizes_of = lambda *_: ()  # They are chosen by time, and so by whatever else runs on the machine.


def model(text):
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()


def session(text="m (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }"):
    return ortgpu.GPUSession(model(text), allow_cpu=True)


def rows(count, value=1.0, width=4, dtype=np.float32):
    return {"x": np.full((count, width), value, dtype)}


def held(opened):
    """Holds the runs of a session, and has the number of items of each."""
    gate, sizes, inner = Gate(), [], opened._sess

    class Held:
        def __getattr__(self, name):
            return getattr(inner, name)

        def run(self, names, feed, options):
            sizes.append(len(feed["x"]))
            gate()
            return inner.run(names, feed, options)

    opened._sess = Held()
    gate.sizes = sizes  # type: ignore[attr-defined]  # set here, or of the type that it is
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


def results_are_those_of_separate_runs_whoever_asks() -> None:
    TWO = model("""m (float[n, 4] x, int64[n] k) => (float[n, 2] y, int64[n] i) <int64[1] one = {1}> {
    a, b = Split<axis=1>(x)  y = Sub(a, b)
    s = ReduceSum<keepdims=0>(x, one)  t = Cast<to=7>(s)  i = Add(t, k) }""")
    random = np.random.default_rng(0)
    feeds = [
        {"x": (100 * random.standard_normal((count, 4))).astype(np.float32), "k": random.integers(0, 9, count)}
        for count in random.integers(1, 6, 300)
    ]
    plain = ortgpu.GPUSession(TWO, allow_cpu=True)
    expected = [plain.run(None, each) for each in feeds]

    def right(results):
        return [
            all(np.array_equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(*both))
            for both in zip(results, expected, strict=True)
        ].count(True)

    for name, target in (("session", plain), ("pool", GPUSessionPool(TWO, allow_cpu=True, sessions_per_device=2))):
        with target.batched(max_batch=16) as service:
            futures = [service.submit(None, each) for each in feeds]
            by_threads = [None] * len(feeds)

            def ask(start):
                for number in range(start, len(feeds), 10):
                    by_threads[number] = service.run(["y", "i"], feeds[number])

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(10)]
            for each in threads:
                each.start()

            async def ask_all():
                return await asyncio.gather(*[service.arun(None, each) for each in feeds])

            by_tasks = asyncio.run(ask_all())
            for each in threads:
                each.join()
            one = service.run(["i"], feeds[0])
            report(
                name,
                [
                    right([each.result() for each in futures]),
                    right(by_threads),
                    right(by_tasks),
                    len(one),
                    one[0].tolist() == expected[0][1].tolist(),
                ],
            )
        target.close()
    report("left", service_threads() + pool_threads())


def what_comes_while_the_gpu_is_busy_runs_together() -> None:
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


def a_request_waits_for_as_many_as_came_last_and_no_lone_client_waits() -> None:
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


def only_what_is_alike_is_joined_and_the_rest_runs_as_it_is() -> None:
    opened = session("m (float[n, w] x) => (float[n, w] y) { y = Relu(x) }")
    with opened.batched(max_batch=6) as service:
        gate = held(opened)
        first = service.submit(None, rows(1))
        gate.wait_for(1)
        given = {
            "narrow": rows(1, 1, 3),
            "wide": rows(2, 2, 5),
            "narrow again": rows(2, 3, 3),
            "large": rows(7, 4, 3),
            "none": rows(0),
            "wrong type": rows(1, 5, dtype=np.float64),
            "missing": {},
            "no mapping": [1],
            "wrong rank": {"x": np.ones(3, np.float32)},
            "wrong name": {"z": np.ones((1, 3), np.float32)},
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


def a_full_queue_refuses_or_waits() -> None:
    opened = session()
    for when in ("raise", "wait"):
        with opened.batched(max_batch=2, max_queue=3, when_full=when) as service:
            inner = opened._sess
            gate = held(opened)
            futures = [service.submit(None, rows(2)) for _ in range(3)]
            gate.wait_for(3)  # all threads have a full batch
            futures += [service.submit(None, rows(1)) for _ in range(3)]
            asked = []
            threads = [
                threading.Thread(target=lambda: asked.append(outcome(action)), daemon=True)
                for action in (lambda: service.submit(None, rows(1)).result()[0].shape,)
            ]
            for each in threads:
                each.start()
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
            for each in threads:
                each.join()
            report("asked, " + when, asked)
            opened._sess = inner


def cancelled_requests_leave_no_trace() -> None:
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
            for each in tasks:
                each.cancel()
            return sum(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(*tasks, return_exceptions=True)
            )

        report("tasks", asyncio.run(storm()))
        report("waiting", len(service._service.waiting))
        report("arrays", sum(each() is not None for each in gone))
        report("running", [each.cancel() for each in running])
        gate.opened.set()
        report("kept", [float(each.result()[0][0, 0]) for each in kept])
        report("after", float(service.run(None, rows(1, 7))[0][0, 0]))
        report("state", [False, service._joining.collector is not None, len(service._service.waiting)])
        report("sizes", sum(gate.sizes))


def an_event_loop_goes_on_meanwhile_and_several_may_share_a_service() -> None:
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
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        report("several", [values for _, values in several])
        gate.opened.clear()
        loop = asyncio.new_event_loop()
        task = loop.create_task(service.arun(None, rows(1)))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()  # nobody is there any more for the answer
        gate.opened.set()
        report("after", float(service.run(None, rows(1, 7))[0][0, 0]))
        report("mailboxes", len(service._mailboxes) <= 1)


def what_a_callback_raises_or_does_keeps_no_other_request_waiting() -> None:
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


def close_waits_for_what_runs_and_refuses_what_waits() -> None:
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
    for each in threads:
        each.join()
    report("asked", asked)
    report("running", [each.result()[0].shape for each in running])
    service.close()
    report("later", [outcome(lambda: service.submit(None, rows(1))), outcome(lambda: asyncio.run(ask()))])
    report("left", service_threads())
    report("session", opened.run(None, rows(1))[0].shape)
    with opened.batched() as service:
        opened.close()
        report("without its session", outcome(lambda: service.run(None, rows(1))))


def one_that_is_dropped_is_closed_and_a_program_ends_without_closing_it() -> None:
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


def a_forked_child_is_refused_and_ends() -> None:
    opened = session()
    service = opened.batched()
    service.run(None, rows(1))

    async def ask():
        return await service.arun(None, rows(1))

    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        report(
            "child",
            [
                outcome(lambda: service.run(None, rows(1))),
                outcome(lambda: asyncio.run(ask())),
                outcome(lambda: service.submit(None, rows(1))),
                outcome(service.close),
            ],
        )
        os._exit(0)
    report("status", os.waitpid(pid, 0)[1])
    report("parent", service.run(None, rows(1))[0].shape)


def an_interrupt_at_any_line_stops_nobody_else() -> None:
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


def a_caller_that_is_stopped_at_any_line_delays_nobody_else() -> None:
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


def sizes_are_timed_in_the_memory_of_batches() -> None:
    from ortgpu.session.pool.sessions import SessionFeeds

    copies, real = [], SessionFeeds.copied

    def copied(self, feed, waits=()):
        copies.append(real(self, feed, waits))
        return copies[-1]

    SessionFeeds.copied = copied
    joinable.sizes_of = lambda run, feed, *_: report("same", [feed is copy for copy, _ in copies]) or ()
    with session().batched(max_batch=8):
        pass


def each_submitted_request_has_rows_at_the_call() -> None:
    opened = session()
    with opened.batched(max_batch=4) as service:
        gate, joining = held(opened), service._joining
        futures = [service.submit(None, rows(1))]
        gate.wait_for(1)
        futures.append(service.submit(None, rows(1, 1)))
        until(lambda: joining.collector is not None)
        keep, rows_of = joining.keep, []

        def watched(request):
            keep(request)
            rows_of.append(request.sheet is not None)

        joining.keep = watched
        array = np.zeros((1, 4), np.float32)
        for number in range(2, 30):
            array[:] = number
            futures.append(service.submit(None, {"x": array}))
        gate.opened.set()
        report("values", [value_of(future.result(20)[0]) for future in futures])
        report("rows", [all(rows_of), len(rows_of)])


def threads_copy_large_arrays_into_rows() -> None:
    from ortgpu.running.copying import parallel_copy
    from ortgpu.session.pool.sessions import SessionFeeds

    copied = []

    class Watched:
        def join(self, to, parts, real=parallel_copy(2, -1)):
            copied.append([size for _, size in parts])
            real.join(to, parts)

    SessionFeeds._threads, SessionFeeds.large = Watched(), 64
    opened = session("m (float[n, h] x) => (float[n, h] y) { y = Relu(x) }")
    with opened.batched(max_batch=8) as service:
        gate = held(opened)
        futures = [service.submit(None, rows(1, 0, 4))]
        gate.wait_for(1)
        feeds = [rows(1, number, width) for number in range(1, 9) for width in (4, 50)]
        feeds.append({"x": np.full((50, 2), 9.0, np.float32).T[:1]})  # not contiguous
        futures += [service.submit(None, feed) for feed in feeds]
        gate.opened.set()
        results = [future.result(20)[0] for future in futures[1:]]
        report("right", [np.array_equal(result, feed["x"]) for result, feed in zip(results, feeds)].count(True))
        report("copied", [sum(sizes) for sizes in copied])
        copied.clear()
        joined, parts = np.zeros((9, 8), np.float32), [np.full((rows, 8), rows, np.float32) for rows in (2, 3, 4)]
        feeds_of_none = SessionFeeds(lambda: ())
        feeds_of_none.fill(joined, *parts)
        feeds_of_none.fill(joined[:5], parts[0], np.full((8, 3), 3, np.float32).T)  # not contiguous
        report("at once", copied)
        report("joined", joined[:, 0].tolist())


def a_request_is_copied_once() -> None:
    from ortgpu.session.pool.workers import Feeds

    copies, fill = 0, Feeds.fill

    def counted(*arguments):
        nonlocal copies
        copies += 1
        fill(*arguments)

    Feeds.fill = counted
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


def examples_of_the_caller_are_taken_where_none_can_be_made_up() -> None:
    text = "m (float[n, w] x) => (float[n, 2] y) <float[3, 2] t = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, t) }"
    opened = session(text)
    examples = np.random.default_rng(0).random((5, 3), np.float32)
    with opened.batched(inputs={"x": examples}) as service:
        report("run", np.allclose(service.run(None, {"x": examples})[0], opened.run(None, {"x": examples})[0]))
    report("one", outcome(lambda: opened.batched(inputs={"x": examples[:1]})))
    report("wrong", outcome(lambda: opened.batched(inputs={"x": np.ones((2, 7), np.float32)})))
    report("no array", outcome(lambda: opened.batched(inputs={"x": 3.0})))
    report("no mapping", outcome(lambda: opened.batched(inputs=[examples])))
    report(
        "arguments",
        [
            outcome(lambda: opened.batched(**each))
            for each in (
                {"max_batch": 0},
                {"max_wait": -1},
                {"max_wait": float("nan")},
                {"max_queue": 0},
                {"when_full": "never"},
                {"max_batch": 2.5},
                {"no_such": 1},
            )
        ],
    )
    report("closed", outcome(lambda: (opened.close(), opened.batched())))


def padding_shows_in_no_result() -> None:

    joinable.sizes_of = lambda *_: (4, 16)
    opened = session("m (float[n, 4] x) => (float[n, 4] y) { y = Sqrt(x) }")
    with opened.batched(max_batch=16) as service:
        gate = held(opened)
        gate.opened.set()
        feeds = [rows(1 + n % 5, n) for n in range(200)]

        async def ask():
            return await asyncio.gather(*[service.arun(None, each) for each in feeds])

        answers = asyncio.run(ask())
        report(
            "right",
            sum(
                each[0].shape == feed["x"].shape and np.array_equal(each[0], np.sqrt(feed["x"]))
                for each, feed in zip(answers, feeds)
            ),
        )
        report("sizes", sorted(set(gate.sizes)))


def nothing_is_written_to_memory_of_a_session_that_lost_its_gpu() -> None:

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
    kept = service._joining._idle[0].arrays["x"]
    report("after", [ask(), ask()])
    report("same arrays", [runs[0] == runs[1], runs[2] == runs[3], runs[1] == runs[2], len(runs)])

    def several():
        return [value_of(each.result(20)[0]) for each in [service.submit(None, rows(1, n)) for n in range(8)]]

    several()
    arrays = [each.arrays["x"] for each in (service._joining.sheet, *service._joining._idle) if each]
    memories = (3,)
    for each in arrays:
        each[:] = 99
    service._joining.source()  # as a thread of the service looks, or a caller a millisecond later
    report("several", several() == list(range(8)))
    report("untouched", [bool((each == 99).all()) for each in arrays])
    service.close()


def a_signal_in_a_thread_of_the_service_delays_no_request() -> None:
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


def storms() -> None:
    import random

    random.seed(1)
    joinable.sizes_of = lambda _, feed, *__: random.choice([(), (len(feed["x"]),), (2, len(feed["x"]))])
    pool = GPUSessionPool(model(sys.argv[1]), allow_cpu=True, sessions_per_device=2)
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
        service = pool.batched(
            random.choice([1, 2, 5, 16, 64]),
            random.choice([0, 0.001, 0.01]),
            max_queue=random.choice([1, 3, 50, 1000]),
            when_full=random.choice(["wait", "raise"]),
        )
        until = time.monotonic() + random.random()
        works = [clients(service, until), *(client(service, by, until) for by in ("run", "submit") * 3)]
        threads = [threading.Thread(target=asyncio.run, args=(each,)) for each in works]
        for each in threads:
            each.start()
        if random.random() < 0.5:
            time.sleep(random.random() / 2)
            service.close()
        for each in threads:
            each.join()
        end = time.monotonic() + 10
        while at_work(service) or service._service.waiting:
            assert time.monotonic() < end, "something is left"
            time.sleep(0.001)
        service.close()
    report("ended", ended)
    report("threads", service_threads())
