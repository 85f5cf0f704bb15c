"""Programs of ``tests/running/test_cuda_graph.py``."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time

import numpy as np

import ortgpu
from ortgpu import GPUSession
from ortgpu.running.cuda_graph import MAX_SHAPES
from tests.programs.on_cpu import NEG, feeds, model, outcome, report, threads
from tests.programs.with_graphs import Recorded, bound, capturing, runtime, stub, waiting


def results_are_those_of_run_and_each_shape_has_its_graph() -> None:
    several = model("""several (float[n, 4] x, int64[n, 4] i) => (float[n, 4] y, int64[n, 4] j, int64[2] s) {
    y = Neg(x)
    j = Add(i, i)
    s = Shape(x)
}""")
    random = np.random.default_rng(0)
    plain, session = GPUSession(several), capturing(several)
    right = []
    for rows in (3, 1, 3, 5, 1, 3, 3):
        feed = {"x": random.standard_normal((rows, 4), np.float32), "i": random.integers(0, 99, (rows, 4))}
        for names in (None, ["j"], ["s", "y"]):
            expected, got = plain.run(names, feed), session.run(names, feed)
            right += [a.dtype == b.dtype and a.shape == b.shape and (a == b).all() for a, b in zip(expected, got)]
            right.append(len(expected) == len(got))
        feed = dict(reversed(feed.items()))
        right += [(a == b).all() for a, b in zip(plain.run(None, feed), session.run(None, feed))]
    report([all(map(bool, right)), bound, [number for number, waits in zip(bound, waiting) if waits]])


def every_type_that_can_be_captured() -> None:
    from ortgpu.model.tensor_types import DTYPES

    found = {}
    for name, dtype in DTYPES.items():
        kind = name[len("tensor(") : -1]
        session = capturing(model(f"t ({kind}[n] x) => ({kind}[n] y) {{ y = Identity(x) }}"))
        for array in (np.arange(5).astype(dtype), np.arange(5)[::-1].astype(dtype)):
            (result,) = session.run(None, {"x": array})
            found[kind] = result.dtype == dtype and bool((result == array).all())
    report([found, len(bound)])


def a_result_is_the_callers_own() -> None:
    session = capturing(NEG)
    first, second, third = [session.run(None, feed)[0] for feed in feeds(3)]
    first[:] = 9
    report([second.tolist(), third.tolist(), session.run(None, feeds(2)[1])[0].tolist()])


def inputs_with_gaps_and_of_other_kinds() -> None:
    import onnxruntime

    session = capturing(NEG)
    gaps = np.arange(8, dtype=np.float32)[::2]
    given = gaps, gaps[::-1], onnxruntime.OrtValue.ortvalue_from_numpy(gaps.copy()), [1.0, 2.0], gaps[:0]

    class Foreign:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self):
            return np.ones(4, np.float32).__dlpack__()

    scalar = capturing(model("t (float x) => (float y) { y = Neg(x) }"))
    one = scalar.run(None, {"x": np.full((), 3, np.float32)})[0]
    vectors = [session.run(None, {"x": each})[0].tolist() for each in (*given, Foreign())]
    report([vectors, bound, one.shape, one.item()])


def wrong_feeds_stay_onnx_runtimes_own_exceptions() -> None:
    session, plain = capturing(NEG), GPUSession(NEG)
    right = feeds(1)[0]
    wrong = [{"x": np.zeros((2, 2), np.float32)}, {"x": np.zeros(4)}, {"z": right["x"]}, {}, {**right, "z": 1}]
    calls = [(None, feed) for feed in wrong] + [(["nothing"], right)]
    report(
        [[outcome(lambda: each.run(*call)) for call in calls] for each in (session, plain)]
        + [session.run(None, feeds(2)[1])[0].tolist(), stub.stub_device_bytes()]
    )


def the_longest_unused_shape_gives_its_buffers_back_and_numbers_are_not_used_again() -> None:
    session = capturing(NEG)
    for size in range(1, MAX_SHAPES + 1):
        session.run(None, feeds(1, size)[0])
    full = stub.stub_device_bytes()
    session.run(None, feeds(1, 1)[0])  # now the one of two is the longest unused
    session.run(None, feeds(1, 100)[0])
    after = stub.stub_device_bytes()
    again = session.run(None, feeds(4, 2)[3])[0].tolist()
    session.close()
    report([full, after, again, max(bound), len(set(bound)), MAX_SHAPES, stub.stub_device_bytes()])


def dropped_it_gives_everything_back() -> None:
    session = capturing(NEG)
    worker = threading.Thread(target=lambda: session.run(None, feeds(1)[0]))
    worker.start()
    worker.join()
    before = stub.stub_device_bytes(), threads()
    [thread] = [each for each in threading.enumerate() if each.name.startswith("ortgpu")]
    kept, inside = session.get_inputs(), session._sess._inner
    del session, worker
    gc.collect()
    thread.join(20)
    after = stub.stub_device_bytes(), threads(), stub.stub_streams()
    del kept, inside
    report([before, after, stub.stub_streams()])


def threads_get_their_own_results_and_two_threads_do_all_runs() -> None:
    session = capturing(NEG)
    inner, ran_in = session._sess._inner, set()

    class Noting(Recorded):
        def run_with_iobinding(self, binding, options):
            ran_in.add(threading.current_thread().name)
            return inner.run_with_iobinding(binding, options)

    session._sess._inner = Noting(inner, inner.stream)
    wrong = []

    def work(number):
        for step in range(60):
            value = number * 1000 + step
            if (session.run(None, {"x": np.full(1 + step % 3, value, np.float32)})[0] != -value).any():
                wrong.append(value)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    [worker.start() for worker in workers]
    work(9)
    [worker.join() for worker in workers]
    mapped = [int(result[0][0]) for result in session.map(feeds(50))]
    session.close()
    report([wrong, sorted(ran_in), mapped == [-n for n in range(50)], threads(), stub.stub_device_bytes()])


def a_signal_handler_may_use_the_session_amid_a_run() -> None:
    import random
    import signal

    session = capturing(NEG)
    wrong, handled = [], []

    def use(value):
        feed = {"x": np.full(random.choice((4, 5)), value, np.float32)}
        ways = (
            lambda: session.run(None, feed),
            lambda: next(iter(session.map([feed]))),
            lambda: list(session.map(each for each in [feed] * 3))[2],
        )
        if (random.choice(ways)()[0] != -value).any():
            wrong.append(value)

    def handler(*_):
        use(7)
        session._sess.give_back()
        handled.append(7)

    list(session.map(each for each in feeds(2)))  # which imports modules: a handler amid that finds parts of them
    signal.signal(signal.SIGALRM, handler)
    while len(handled) < 100:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 2e-3))
        for number in range(1, 9):
            use(number)
    signal.signal(signal.SIGALRM, lambda *_: session.close())
    signal.setitimer(signal.ITIMER_REAL, 2e-3)
    closed = outcome(lambda: [use(1) for _ in iter(int, 1)])
    until = time.monotonic() + 30
    while threads() and time.monotonic() < until:  # The handler did not wait for the thread that it came amid.
        time.sleep(0.01)
    report([wrong, closed["type"], threads()])


def a_map_goes_straight_to_the_thread_that_runs() -> None:
    from ortgpu.running.pinned import PinnedMemory

    session = capturing(NEG)
    session._pinned = PinnedMemory(runtime, 1 << 24)
    results = session.map(feeds(50))
    right = [next(results)[0].tolist() == [0] * 4]
    small = threads()
    right += [result[0].tolist() == [-n] * 4 for n, result in enumerate(results, 1)]
    given = [{"x": np.full(50_000 if n % 2 else 3, n, np.float32)} for n in range(50)]
    results = session.map(given)
    right += [bool((next(results)[0] == 0).all())]
    both = {each[:10] for each in threads()}
    right += [bool((result[0] == -n).all()) for n, result in enumerate(results, 1)]
    results = session.map(feeds(50), in_flight=1)
    next(results)
    session.close()
    report(
        [
            len(right),
            all(right),
            small,
            sorted(both),
            outcome(lambda: next(results))["type"],
            threads(),
            stub.stub_pinned_bytes(),
        ]
    )


def other_ways_to_run_are_refused() -> None:
    import onnxruntime

    session = capturing(NEG)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(feeds(1)[0]["x"])
    options, uncaptured = onnxruntime.RunOptions(), onnxruntime.RunOptions()
    uncaptured.add_run_config_entry("gpu_graph_id", "-1")
    report(
        [
            outcome(lambda: session.run(None, feeds(2)[1], uncaptured)[0].tolist()),
            bound,
            outcome(session.io_binding),
            outcome(lambda: session.run_with_ort_values(["y"], {"x": value})),
            outcome(lambda: session.run_async(["y"], feeds(1)[0], print, None)),
            outcome(lambda: session.run_with_ortvaluevector(None, [], [], [], [], [])),
            outcome(lambda: session.run_on_device(None, feeds(1)[0])),
            outcome(lambda: session.run(None, feeds(1)[0], options)),
        ]
    )


def closed_it_says_so() -> None:
    session = capturing(NEG)
    inside = session._sess
    session.run(None, feeds(1)[0])
    session.close()
    session.close()
    report(
        [
            outcome(lambda: session.run(None, feeds(1)[0])),
            outcome(session.io_binding),
            outcome(lambda: inside.run(["y"], feeds(1)[0])),
        ]
    )


def a_map_that_is_collected_while_a_graph_is_replayed() -> None:
    gc.disable()
    session = capturing(NEG)
    session.run(None, feeds(1)[0])
    replay, copied = session._gpu_runner.graphs.replay, runtime.synchronise

    def slow(*given):
        threading.current_thread() is threading.main_thread() or time.sleep(0.1)
        return replay(*given)

    def collecting(stream):
        copied(stream)
        if threading.current_thread() is threading.main_thread():
            collected.append(gc.collect() > 0)

    collected, session._gpu_runner.graphs.replay = [], slow
    results = session.map(feeds(100))
    cycle = [results]
    cycle.append(cycle)
    next(results)
    runtime.synchronise = collecting
    del results, cycle
    found = session.run(None, feeds(3)[2])[0].tolist()
    report([found, collected[0]])


def constructed_again_it_is_what_it_was_constructed_as() -> None:
    session = capturing(NEG)
    session.run(None, feeds(1)[0])
    other = model("double (float[n] x) => (float[n] y, float[n] z) { y = Add(x, x) z = Neg(x) }")
    session.__init__(other)
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.ones(4, np.float32))
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    report(
        [
            len(bound),
            [each.tolist() for each in session.run(None, feeds(2)[1])],
            [len(each) for each in session.map(feeds(3))],
            binding.copy_outputs_to_cpu()[0].tolist(),
            len(bound),
        ]
    )


def the_callers_arrays_are_free_when_a_run_has_ended() -> None:
    from ortgpu.running.pinned import PinnedMemory

    session = capturing(NEG)
    session._pinned = PinnedMemory(runtime, 1 << 20)
    array, wrong = session.pinned_empty(1000), []
    for value in range(30):
        array[:] = value
        (result,) = session.run(None, {"x": array})
        array[:] = -1
        wrong += [value] * bool((result != -value).any())
    inner = session._sess._inner

    class Failing(Recorded):
        def run_with_iobinding(self, binding, options):
            raise RuntimeError("CUBLAS failure 14")

    session._sess._inner = Failing(inner, inner.stream)
    failed = outcome(lambda: session.run(None, {"x": array}))
    report([wrong, failed["text"], stub.stub_late_copies()])


def out_of_memory_is_told_as_such_and_the_session_works_on() -> None:
    import dataclasses

    session = capturing(NEG)
    session.device = dataclasses.replace(session.device, kind="cuda")
    stub.stub_fail(2)
    failed = outcome(lambda: session.run(None, feeds(1)[0]))
    stub.stub_fail(0)
    report([failed, session.run(None, feeds(2)[1])[0].tolist()])


def a_run_that_was_out_of_memory_has_none_left_for_its_error() -> None:
    import dataclasses

    session = capturing(NEG)
    session.device = dataclasses.replace(session.device, kind="cuda")
    os.environ["STUB_CUDART_FAIL"] = "cudaMalloc=2@2-2"  # an output, when there is memory for the input
    try:
        session.run(None, feeds(1)[0])
    except ortgpu.GPUOutOfMemoryError:
        report([stub.stub_device_bytes(), session.run(None, feeds(2)[1])[0].tolist()])


def a_forked_child_frees_nothing() -> None:
    import dataclasses

    session = capturing(NEG)
    session.device = dataclasses.replace(session.device, kind="cuda")
    session.run(None, feeds(1)[0])
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        refused = outcome(lambda: session.run(None, feeds(1)[0]))["type"]
        session.close()
        del session
        gc.collect()
        os.write(write, json.dumps([refused, stub.stub_device_bytes()]).encode())
        os._exit(0)
    os.wait()
    report([json.loads(os.read(read, 1000)), session.run(None, feeds(2)[1])[0].tolist()])
