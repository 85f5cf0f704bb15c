"""What sessions that replay CUDA graphs give, keep and give back. See graph_sessions.py."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.graph_sessions import with_graphs


@pytest.fixture
def with_stub(stubs: Stubs) -> Any:
    return lambda code, *arguments: with_graphs(stubs, code, *arguments)


def test_results_are_those_of_run_and_each_shape_has_its_graph(with_stub: Any) -> None:
    found = with_stub("""
        several = model('''several (float[n, 4] x, int64[n, 4] i) => (float[n, 4] y, int64[n, 4] j, int64[2] s) {
            y = Neg(x)
            j = Add(i, i)
            s = Shape(x)
        }''')
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
    """)
    assert found == [True, [1] * 4 + [2] * 4 + [1] * 4 + [3] * 4 + [2] * 4 + [1] * 8, [1, 2, 3]]


def test_every_type_that_can_be_captured(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu.model.tensor_types import DTYPES
        found = {}
        for name, dtype in DTYPES.items():
            kind = name[len("tensor("):-1]
            session = capturing(model(f"t ({kind}[n] x) => ({kind}[n] y) {{ y = Identity(x) }}"))
            for array in (np.arange(5).astype(dtype), np.arange(5)[::-1].astype(dtype)):
                (result,) = session.run(None, {"x": array})
                found[kind] = result.dtype == dtype and bool((result == array).all())
        report([found, len(bound)])
    """)
    assert set(found[0].values()) == {True}
    assert len(found[0]) == 12
    assert found[1] == 24


TIMED = """
import types
cuda_graph.TRIALS = 3
now = 0.0
cuda_graph.time = types.SimpleNamespace(perf_counter=lambda: now)
def takes(seconds):
    global now
    now += seconds
class Slow(Recorded):
    def run(self, *arguments):
        ways.append("plain run")
        modes.append(stub.stub_capture_mode())
        takes(0.01 * (sys.argv[2] == "plain run"))
        return self.inner.run(*arguments)
    def run_with_iobinding(self, *arguments):
        ways.append("replay")
        takes(0.01 * (sys.argv[2] == "replay"))
        return super().run_with_iobinding(*arguments)
ways, modes = [], []
def timed(model):
    session = capturing(model)
    inner = session._sess._inner
    session._sess._inner = Slow(inner.inner, inner.stream)
    return session
"""


@pytest.mark.parametrize("slow", ["replay", "plain run"])
def test_later_runs_go_the_way_that_was_faster(with_stub: Any, slow: str) -> None:
    """Runs without a replay may allocate memory while another session captures, and the graph needs none any more."""
    found = with_stub(
        TIMED
        + textwrap.dedent("""
        session = timed(NEG)
        right = [session.run(None, feed)[0].tolist() == [-number] * 4 for number, feed in enumerate(feeds(12))]
        relaxed = set(modes) == {cuda_graph.CAPTURE_MODE_RELAXED}
        report([all(right), ways, relaxed, stub.stub_capture_mode(), stub.stub_device_bytes()])
    """),
        slow,
    )
    faster = "plain run" if slow == "replay" else "replay"
    tried = ["plain run", "replay", "replay", "plain run", "plain run", "replay"]
    assert found == [True, ["plain run", "replay", *tried, *[faster] * 5], True, 0, 32 if faster == "replay" else 0]


@pytest.mark.parametrize("slow", ["replay", "plain run"])
def test_requests_that_differ_every_second_time_do_not_decide_which_way_is_faster(with_stub: Any, slow: str) -> None:
    """All replays were timed with the output that takes long to copy, and all other runs without."""
    found = with_stub(
        TIMED
        + textwrap.dedent("""
        both = model("both (float[n] x) => (float[n] small, float[n] large) { small = Neg(x) large = Neg(x) }")
        session = timed(both)
        for way, names in (("_run_without", 0), ("_run_captured", 2)):
            def copying(*arguments, plain=getattr(session._sess, way), names=names):
                takes(0.03 * (arguments[names] == ["large"]))
                return plain(*arguments)
            setattr(session._sess, way, copying)
        for number in range(12):
            session.run(["small", "large"][number % 2:][:1], feeds(1)[0])
        report(ways[-5:])
    """),
        slow,
    )
    assert found == ["plain run" if slow == "replay" else "replay"] * 5


