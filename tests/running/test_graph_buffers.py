"""What sessions with CUDA graphs copy through pinned memory, and which runs are replays. See graph_sessions.py."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.graph_sessions import with_graphs

pytestmark = pytest.mark.lab

PAIR = """
PAIR = model('''pair (float[n, 2] x, float[m] w) => (float[n, 2] y, float[m] z, int64[2] s) {
    y = Neg(x)
    z = Neg(w)
    s = Shape(x)
}''')
SMALL, LARGE, HUGE = 65536, 65537, 1 << 19  # floats: 256 KiB, more, and 2 MiB, which threads copy

def right(session, value, rows, size, names=None):
    feed = {"x": np.full((rows, 2), value, np.float32), "w": np.full(size, value + 1, np.float32)}
    found = session.run(names, feed)
    feed["x"][:] = feed["w"][:] = 99
    expected = {"y": np.full((rows, 2), -value), "z": np.full(size, -value - 1), "s": np.array([rows, 2])}
    names = names or list(expected)
    return len(found) == len(names) and all(
        type(each) is np.ndarray and each.flags.writeable and each.shape == expected[name].shape
        and bool((each == expected[name]).all()) for name, each in zip(names, found)
    )
"""


@pytest.fixture
def with_stub(stubs: Stubs) -> Any:
    return lambda code: with_graphs(stubs, PAIR + textwrap.dedent(code))


@pytest.mark.parametrize("limit", [0, 1 << 16, 1 << 24])
def test_small_and_large_arrays_in_one_graph(with_stub: Any, limit: int) -> None:
    found = with_stub(f"""
        session, found = capturing(PAIR, limit={limit}), []
        for round in range(6):
            for rows, size in ((1, 1), (1, LARGE), (SMALL // 2, SMALL), (LARGE, 3), (LARGE, LARGE), (HUGE, HUGE)):
                for names in (None, ["z"], ["s", "z"], ["y", "y"]):
                    found.append(right(session, len(found), rows, size, names))
        pinned, threads_copy = stub.stub_pinned_bytes(), "_copier" in vars(session._sess)
        session.close()
        report([len(found), all(found), threads_copy, pinned, stub.stub_pinned_bytes(), stub.stub_device_bytes()])
    """)
    # Blocks of 64 KiB: of the third graph the two inputs and two of the outputs take four each. Runs of the last graph
    # use 4 MiB for "x", 2 for "w" and 4 for "y", and "y" may be wanted twice.
    pinned = {0: 0, 1 << 16: 1 << 16, 1 << 24: (1 + 1 + 17 + 1 + 1 + 1 + 3 * 64 + 32) << 16}[limit]
    assert found == [144, True, limit == 1 << 24, pinned, 0, 0]


@pytest.mark.parametrize(("size", "limit"), [("LARGE", 20), ("HUGE", 24)])
def test_the_memory_of_a_large_result_is_used_again_once_the_caller_has_dropped_it(
    with_stub: Any, size: str, limit: int
) -> None:
    found = with_stub(f"""
        session, size = capturing(PAIR, limit=1 << {limit}), {size}
        def large(value):
            feed = dict(x=np.zeros((1, 2), np.float32), w=np.full(size, value, np.float32))
            return session.run(["z"], feed)[0]
        def address(array):
            return array.__array_interface__["data"][0]
        first = large(1)
        used = [address(first)]
        kept = [large(value) for value in range(2, 30)]  # more than the limit has room for
        used.append(address(first) in map(address, kept))
        right = bool((first == -1).all()) and all((each == -value).all() for value, each in enumerate(kept, 2))
        del first, kept
        for value in range(2):
            result = large(value)
            used.append(address(result))
            del result
        report([right, used[1], used[2] == used[3], len(large(1)) == size])
    """)
    assert found == [True, False, True, True]


def test_what_is_computed_on_the_cpu_is_the_callers_own_too(with_stub: Any) -> None:
    found = with_stub("""
        session = capturing(PAIR)
        session._gpu_runner.graphs._on_cpu = frozenset({"s"})
        found = []
        for value in range(4):
            found.append(right(session, value, 3, 5))
            session.run(["s"], {"x": np.ones((3, 2), np.float32), "w": np.ones(5, np.float32)})[0][:] = 7
        report([found, stub.stub_device_bytes()])
    """)
    assert found == [[True] * 4, 2 * 4 * (6 + 5)]


def test_small_arrays_of_all_graphs_are_given_back_with_their_graphs(with_stub: Any) -> None:
    found = with_stub("""
        session = capturing(NEG)
        for size in range(1, MAX_SHAPES + 9):
            session.run(None, feeds(1, size)[0])
        full = session._pinned.bytes_in_use, session._pinned.bytes_held
        del session
        gc.collect()
        report([full, stub.stub_pinned_bytes()])
    """)
    assert found == [[16 << 16, 16 << 16], 0]


def test_results_are_not_overwritten_by_later_runs_of_any_thread(with_stub: Any) -> None:
    found = with_stub("""
        session, wrong = capturing(PAIR), []
        def work(number):
            held = []
            for step in range(40):
                value, size = number * 100 + step, (SMALL, LARGE, SMALL, HUGE)[step % 4]
                feed = {"x": np.full((3, 2), value, np.float32), "w": np.full(size, value, np.float32)}
                held.append((value, session.run(None, feed)))
            wrong.extend(value for value, (y, z, s) in held if (y != -value).any() or (z != -value).any())
        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        [worker.start() for worker in workers]
        work(9)
        [worker.join() for worker in workers]
        report([wrong, len(bound), stub.stub_late_copies()])
    """)
    assert found == [[], 200, 0]


WAYS = """
ways = []
class Noting(CapturingSession):
    def run(self, *arguments):
        ways.append("run")
        return super().run(*arguments)
    def replay(self, *arguments):
        results = super().replay(*arguments)
        ways.append("replay" if results is not None else "no replay")
        return results
session = capturing(PAIR)
session._sess.__class__ = Noting
x, w = np.ones((1, 2), np.float32), np.ones(3, np.float32)
session.run(None, {"x": x, "w": w})
ways.clear()
"""


def test_which_runs_are_replayed_at_once(with_stub: Any) -> None:
    found = with_stub(
        WAYS
        + textwrap.dedent("""
        import collections, onnxruntime
        def way(names, feed, *options):
            ways.clear()
            session.run(names, feed, *options)
            return ways[0]
        class Own(np.ndarray):
            pass
        uncaptured = onnxruntime.RunOptions()
        uncaptured.add_run_config_entry("gpu_graph_id", "-1")
        value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
        report([way(*each) for each in (
            (None, {"x": x, "w": w}), ([], {"w": w, "x": x}), (["z"], {"x": x[::-1], "w": np.ones(9, "f4")[::3]}),
            (None, {"x": x, "w": w}, uncaptured), (None, {"x": value, "w": w}), (None, {"x": x, "w": [1, 2, 3]}),
            (("z",), {"x": x, "w": w}), (None, collections.OrderedDict(x=x, w=w)), (None, {"x": x.view(Own), "w": w}),
            (None, {"x": x, "w": w}), (None, {"x": x, "w": np.ones(4, "f4")}), (None, {"x": x, "w": np.ones(4, "f4")}),
        )])
    """)
    )
    assert found == [*["replay"] * 3, "run", *["no replay"] * 5, "replay", "no replay", "replay"]


def test_a_tracer_sees_each_run_of_a_session_that_is_captured_after_it_came(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu.running.onnxruntimes import InferenceSession
        session, plain, seen = capturing(NEG), InferenceSession.run, []
        def traced(self, *arguments, **named):
            seen.append(len(arguments))
            return plain(self, *arguments, **named)
        session.run(None, feeds(1)[0])
        InferenceSession.run = traced
        [session.run(None, each) for each in feeds(3)]
        later = capturing(NEG)
        [later.run(None, each) for each in feeds(3)]
        InferenceSession.run = plain
        results = [each.run(None, feeds(3)[2])[0].tolist() for each in (session, later)]
        report([len(seen), results, len(bound)])
    """)
    assert found == [3, [[-2] * 4] * 2, 9]


CALLS = ["cudaSetDevice", "cudaMemcpyAsync", "cudaStreamSynchronize"]
CALLS_FOR_THREADS = [*CALLS, "cudaEventRecord", "cudaEventQuery"]


@pytest.mark.parametrize(
    ("function", "size"), [*((call, "5") for call in CALLS), *((call, "HUGE") for call in CALLS_FOR_THREADS)]
)
def test_a_call_that_fails_while_a_graph_is_replayed_is_told_and_the_session_works_on(
    with_stub: Any, function: str, size: str
) -> None:
    found = with_stub(f"""
        session, failed = capturing(PAIR), []
        right(session, 1, 3, {size})
        before = runtime.exchange_capture_mode(1)
        for late in (1, 2, 3):
            stub.stub_fail(0)
            os.environ["STUB_CUDART_FAIL"] = f"{function}=999@{{late}}"
            failed.append(outcome(lambda: right(session, 2, 3, {size})))
            del os.environ["STUB_CUDART_FAIL"]
            failed.append([right(session, 3, 3, {size}), stub.stub_late_copies()])
        left = stub.stub_capture_mode(), stub.stub_last_error()
        session.close()
        report([failed, *left, stub.stub_pinned_bytes() + stub.stub_device_bytes() + stub.stub_events()])
    """)
    outcomes, mode, last_error, left = found
    told = outcomes[::2]
    assert outcomes[1::2] == [[True, 0]] * 3
    assert f"CUDA failure 999: stub error ; GPU=0 ; expr={function}" in told[0]["text"]
    assert all(each == {"returned": True} or each["text"] == told[0]["text"] for each in told)
    assert (mode, last_error, left) == (1, 0, 0)


def test_large_arrays_in_any_order_of_memory_and_pinned_ones(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu.running.copying import ParallelCopy
        session, right, copied, plain = capturing(PAIR, limit=1 << 26), [], [], ParallelCopy.copy
        def copy(self, to, source, size):
            copied.append(size)
            plain(self, to, source, size)
        ParallelCopy.copy = copy
        pinned = session.pinned_empty((HUGE, 2))
        for value in range(4):
            pinned[:] = np.arange(2 * HUGE, dtype=np.float32).reshape(HUGE, 2) * value
            for x in (pinned, pinned.copy(), np.asfortranarray(pinned), pinned.copy()[::-1, ::-1]):
                expected = -x
                (y,) = session.run(["y"], {"x": x, "w": np.zeros(3, np.float32)})
                if x is pinned:
                    pinned[:] = 7
                right.append(bool((y == expected).all()))
                pinned[:] = -expected if x is pinned else pinned
        session.close()
        report([all(right), len(right), len(copied), sum(copied) == len(copied) * 8 * HUGE, stub.stub_late_copies()])
    """)
    # 16 results, and the four inputs that are contiguous and not pinned
    assert found == [True, 16, 20, True, 0]


def test_where_no_thread_can_be_started_one_copies(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu.running import copying
        def full(threads):
            raise RuntimeError("can't start new thread")
        copying._check_that_there_can_be = full
        session = capturing(PAIR)
        report([[right(session, value, 3, HUGE) for value in range(3)], type(session._sess._copier._copies).__name__])
    """)
    assert found == [[True] * 3, "_OneThread"]


def test_threads_that_copy_end_with_the_session(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu.running import copying
        found, sessions = [], [capturing(PAIR) for _ in range(2)]
        for session in sessions:
            found.append(right(session, 1, HUGE, 1))
        found.append(len(copying._shared))
        sessions[0].close()
        found.append(len(copying._shared))
        del session, sessions
        gc.collect()
        report([*found, len(copying._shared), stub.stub_streams() + stub.stub_events() + stub.stub_pinned_bytes()])
    """)
    assert found == [True, True, 1, 1, 0, 0]


def test_out_of_pinned_memory_the_copies_are_the_ordinary_ones(with_stub: Any) -> None:
    found = with_stub("""
        session = capturing(PAIR)
        os.environ["STUB_CUDART_FAIL"] = "cudaHostAlloc=2"
        found = [right(session, value, 3, size) for value in range(3) for size in (5, HUGE)]
        del os.environ["STUB_CUDART_FAIL"]
        found += [right(session, value, 3, 6) for value in range(3)]
        report([all(found), stub.stub_pinned_bytes(), stub.stub_last_error()])
    """)
    assert found == [True, 1 << 16, 0]


def test_a_session_that_refuses_replays_nothing(with_stub: Any) -> None:
    found = with_stub("""
        import dataclasses
        from ortgpu.provider import lifetime
        session = capturing(NEG)
        session.device = dataclasses.replace(session.device, kind="cuda")
        session.run(None, feeds(1)[0])
        lifetime.noted(ortgpu.PoisonedContextError("lost", fixes=[]))
        report([outcome(lambda: session.run(None, feeds(1)[0]))["type"], len(bound)])
    """)
    assert found == ["PoisonedContextError", 1]
