"""Large arrays of ``run``, as far as that goes without a GPU.

The session is a real one on the CPU, and so is what runs it with inputs and outputs in its own memory; "device" memory
is the host's, and a stub runtime copies. It copies as late as CUDA may: what is read or used again too early shows.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.cpu_session import child
from tests.lab.stubs import Stubs

SETUP = """
from ortgpu.copying import Copier
from ortgpu.pinned import PinnedMemory
from ortgpu.staged_runs import StagedRuns
from ortgpu.staging import Staging
os.environ["STUB_CUDART_LATE"] = "1"
runtime, stub = stub_runtime(sys.argv[1])
MIB = 1 << 20
ran = []  # whether each run was staged

class Noting(Staging):
    def run(self, *arguments):
        results = super().run(*arguments)
        ran.append(results is not None)
        return results

def staged(model, staged_from=64, threads=3, piece=1000, limit=64 * MIB, **arguments):
    session = GPUSession(model, pinned_memory_limit=limit, **arguments)
    session._pinned = PinnedMemory(runtime, limit)
    stage(session, staged_from, threads, piece)
    return session

def stage(session, staged_from, threads, piece):
    session._staging = Noting(session, staged_from=staged_from)
    session._staging._runs = StagedRuns(session, runtime, staged_from, threads, piece)

def same(found, expected):
    assert len(found) == len(expected) and type(found) is type(expected)
    for a, b in zip(found, expected):
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.flags.writeable
        assert a.tobytes() == b.tobytes()
    return True

def is_pinned(array):
    return runtime.is_pinned(array.__array_interface__["data"][0])

def copy_threads():
    return [each for each in threading.enumerate() if each.name.startswith("ortgpu-copy")]

def wait_for_no_threads():
    for each in copy_threads():
        each.join(20)
    return threads()

def big(value, size=100_000):
    return {"x": np.full(size, value, np.float32)}