def test_a_result_is_the_callers_own(with_stub: Any) -> None:
    found = with_stub("""
        session = capturing(NEG)
        first, second, third = [session.run(None, feed)[0] for feed in feeds(3)]
        first[:] = 9
        report([second.tolist(), third.tolist(), session.run(None, feeds(2)[1])[0].tolist()])
    """)
    assert found == [[-1] * 4, [-2] * 4, [-1] * 4]


def test_inputs_with_gaps_and_of_other_kinds(with_stub: Any) -> None:
    found = with_stub("""
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
    """)
    assert found[0] == [[0, -2, -4, -6], [-6, -4, -2, 0], [0, -2, -4, -6], [-1, -2], [], [-1] * 4]
    assert found[1:] == [[1, 1, 1, 1, 1], [], -3]  # nothing is captured of what is no tensor, or has no elements


def test_wrong_feeds_stay_onnx_runtimes_own_exceptions(with_stub: Any) -> None:
    found = with_stub("""
        session, plain = capturing(NEG), GPUSession(NEG)
        right = feeds(1)[0]
        wrong = [{"x": np.zeros((2, 2), np.float32)}, {"x": np.zeros(4)}, {"z": right["x"]}, {}, {**right, "z": 1}]
        calls = [(None, feed) for feed in wrong] + [(["nothing"], right)]
        report([[outcome(lambda: each.run(*call)) for call in calls] for each in (session, plain)]
               + [session.run(None, feeds(2)[1])[0].tolist(), stub.stub_device_bytes()])
    """)
    captured, plain, after, device_bytes = found
    assert captured == plain
    assert all("type" in each for each in plain)
    assert after == [-1] * 4
    assert device_bytes == 32


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_generator_that_fills_one_array_again(with_stub: Any, size: int) -> None:
    found = with_stub(f"""
        session = capturing(NEG)
        plain = session._gpu_runner.graphs._run_captured
        def late(*arguments):
            time.sleep(0.004)
            return plain(*arguments)
        session._gpu_runner.graphs._run_captured = late
        def refilled():
            array = np.zeros({size}, np.float32)
            for number in range(20):
                array[:] = number
                yield {{"x": array}}
        report([[int(result[0][-1]) for result in session.map(refilled())], session._pinned.bytes_in_use])
    """)
    assert found[0] == [-number for number in range(20)]
    assert found[1] == (64 << 10 if size == 4 else 0)  # of the captured graph


@pytest.mark.parametrize("names", ["iter(['y'])", "'y'"])
def test_names_that_onnx_runtime_does_not_take(with_stub: Any, names: str) -> None:
    """An iterator left no name for the results, which were then none."""
    found = with_stub(f"""
session = capturing(NEG)
first, second = (outcome(lambda: [one.tolist() for one in session.run({names}, feeds(1)[0])]) for _ in range(2))
report([first["type"], second["type"], bound])
""")
    assert found == ["TypeError", "TypeError", []]


def test_the_longest_unused_shape_gives_its_buffers_back_and_numbers_are_not_used_again(with_stub: Any) -> None:
    found = with_stub("""
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
    """)
    full, after, again, highest, different, most, left = found
    assert full == sum(2 * 4 * size for size in range(1, most + 1))
    assert after == full + 2 * 4 * 100 - 2 * 4 * 2
    assert again == [-3, -3]
    assert highest == different == most + 2
    assert left == 0


