"""Large arrays of ``run``: results, types and exceptions are those of plain ``run``. See staged_sessions.py."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.lab.installed import older_than
from tests.support.cpu_session import child
from tests.support.staged_sessions import STAGES

stages = pytest.mark.skipif(older_than(STAGES) is not None, reason=str(older_than(STAGES)))


def test_results_are_those_of_run(staged_child: Any) -> None:
    """Any types, shapes, orders of memory and settings; large and small inputs and outputs beside each other."""
    found = staged_child(
        """
        from hypothesis import given, settings, strategies as st
        from ortgpu.model.tensor_types import DTYPES

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
                session._gpu_runner = PlainRunner(session)
            assert (feed["x"] == before).all()

        check()
        report([sum(ran) > 50, all(ran), stub.stub_last_error()])
    """,
        deadline=110,
    )
    assert found == [True, True, 0]


def test_small_arrays_go_straight_through(staged_child: Any) -> None:
    found = staged_child("""
        session = staged(NEG, staged_from=1000)
        small, large = session.run(None, feeds(1, 249)[0]), session.run(None, feeds(1, 250)[0])
        report([ran, len(small), len(large)])
    """)
    assert found == [[True], 1, 1]


def test_outputs_that_are_always_large_are_staged_whatever_the_inputs_are(staged_child: Any) -> None:
    found = staged_child("""
        grow = model("t (float[1] x) => (float[500] y) <int64[1] shape = {500}> { y = Expand(x, shape) }")
        session = staged(grow, staged_from=2000)
        (result,) = session.run(None, feeds(3, 1)[2])
        smaller = staged(grow, staged_from=2001)
        (other,) = smaller.run(None, feeds(3, 1)[2])
        report([ran, result.tolist() == other.tolist() == [2] * 500])
    """)
    assert found == [[True], True]


def test_outputs_of_unknown_size_are_staged_once_they_were_seen_to_be_large(staged_child: Any) -> None:
    """They are for inputs as large as those that had large outputs: a smaller batch is run as before."""
    found = staged_child("""
        grow = model("t (float[n] x) => (float[m] y) { hundred = Constant <value = int64[1] {100}> () "
                     "y = Tile(x, hundred) }")
        session = staged(grow, staged_from=2000)
        def run(count):
            ran.clear()
            (result,) = session.run(None, feeds(3, count)[2])
            return [len(result) == 100 * count and bool((result == 2).all()), *ran]
        report([run(count) for count in (2, 2, 4, 5, 5, 6, 4, 5, 0, 400)])
    """)
    plain, is_staged = [True], [True, True]
    assert found == [plain, plain, plain, plain, is_staged, is_staged, plain, is_staged, plain, is_staged]


def test_a_run_for_a_small_output_says_nothing_of_the_others(staged_child: Any) -> None:
    """An encoder was asked for its small output first, and no run for the large one was ever staged."""
    found = staged_child("""
        session = staged(model("t (float[n] x) => (float[m] large, float[n] small) { "
                               "hundred = Constant <value = int64[1] {100}> () "
                               "large = Tile(x, hundred) small = Neg(x) }"), staged_from=2000)
        def run(*names):
            ran.clear()
            results = session.run(list(names), feeds(3, 5)[2])
            return [[len(each) for each in results], *ran]
        report([run("small"), run("small"), run("large"), run("large"), run("small", "large")])
    """)
    assert found == [[[5]], [[5]], [[500]], [[500], True], [[5, 500], True]]


def test_threads_copy_smaller_arrays_beside_a_large_one_too(staged_child: Any) -> None:
    found = staged_child("""
        from ortgpu.running import staging
        session = staged(model("t (float[n] x, float[m] w) => (float[k] y, float[m] z) { "
                               "six = Constant <value = int64[1] {6}> () y = Tile(x, six) z = Neg(w) }"))
        session._gpu_runner = Noting(session)  # with the sizes and pieces that users get
        staging.runtime_of = lambda device: runtime
        copied, plain = [], copying.ParallelCopy.copy
        def copy(self, to, source, size):
            copied.append(size / MIB)
            plain(self, to, source, size)
        copying.ParallelCopy.copy = copy
        feed = {"x": np.arange(MIB // 2, dtype=np.float32), "w": np.ones(MIB // 4, np.float32)}
        runs = [session.run(None, feed) for _ in range(3)]
        report([all((y == np.tile(feed["x"], 6)).all() and (z == -1).all() for y, z in runs), copied, ran])
    """)
    assert found == [True, [2, 8, 4] * 2, [True] * 2]


def test_wrong_calls_raise_what_run_raises(staged_child: Any) -> None:
    found = staged_child("""
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


def test_a_failing_model_raises_what_run_raises(staged_child: Any) -> None:
    found = staged_child("""
        gather = model("t (float[n] x, int64[m] i) => (float[m] y) { y = Gather(x, i) }")
        session, plain = staged(gather), GPUSession(gather)
        feed = {**big(1), "i": np.array([0, 10**6])}
        report([outcome(lambda: each.run(None, feed)) for each in (session, plain)] + [ran])
    """)
    assert found[0] == found[1]
    assert found[0]["type"] == "InvalidArgument"
    assert found[2] == [False]


def test_other_values_in_a_feed(staged_child: Any) -> None:
    found = staged_child("""
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
    # What is not NumPy's is left to run; only the second has a size.
    assert found[1:] == [4, [False, True, True]]


def test_an_array_that_copies_in_its_own_way_is_taken_as_it_is(staged_child: Any) -> None:
    found = staged_child("""
        class Percent(np.ndarray):
            def __array_function__(self, function, types, arguments, options):
                if function is np.copyto:
                    return np.copyto(arguments[0], np.asarray(arguments[1]) / 100)  # as astropy's
                raise TypeError(function.__name__)
        x = np.arange(100_000, dtype=np.float32).view(Percent)
        session = staged(NEG)
        report([[bool((session.run(None, {"x": each})[0] == -np.asarray(each)).all()) for each in (x, x[::2])], ran])
    """)
    assert found == [[True, True], [True, True]]


def test_outputs_and_inputs_that_are_on_the_cpu_stay_there(staged_child: Any) -> None:
    """On a GPU some are, beside others that are not; told here by a session that says so of its own."""
    found = staged_child("""
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
        placed = session._gpu_runner._runs._inputs, session._gpu_runner._runs._outputs
        feed, other = {"x": big(2)["x"], "z": big(3)["x"]}, {"x": big(2, 99)["x"], "z": big(3, 99)["x"]}
        first = session.run(None, feed)
        right = [same(session.run(None, other), plain.run(None, other)), same(first, plain.run(None, feed))]
        report([placed, right, ran])
    """)
    assert found == [[{"x": True, "z": False}, {"y": True, "s": False}], [True, True], [True, True]]


@stages
def test_which_sessions_stage() -> None:
    found = child("""
        from ortgpu.running import staging
        from ortgpu.provider.devices import Device
        GPU = Device("cuda", 0, None, None, None, None, None)
        OPTIONS = {"CUDAExecutionProvider": {"enable_cuda_graph": "0"}, "CPUExecutionProvider": {}}

        def stages(text, options=OPTIONS, device=GPU, **arguments):
            # A session that says of itself that it is on a GPU
            session = GPUSession(model(text) if isinstance(text, str) else text, **arguments)
            session.device = device or session.device
            session._provider_options = options
            return staging.may_stage(session)

        small = "t (float[100, 3] x) => (float[100, 3] y) { y = Neg(x) }"
        large = "t (float[9, 1000000] x) => (float[9, 1000000] y) { y = Neg(x) }"
        texts = "t (string[n] x) => (string[n] y) { y = Identity(x) }"
        grows = "t (float[1] x, int64[1] s) => (float[n] y) { y = Expand(x, s) }"
        not_utf8 = model("t (float[batch] x) => (float[batch] y) { y = Neg(x) }").replace(b"batch", b"b\\xe4t\\xffh")
        tiled = "t (float[5000000] x, int64[1] s) => (float[batch] y) { y = Tile(x, s) }"
        not_utf8_out = model(tiled).replace(b"batch", b"b\\xe4t\\xffh")  # which is not looked at first
        graphs = {**OPTIONS, "CUDAExecutionProvider": {"enable_cuda_graph": "1"}}
        stream = {**OPTIONS, "CUDAExecutionProvider": {"has_user_compute_stream": "1", "user_compute_stream": "42"}}
        report([stages(NEG), stages(large), stages(grows), stages(small), stages(texts), stages(NEG, device=None),
                stages(NEG, graphs), stages(NEG, {"TensorrtExecutionProvider": {}, **OPTIONS}),
                stages(NEG, pinned_memory_limit=0), type(GPUSession(NEG)._gpu_runner).__name__,
                stages(NEG, stream), stages(not_utf8), stages(not_utf8_out)])
    """)
    assert found == [True, True, True, False, False, False, False, False, False, "PlainRunner", False, False, False]


TRACER = """
import functools
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, Session
seen, plain = [], InferenceSession.run

@functools.wraps(plain)
def traced(self, *given):
    seen.append(given[0])
    return plain(self, *given)
"""


@stages
@pytest.mark.parametrize("bases", ["GPUSession, Logged", "GPUSession"])
def test_nothing_is_staged_where_a_class_in_between_has_a_run(bases: str) -> None:
    found = child(
        TRACER
        + textwrap.dedent(f"""
        from ortgpu.running.onnxruntimes import onnxruntimes_run
        class Logged(InferenceSession):
            def run(self, *given):
                return super().run(*given)
        class Session({bases}):
            pass
        report(onnxruntimes_run(Session(NEG)) is None)
    """)
    )
    assert found == ("Logged" in bases)


@stages
@pytest.mark.parametrize("where", ["InferenceSession", "Session"])
def test_nothing_is_staged_where_a_tracer_was_first(where: str) -> None:
    found = child(
        TRACER
        + textwrap.dedent(f"""
        import dataclasses
        from ortgpu.running import staging
        session = GPUSession(NEG)
        session.device = dataclasses.replace(session.device, kind="cuda")
        session._provider_options = {{"CUDAExecutionProvider": {{}}, "CPUExecutionProvider": {{}}}}
        stages = [staging.may_stage(session)]
        {where}.run = traced
        report([*stages, staging.may_stage(session)])
    """)
    )
    assert found == [True, False]


def test_a_generator_that_fills_one_array_again(staged_child: Any) -> None:
    """Its copies are pinned: none is staged once more."""
    found = staged_child("""
        session = staged(NEG)
        plain, read = session._gpu_runner._runs.run, []
        def late(*arguments):
            time.sleep(0.004)
            read.append(is_pinned(arguments[-1]["x"]))
            return plain(*arguments)
        session._gpu_runner._runs.run = late
        def refilled():
            array = np.zeros(100_000, np.float32)
            for number in range(30):
                array[:] = number
                yield {"x": array}
        results = [int(result[0][-1]) for result in session.map(refilled())]
        report([results == [-n for n in range(30)], all(ran), len(ran), all(read), session._pinned.bytes_in_use])
    """)
    assert found == [True, True, 30, True, 0]
