"""Programs of ``tests/running/test_staging.py``."""

from __future__ import annotations

import time

import numpy as np

from ortgpu import GPUSession
from ortgpu.running import copying
from ortgpu.running.pinned import PinnedMemory
from ortgpu.running.plain_runs import PlainRunner
from tests.programs.on_cpu import NEG, feeds, model, outcome, report
from tests.programs.staged import MIB, Noting, big, is_pinned, ran, runtime, same, stage, staged, stub


def results_are_those_of_run() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from ortgpu.model.tensor_types import DTYPES

    KINDS = [name[len("tensor(") : -1] for name in DTYPES]
    plain = {
        kind: GPUSession(
            model(
                f"t ({kind}[a, b] x, int64[n] i, float z) => ({kind}[b, a] y, {kind}[a, b] same, int64[n] j, float w)"
                " { y = Transpose(x) same = Identity(x) j = Add(i, i) w = Neg(z) }"
            )
        )
        for kind in KINDS
    }
    shapes = st.tuples(st.integers(0, 60), st.integers(0, 60))
    orders = st.sampled_from(["C", "F", "gaps", "backwards", "readonly", "pinned"])
    outputs = st.sampled_from([None, [], ["y"], ["w", "same"], ("j", "y", "w", "same"), ["y", "y"]])

    @settings(max_examples=250, deadline=None, database=None)
    @given(
        st.sampled_from(KINDS),
        shapes,
        st.integers(0, 300),
        orders,
        outputs,
        st.integers(0, 2**32),
        st.sampled_from([1, 64, 5000]),
        st.integers(1, 5),
        st.sampled_from([8, 100, 4096]),
        st.sampled_from([64 * MIB, 1 << 17]),
    )
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


def small_arrays_go_straight_through() -> None:
    session = staged(NEG, staged_from=1000)
    small, large = session.run(None, feeds(1, 249)[0]), session.run(None, feeds(1, 250)[0])
    report([ran, len(small), len(large)])


def outputs_that_are_always_large_are_staged_whatever_the_inputs_are() -> None:
    grow = model("t (float[1] x) => (float[500] y) <int64[1] shape = {500}> { y = Expand(x, shape) }")
    session = staged(grow, staged_from=2000)
    (result,) = session.run(None, feeds(3, 1)[2])
    smaller = staged(grow, staged_from=2001)
    (other,) = smaller.run(None, feeds(3, 1)[2])
    report([ran, result.tolist() == other.tolist() == [2] * 500])


def outputs_of_unknown_size_are_staged_once_they_were_seen_to_be_large() -> None:
    grow = model(
        "t (float[n] x) => (float[m] y) { hundred = Constant <value = int64[1] {100}> () y = Tile(x, hundred) }"
    )
    session = staged(grow, staged_from=2000)

    def run(count):
        ran.clear()
        (result,) = session.run(None, feeds(3, count)[2])
        return [len(result) == 100 * count and bool((result == 2).all()), *ran]

    report([run(count) for count in (2, 2, 4, 5, 5, 6, 4, 5, 0, 400)])


def a_run_for_a_small_output_says_nothing_of_the_others() -> None:
    session = staged(
        model(
            "t (float[n] x) => (float[m] large, float[n] small) { "
            "hundred = Constant <value = int64[1] {100}> () "
            "large = Tile(x, hundred) small = Neg(x) }"
        ),
        staged_from=2000,
    )

    def run(*names):
        ran.clear()
        results = session.run(list(names), feeds(3, 5)[2])
        return [[len(each) for each in results], *ran]

    report([run("small"), run("small"), run("large"), run("large"), run("small", "large")])


def threads_copy_smaller_arrays_beside_a_large_one_too() -> None:
    from ortgpu.running import staging

    session = staged(
        model(
            "t (float[n] x, float[m] w) => (float[k] y, float[m] z) { "
            "six = Constant <value = int64[1] {6}> () y = Tile(x, six) z = Neg(w) }"
        )
    )
    session._gpu_runner = Noting(session)  # with the sizes and pieces that users get
    staging.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
    copied, plain = [], copying.ParallelCopy.copy

    def copy(self, to, source, size):
        copied.append(size / MIB)
        plain(self, to, source, size)

    copying.ParallelCopy.copy = copy
    feed = {"x": np.arange(MIB // 2, dtype=np.float32), "w": np.ones(MIB // 4, np.float32)}
    runs = [session.run(None, feed) for _ in range(3)]
    report([all((y == np.tile(feed["x"], 6)).all() and (z == -1).all() for y, z in runs), copied, ran])


def wrong_calls_raise_what_run_raises() -> None:
    session, plain = staged(NEG), GPUSession(NEG)
    right = big(1)
    wrong = [
        {"x": np.zeros((200, 200), np.float32)},
        {"x": np.zeros(400)},
        {"z": right["x"]},
        {},
        {**right, "z": right["x"]},
        {"x": None},
        {"x": object()},
        {"x": ["a"] * 100},
        {"x": np.array(["a"] * 99)},
        {"x": [1.0] * 400, "y": right["x"]},
        {"x": np.zeros(500, ">i8")},
        [right],
        None,
    ]
    calls = [(None, feed) for feed in wrong] + [(names, right) for names in (["nothing"], "y", [1], 5, [None])]
    text = lambda each: {key: value.split("Invoked with")[0] for key, value in each.items()}
    report(
        [[text(outcome(lambda: each.run(*call))) for call in calls] for each in (session, plain)]
        + [session.run(None, right)[0][0].item(), session._pinned.bytes_in_use, ran[-1]]
    )


def a_failing_model_raises_what_run_raises() -> None:
    gather = model("t (float[n] x, int64[m] i) => (float[m] y) { y = Gather(x, i) }")
    session, plain = staged(gather), GPUSession(gather)
    feed = {**big(1), "i": np.array([0, 10**6])}
    report([outcome(lambda: each.run(None, feed)) for each in (session, plain)] + [ran])


def other_values_in_a_feed() -> None:
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


def an_array_that_copies_in_its_own_way_is_taken_as_it_is() -> None:
    class Percent(np.ndarray):
        def __array_function__(self, function, types, arguments, options):
            if function is np.copyto:
                return np.copyto(arguments[0], np.asarray(arguments[1]) / 100)  # as astropy's
            raise TypeError(function.__name__)

    x = np.arange(100_000, dtype=np.float32).view(Percent)
    session = staged(NEG)
    report([[bool((session.run(None, {"x": each})[0] == -np.asarray(each)).all()) for each in (x, x[::2])], ran])


def outputs_and_inputs_that_are_on_the_cpu_stay_there() -> None:
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


def a_generator_that_fills_one_array_again() -> None:
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