def test_graphs_are_measured_and_stay_in_the_room_of_a_budget(with_stub: Any) -> None:
    """Shapes that have no room run without a graph, and do so in each thread."""
    found = with_stub("""
        MIB = 1 << 20
        cuda_graph._GRAPH_BYTES, cuda_graph._THREAD_BYTES = 6 * MIB, 8 * MIB
        session = capturing(NEG, room=38 * MIB)
        class Taking(Recorded):
            # A capture takes memory that the session keeps
            def run_with_iobinding(self, binding, options):
                number = int(options.get_run_config_entry("gpu_graph_id"))
                key = number, threading.get_ident()
                if key not in taken:
                    taken[key] = runtime.allocate(8 * MIB)
                return super().run_with_iobinding(binding, options)
        taken, inner = {}, session._sess._inner
        session._sess._inner = Taking(inner.inner, inner.stream)
        def run(size):
            return (session.run(None, {"x": np.full(size, 3, np.float32)})[0] == -3).all()
        right = [bool(run(size)) for size in (4, MIB, 8 * MIB, 5, 2 * MIB, 4, MIB, 8 * MIB)]
        graphs = session._sess
        held = [graphs.bytes_held() - stub.stub_device_bytes(), len(taken), max(bound), graphs.bytes_held() <= 38 * MIB]
        other = threading.Thread(target=lambda: right.append(bool(run(4))))
        other.start()
        other.join()
        report([right, held, len(taken)])
    """)
    # The graph of 4 floats has 8 MiB, that of a mebifloat 16 with its buffers, that of 5 floats 8. In the 6 MiB left, a
    # graph of few floats would have room, but not in a further thread.
    assert found == [[True] * 9, [0, 3, 3, True], 3]


def test_dropped_it_gives_everything_back(with_stub: Any) -> None:
    found = with_stub("""
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
    """)
    # The C++ session, which the metadata keep, has the stream to its end.
    assert found == [[32, ["ortgpu-graph_0"]], [0, [], 1], 0]


def test_threads_get_their_own_results_and_two_threads_do_all_runs(with_stub: Any) -> None:
    found = with_stub("""
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
    """)
    assert found == [[], ["MainThread", "ortgpu-graph_0"], True, [], 0]


def test_a_signal_handler_may_use_the_session_amid_a_run(with_stub: Any) -> None:
    """Its runs change no buffers of the run that it interrupts, and wait for nothing that this one holds."""
    found = with_stub("""
        import random, signal
        session = capturing(NEG)
        wrong, handled = [], []
        def use(value):
            feed = {"x": np.full(random.choice((4, 5)), value, np.float32)}
            ways = (lambda: session.run(None, feed), lambda: next(iter(session.map([feed]))),
                    lambda: list(session.map(each for each in [feed] * 3))[2])
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
        report([wrong, closed["type"], threads()])
    """)
    assert found == [[], "ExecutionError", []]


def test_a_map_goes_straight_to_the_thread_that_runs(with_stub: Any) -> None:
    """But for arrays that are staged, which other threads copy meanwhile."""
    found = with_stub("""
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
        report([len(right), all(right), small, sorted(both), outcome(lambda: next(results))["type"], threads(),
                stub.stub_pinned_bytes()])
    """)
    assert found == [100, True, ["ortgpu-graph_0"], ["ortgpu-gra", "ortgpu-map"], "ExecutionError", [], 0]


def test_other_ways_to_run_are_refused(with_stub: Any) -> None:
    found = with_stub("""
        import onnxruntime
        session = capturing(NEG)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(feeds(1)[0]["x"])
        options, uncaptured = onnxruntime.RunOptions(), onnxruntime.RunOptions()
        uncaptured.add_run_config_entry("gpu_graph_id", "-1")
        report([outcome(lambda: session.run(None, feeds(2)[1], uncaptured)[0].tolist()), bound,
                outcome(session.io_binding), outcome(lambda: session.run_with_ort_values(["y"], {"x": value})),
                outcome(lambda: session.run_async(["y"], feeds(1)[0], print, None)),
                outcome(lambda: session.run_with_ortvaluevector(None, [], [], [], [], [])),
                outcome(lambda: session.run_on_device(None, feeds(1)[0])),
                outcome(lambda: session.run(None, feeds(1)[0], options))])
    """)
    assert found[:2] == [{"returned": [-1] * 4}, []]
    assert [each["type"] for each in found[2:]] == ["ProviderRequestError"] * 6