"""


@pytest.fixture
def with_stub(stubs: Stubs) -> Any:
    """Code in a child, which finds the stub runtime as ``runtime`` and what it counts in ``stub``."""
    return lambda code, deadline=60: child(SETUP + textwrap.dedent(code), str(stubs.cudart), deadline=deadline)


def test_results_are_those_of_run(with_stub: Any) -> None:
    """Any types, shapes, orders of memory and settings; large and small inputs and outputs beside each other."""
    found = with_stub(
        """
        from hypothesis import given, settings, strategies as st
        from ortgpu.tensor_types import DTYPES

        KINDS = [name[len("tensor("):-1] for name in DTYPES]
        plain = {kind: GPUSession(model(
            f"t ({kind}[a, b] x, int64[n] i, float z) => ({kind}[b, a] y, {kind}[a, b] same, int64[n] j, float w)"
            " { y = Transpose(x) same = Identity(x) j = Add(i, i) w = Neg(z) }"
        )) for kind in KINDS}
        shapes = st.tuples(st.integers(0, 60), st.integers(0, 60))
        orders = st.sampled_from(["C", "F", "gaps", "backwards", "readonly", "pinned"])
        outputs = st.sampled_from([None, [], ["y"], ["w", "same"], ("j", "y", "w", "same"), ["y", "y"]])

        @settings(max_examples=250, deadline=None, database=None)
        @given(st.sampled_from(KINDS), shapes, st.integers(0, 300), orders, outputs, st.integers(0, 2**32),
               st.sampled_from([1, 64, 5000]), st.integers(1, 5), st.sampled_from([8, 100, 4096]),
               st.sampled_from([64 * MIB, 1 << 17]))
        def check(kind, shape, count, order, names, seed, staged_from, number, piece, limit):
            random, reference = np.random.default_rng(seed), plain[kind]
            dtype = DTYPES[f"tensor({kind})"]
            x = random.integers(0, 2 if kind == "bool" else 100, shape).astype(dtype)
            memory = PinnedMemory(runtime, limit)
            if order == "gaps":
                x = np.repeat(x, 2, axis=1)[:, ::2]
            elif order == "backwards":
                x = x[::-1, ::-1]
            elif order == "pinned":
                pinned = memory.empty(shape, dtype)
                pinned[...] = x
                x = pinned
            else:
                x = np.array(x, order="F" if order == "F" else "C")
                x.flags.writeable = order != "readonly"
            feed = {"z": np.full((), 2.5, np.float32), "x": x, "i": random.integers(0, 99, count)}
            session = reference
            session._pinned, before = memory, feed["x"].copy()
            expected = GPUSession.run(session, names, feed)
            session._pinned_memory_limit = limit
            stage(session, staged_from, number, piece)
            try:
                first = session.run(names, feed)
                assert same(first, expected)
                assert same(session.run(names, feed), expected) and same(first, expected)
            finally:
                session._staging = None
            assert (feed["x"] == before).all()

        check()
        report([sum(ran) > 50, all(ran), stub.stub_last_error()])
    """,
        deadline=110,
    )
    assert found == [True, True, 0]


def test_large_results_are_in_memory_that_is_used_again(with_stub: Any) -> None:
    found = with_stub("""
        session = staged(NEG)
        addresses = set()
        for number in range(20):
            (result,) = session.run(None, big(number))
            assert not is_pinned(result) and (result == -number).all()
            addresses.add(result.__array_interface__["data"][0])
            del result
        ordinary = session._staging._runs._ordinary
        report([len(addresses), stub.stub_allocations(), ordinary.bytes_in_use, ordinary.bytes_held, ran.count(True)])
    """)
    assert found == [1, 1, 0, 7 << 16, 20]  # what is pinned for the input is used again for the output


def test_a_result_is_never_another_s_while_it_or_a_view_of_it_lives(with_stub: Any) -> None:
    """In memory that is used again, and beyond its limit."""
    found = with_stub("""
        from hypothesis import given, settings, strategies as st

        ways = st.sampled_from(["keep", "view", "drop"])
        steps = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60_000), ways))

        @settings(max_examples=60, deadline=None, database=None)
        @given(steps, st.sampled_from([1 << 17, 1 << 19, 1 << 21]))
        def check(steps, limit):
            session, held = staged(NEG, limit=limit, piece=50_000), {}
            for number, (slot, size, how) in enumerate(steps):
                (result,) = session.run(None, big(number, size))
                held.pop(slot, None)
                if how != "drop":
                    held[slot] = number, result if how == "keep" else memoryview(result[::3])
                del result
                assert stub.stub_pinned_bytes() == session._pinned.bytes_pinned <= limit
                assert session._staging._runs._ordinary.bytes_held <= limit
                assert all((np.asarray(array) == -value).all() for value, array in held.values())
            session.close()
            assert all((np.asarray(array) == -value).all() for value, array in held.values())
            assert stub.stub_pinned_bytes() == 0

        check()
        report([all(ran), len(ran) > 100])
    """)
    assert found == [True, True]


def test_results_that_are_kept_are_beyond_the_limit_in_memory_of_their_own(with_stub: Any) -> None:
    found = with_stub("""
        session = staged(NEG, limit=4 * MIB)
        results = [session.run(None, big(number, MIB // 8))[0] for number in range(12)]
        ordinary = session._staging._runs._ordinary
        in_use = ordinary.bytes_in_use
        right = all((each == -number).all() for number, each in enumerate(results))
        del results
        report([in_use, right, ordinary.bytes_in_use, ordinary.bytes_held, stub.stub_pinned_bytes(), all(ran)])
    """)
    assert found == [4 << 20, True, 0, 4 << 20, 1 << 19, True]


def test_small_arrays_go_straight_through(with_stub: Any) -> None:
    found = with_stub("""
        session = staged(NEG, staged_from=1000)
        small, large = session.run(None, feeds(1, 249)[0]), session.run(None, feeds(1, 250)[0])
        report([ran, len(small), len(large)])
    """)
    assert found == [[True], 1, 1]


def test_outputs_that_are_always_large_are_staged_whatever_the_inputs_are(with_stub: Any) -> None:
    found = with_stub("""
        grow = model("t (float[1] x) => (float[500] y) <int64[1] shape = {500}> { y = Expand(x, shape) }")
        session = staged(grow, staged_from=2000)
        (result,) = session.run(None, feeds(3, 1)[2])
        smaller = staged(grow, staged_from=2001)
        (other,) = smaller.run(None, feeds(3, 1)[2])
        report([ran, result.tolist() == other.tolist() == [2] * 500])
    """)
    assert found == [[True], True]


def test_wrong_calls_raise_what_run_raises(with_stub: Any) -> None:
    found = with_stub("""
        import onnxruntime
        session, plain = staged(NEG), GPUSession(NEG)
        right = big(1)
        wrong = [{"x": np.zeros((200, 200), np.float32)}, {"x": np.zeros(400)}, {"z": right["x"]}, {},
                 {**right, "z": right["x"]}, {"x": None}, {"x": object()}, {"x": ["a"] * 100},
                 {"x": np.array(["a"] * 99)}, {"x": [1.0] * 400, "y": right["x"]}, {"x": np.zeros(500, ">i8")},
                 [right], None]
        calls = [(None, feed) for feed in wrong] + [(names, right) for names in (["nothing"], "y", [1], 5, [None])]
        text = lambda each: {key: value.split("Invoked with")[0] for key, value in each.items()}
        report([[text(outcome(lambda: each.run(*call))) for call in calls] for each in (session, plain)]
               + [session.run(None, right)[0][0].item(), session._pinned.bytes_in_use, ran[-1]])
    """)
    staged, plain, *after = found
    assert staged == plain
    assert all("type" in each for each in plain)
    assert after == [-1, 0, True]


def test_a_failing_model_raises_what_run_raises(with_stub: Any) -> None:
    found = with_stub("""
        gather = model("t (float[n] x, int64[m] i) => (float[m] y) { y = Gather(x, i) }")
        session, plain = staged(gather), GPUSession(gather)
        feed = {**big(1), "i": np.array([0, 10**6])}
        report([outcome(lambda: each.run(None, feed)) for each in (session, plain)] + [ran])
    """)
    assert found[0] == found[1]
    assert found[0]["type"] == "InvalidArgument"
    assert found[2] == [False]


def test_other_values_in_a_feed(with_stub: Any) -> None:
    found = with_stub("""
        import onnxruntime
        add = model("t (float[n] x, float[n] z) => (float[n] y) { y = Add(x, z) }")
        session, array = staged(add), big(2)["x"]
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        class Foreign:
            nbytes = 1 << 20
            def __dlpack_device__(self):
                return (1, 0)
            def __dlpack__(self):
                return np.ones(100_000, np.float32).__dlpack__()
        class Mapped(np.ndarray):
            pass
        others = value, Foreign(), array.view(Mapped), array.tolist(), array.astype(">f4").view("<f4").byteswap()
        results = [session.run(None, {"x": array, "z": other})[0][[0, -1]].tolist() for other in others]
        options = onnxruntime.RunOptions()
        with_options = session.run(None, {"x": array, "z": array}, options)[0][0].item()
        report([results, with_options, ran])
    """)
    assert found[0] == [[4, 4], [3, 3], [4, 4], [4, 4], [4, 4]]
    assert found[1:] == [
        4,
        [True, False, True, True, False, True],
    ]  # the second is staged as the OrtValue that it becomes


def test_outputs_and_inputs_that_are_on_the_cpu_stay_there(with_stub: Any) -> None:
    """On a GPU some are, beside others that are not; told here by a session that says so of its own."""
    found = with_stub("""
        several = model("t (float[n] x, float[n] z) => (float[n] y, int64[1] s) { y = Add(x, z) s = Shape(x) }")
        plain = GPUSession(several)
        class Memory:
            def __init__(self, name):
                self.name = name
        class Mixed:
            # The C++ session, but for where its inputs and outputs are
            input_meminfos = [Memory("Cpu"), Memory("CudaPinned")]
            output_meminfos = [Memory("Cpu"), Memory("Cuda")]
            def __init__(self, inner):
                self.inner = inner
            def __getattr__(self, name):
                return getattr(self.inner, name)
        session = staged(several)
        inner, session._sess = session._sess, Mixed(session._sess)
        stage(session, 64, 3, 1000)
        placed = session._staging._runs._inputs, session._staging._runs._outputs
        feed, other = {"x": big(2)["x"], "z": big(3)["x"]}, {"x": big(2, 99)["x"], "z": big(3, 99)["x"]}
        first = session.run(None, feed)
        right = [same(session.run(None, other), plain.run(None, other)), same(first, plain.run(None, feed))]
        report([placed, right, ran])
    """)
    assert found == [[{"x": True, "z": False}, {"y": True, "s": False}], [True, True], [True, True]]


def test_threads_over_one_session(with_stub: Any) -> None:
    found = with_stub("""
        session, wrong, pinned = staged(NEG, limit=8 * MIB, piece=20_000, threads=4), [], []
        def work(number):
            for step in range(40):
                value = number * 1000 + step
                (result,) = session.run(None, big(value, 1000 * (1 + (number + step) % 90)))
                if (result != -value).any():
                    wrong.append(value)
                pinned.append(stub.stub_pinned_bytes())
        workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
        mapped = [int(result[0][0]) for result in session.map([big(n) for n in range(30)])]
        alive, bounded = len(copy_threads()), max(pinned) <= 8 * MIB
        session.close()
        report([wrong, mapped == [-n for n in range(30)], all(ran), bounded, alive, wait_for_no_threads(),
                session._pinned.bytes_in_use, stub.stub_pinned_bytes(), stub.stub_streams()])
    """)
    assert found == [[], True, True, True, 4, [], 0, 0, 0]


def test_sessions_share_the_threads_that_copy(with_stub: Any) -> None:
    found = with_stub("""
        sessions = [staged(NEG) for _ in range(5)]
        right = [session.run(None, big(number))[0][0].item() for number, session in enumerate(sessions)]
        one = threads()
        del sessions[1:]
        gc.collect()
        again = sessions[0].run(None, big(7))[0][0].item()
        sessions.clear()
        gc.collect()
        report([right, one, again, wait_for_no_threads(), stub.stub_streams(), stub.stub_pinned_bytes()])
    """)
    assert found == [[0, -1, -2, -3, -4], [f"ortgpu-copy_{n}" for n in range(3)], -7, [], 0, 0]


CALLS = ["cudaGetDevice", "cudaHostAlloc", "cudaPointerGetAttributes", "cudaSetDevice", "cudaMemcpyAsync",
         "cudaStreamSynchronize"]  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
def test_whatever_call_fails_the_run_is_done_and_nothing_is_lost(with_stub: Any, function: str) -> None:
    found = with_stub(f"""
        right, leaks = [], []
        for late in (1, 2, 3, 7, 40):
            session = staged(NEG, piece=50_000)
            for before in range(late % 3):
                session.run(None, big(5))
            stub.stub_fail(0)
            os.environ["STUB_CUDART_FAIL"] = f"{function}=999@{{late}}"
            right += [bool((session.run(None, big(number))[0] == -number).all()) for number in range(4)]
            del os.environ["STUB_CUDART_FAIL"]
            right.append(bool((session.run(None, big(9))[0] == -9).all()) and ran[-1])
            leaks.append(session._pinned.bytes_in_use)
            session.close()
        report([all(right), leaks, stub.stub_last_error(), stub.stub_pinned_bytes(), stub.stub_streams()])
    """)
    assert found == [True, [0] * 5, 0, 0, 0]


@pytest.mark.parametrize("function", ["cudaStreamCreateWithFlags", "cudaSetDevice"])
def test_a_device_that_gives_no_streams_leaves_it_to_run(with_stub: Any, function: str) -> None:
    found = with_stub(f"""
        from ortgpu import cudart
        session = staged(NEG)
        session._staging._runs = None
        cudart.runtime_of = lambda device: runtime
        os.environ["STUB_CUDART_FAIL"] = "{function}=2@2"
        failed = session.run(None, big(3))[0][0].item()
        del os.environ["STUB_CUDART_FAIL"]
        report([failed, session.run(None, big(4))[0][0].item(), ran])
        session.close()
    """)
    assert found == [-3, -4, [False, True]]


def test_out_of_pinned_memory_copies_the_ordinary_way(with_stub: Any) -> None:
    found = with_stub("""
        session = staged(NEG)
        stub.stub_fail(2)
        (result,) = session.run(None, big(3))
        again = session.run(None, big(4))[0]
        stub.stub_fail(0)
        report([result[0].item(), again[0].item(), is_pinned(result), ran])
    """)
    assert found == [-3, -4, False, [True, True]]


def test_closed_it_says_so_and_results_live_on(with_stub: Any) -> None:
    found = with_stub("""
        session = staged(NEG)
        (result,) = session.run(None, big(3))
        session.close()
        session.close()
        failed = outcome(lambda: session.run(None, big(3)))
        left = stub.stub_pinned_bytes(), wait_for_no_threads(), stub.stub_streams()
        report([failed["type"], result[-1].item(), left])
    """)
    assert found == ["ExecutionError", -3, [0, [], 0]]


def test_dropped_without_closing_only_what_results_use_stays(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu import pinned
        session = staged(NEG, limit=2 * MIB)
        session._pinned = None
        pinned.runtime_of = lambda device: runtime
        results = [session.run(None, big(number, MIB // 8))[0] for number in range(5)]
        array = session.pinned_empty(MIB // 4)
        before = stub.stub_pinned_bytes()
        owners = session._staging._runs._ordinary._owners
        del results[1:4], session
        gc.collect()
        left = stub.stub_pinned_bytes(), sum(each.nbytes for each in owners.values()), [int(r[0]) for r in results]
        del results, array
        report([before, left, stub.stub_pinned_bytes(), len(owners), wait_for_no_threads()])
    """)
    # The last result was beyond the limit, in memory of its own.
    assert found == [3 << 19, [1 << 20, 1 << 19, [0, -4]], 0, 0, []]


def test_a_run_under_way_when_the_session_is_closed_ends(with_stub: Any) -> None:
    found = with_stub("""
        session = staged(NEG)
        entered, closed = threading.Event(), threading.Event()
        class Waiting(Copier):
            def from_device(self, transfers):
                entered.set()
                assert closed.wait(20)
                super().from_device(transfers)
        session._staging._runs._copier = Waiting(runtime, 3, 1000)
        results = []
        worker = threading.Thread(target=lambda: results.append(session.run(None, big(3))[0][-1].item()))
        worker.start()
        assert entered.wait(20)
        session.close()
        closed.set()
        worker.join(20)
        report([results, wait_for_no_threads(), stub.stub_pinned_bytes(), stub.stub_streams()])
    """)
    assert found == [[-3], [], 0, 0]


def test_a_process_that_lost_the_gpu_refuses(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu import lifetime
        session = staged(NEG)
        lifetime.watch(session)
        (result,) = session.run(None, big(3))
        lifetime.noted(ortgpu.PoisonedContextError("lost", fixes=[]))
        report([outcome(lambda: session.run(None, big(3)))["type"], result[0].item()])
    """)
    assert found == ["PoisonedContextError", -3]


def test_a_sticky_error_of_a_copy_is_told_by_run_itself(with_stub: Any) -> None:
    """A CUDA that is lost fails the copy and then ONNX Runtime, whose words are explained."""
    found = with_stub("""
        from ortgpu import lifetime
        session = staged(NEG)
        lifetime.watch(session)
        class Lost:
            def __init__(self, inner):
                self.inner = inner
            def __getattr__(self, name):
                return getattr(self.inner, name)
            def run(self, *arguments):
                raise RuntimeError("CUDA failure 700: an illegal memory access was encountered ; GPU=0")
        session._sess = Lost(session._sess)
        os.environ["STUB_CUDART_FAIL"] = "cudaMemcpyAsync=700"
        report([outcome(lambda: session.run(None, big(3)))["type"] for _ in range(2)])
    """)
    assert found == ["PoisonedContextError"] * 2


def test_a_forked_child_keeps_its_results_refuses_and_frees_nothing(with_stub: Any) -> None:
    found = with_stub("""
        from ortgpu import lifetime
        session = staged(NEG)
        lifetime.watch(session)
        (result,) = session.run(None, big(3))
        before = stub.stub_pinned_bytes()
        read, write = os.pipe()
        other_read, other_write = os.pipe()
        if os.fork() == 0:
            signal.alarm(20)
            refused = outcome(lambda: session.run(None, big(3)))["type"]
            os.read(other_read, 1)
            right = bool((result == -3).all())
            del result
            session.close()
            del session
            gc.collect()
            os.write(write, json.dumps([refused, right, stub.stub_pinned_bytes() == before]).encode())
            os._exit(0)
        del result
        (again,) = session.run(None, big(4))  # in the memory of the result that the child still has
        os.write(other_write, b"x")
        os.wait()
        report([json.loads(os.read(read, 1000)), again[0].item(), len(session._staging._runs._ordinary._owners)])
    """)
    assert found == [["ForkedSessionError", True, True], -4, 1]


def test_which_sessions_stage() -> None:
    found = child("""
        from ortgpu import staging
        from ortgpu.devices import Device
        GPU = Device("cuda", 0, None, None, None, None, None)
        OPTIONS = {"CUDAExecutionProvider": {"enable_cuda_graph": "0"}, "CPUExecutionProvider": {}}

        def stages(text, options=OPTIONS, device=GPU, **arguments):
            # A session that says of itself that it is on a GPU
            session = GPUSession(model(text) if isinstance(text, str) else text, **arguments)
            session.device = device or session.device
            session.get_provider_options = lambda: options
            return staging.staging_of(session) is not None

        small = "t (float[100, 3] x) => (float[100, 3] y) { y = Neg(x) }"
        large = "t (float[3, 1000000] x) => (float[3, 1000000] y) { y = Neg(x) }"
        texts = "t (string[n] x) => (string[n] y) { y = Identity(x) }"
        grows = "t (float[1] x, int64[1] s) => (float[n] y) { y = Expand(x, s) }"
        graphs = {**OPTIONS, "CUDAExecutionProvider": {"enable_cuda_graph": "1"}}
        report([stages(NEG), stages(large), stages(grows), stages(small), stages(texts), stages(NEG, device=None),
                stages(NEG, graphs), stages(NEG, {"TensorrtExecutionProvider": {}, **OPTIONS}),
                stages(NEG, pinned_memory_limit=0), GPUSession(NEG)._staging])
    """)
    assert found == [True, True, True, False, False, False, False, False, False, None]