def test_closed_it_says_so(with_stub: Any) -> None:
    found = with_stub("""
        session = capturing(NEG)
        inside = session._sess
        session.run(None, feeds(1)[0])
        session.close()
        session.close()
        report([outcome(lambda: session.run(None, feeds(1)[0])), outcome(session.io_binding),
                outcome(lambda: inside.run(["y"], feeds(1)[0]))])
    """)
    assert [each["type"] for each in found] == ["ExecutionError"] * 3


def test_a_map_that_is_collected_while_a_graph_is_replayed(with_stub: Any) -> None:
    """It waits for what is under way, which needs the lock of the replay."""
    found = with_stub("""
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
    """)
    assert found == [[-2] * 4, True]


def test_constructed_again_it_is_what_it_was_constructed_as(with_stub: Any) -> None:
    """By a class that unpickles itself, say: nothing is left of the session that it was."""
    found = with_stub("""
        session = capturing(NEG)
        session.run(None, feeds(1)[0])
        other = model("double (float[n] x) => (float[n] y, float[n] z) { y = Add(x, x) z = Neg(x) }")
        session.__init__(other)
        binding = session.io_binding()
        binding.bind_cpu_input("x", np.ones(4, np.float32))
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        report([len(bound), [each.tolist() for each in session.run(None, feeds(2)[1])],
                [len(each) for each in session.map(feeds(3))], binding.copy_outputs_to_cpu()[0].tolist(), len(bound)])
    """)
    assert found == [1, [[2] * 4, [-1] * 4], [2] * 3, [2] * 4, 1]


def test_the_callers_arrays_are_free_when_a_run_has_ended(with_stub: Any) -> None:
    """Copies from pinned memory go on after the call that begins them."""
    found = with_stub("""
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
    """)
    assert found[0] == []
    assert "CUBLAS failure 14" in found[1]
    assert found[2] == 0


def test_out_of_memory_is_told_as_such_and_the_session_works_on(with_stub: Any) -> None:
    found = with_stub("""
        import dataclasses
        session = capturing(NEG)
        session.device = dataclasses.replace(session.device, kind="cuda")
        stub.stub_fail(2)
        failed = outcome(lambda: session.run(None, feeds(1)[0]))
        stub.stub_fail(0)
        report([failed, session.run(None, feeds(2)[1])[0].tolist()])
    """)
    assert found[0]["type"] == "GPUOutOfMemoryError"
    assert found[1] == [-1] * 4


def test_a_run_that_was_out_of_memory_has_none_left_for_its_error(with_stub: Any) -> None:
    """Who runs a smaller batch in the ``except`` clause has the memory for it."""
    found = with_stub("""
        import dataclasses
        session = capturing(NEG)
        session.device = dataclasses.replace(session.device, kind="cuda")
        os.environ["STUB_CUDART_FAIL"] = "cudaMalloc=2@2-2"  # an output, when there is memory for the input
        try:
            session.run(None, feeds(1)[0])
        except ortgpu.GPUOutOfMemoryError:
            report([stub.stub_device_bytes(), session.run(None, feeds(2)[1])[0].tolist()])
    """)
    assert found == [0, [-1] * 4]


def test_a_forked_child_frees_nothing(with_stub: Any) -> None:
    found = with_stub("""
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
    """)
    assert found == [["ForkedSessionError", 32], [-1] * 4]
