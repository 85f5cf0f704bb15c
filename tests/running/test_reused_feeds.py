"""Generators that fill one array again for each feed: ``map``, ``pool.map`` and ``submit`` give what ``run`` gives."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.cpu_session import child

pytestmark = pytest.mark.lab

# A kind of feed is a generator that is made anew for each way to run it. Its model takes what it gives.
KINDS = """
import array as c_array, collections, tempfile, types, zlib
import onnxruntime
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, OrtValue

NEG2 = model("neg (float[n, m] x) => (float[n, m] y) { y = Neg(x) }")
SUB = model("sub (float[n] x, float[n] w) => (float[n] y) { y = Sub(x, w) }")
ADD = model("add (float[n] x, float[m, n] w) => (float[m, n] y) { y = Add(x, w) }")
SCALAR = model("neg (float x) => (float y) { y = Neg(x) }")
THROUGH = model("through (float[n] x) => (float[n] y) { y = Identity(x) }")
NOT = model("t (bool[n] x) => (bool[n] y) { y = Not(x) }")
TEXT = model("text (string[n] x) => (string[n] y) { y = Identity(x) }")
SEQUENCE = model("t (seq(float[n]) x) => (float[n] y) { y = ConcatFromSequence<axis = 0>(x) }")
FEEDS = 9
LARGE = 20_000  # from where on memory is pinned
kinds = {}

def kind(taking):
    def add(function):
        kinds[function.__name__] = taking, function
    return add

class Foreign:
    def __init__(self, array):
        self.array = array
    def __dlpack_device__(self):
        return 1, 0
    def __dlpack__(self, **arguments):
        return self.array.__dlpack__()

def refilled(array, shown=lambda array: array):
    for number in range(FEEDS):
        array[...] = number
        yield {"x": shown(array)}

def of_array(name, taking, size, shown=lambda array: array):
    kinds[name] = taking, lambda: refilled(np.empty(size, np.float32), shown)

class Quantity(np.ndarray):
    def __array_function__(self, function, types, arguments, options):
        raise TypeError(function.__name__)

def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view

of_array("small", NEG, 4)
of_array("large", NEG, LARGE)
of_array("handed through", THROUGH, LARGE)
of_array("view", NEG, 2 * LARGE, lambda array: array[LARGE:])
of_array("gaps", NEG, 2 * LARGE, lambda array: array[::2])
of_array("backwards", NEG, LARGE, lambda array: array[::-1])
of_array("read-only", NEG, LARGE, read_only)
of_array("subclass", NEG, LARGE, lambda array: array.view(Quantity))
of_array("masked", NEG, LARGE, lambda array: np.ma.masked_less(array, 3))
of_array("transposed", NEG2, (300, 500), lambda array: array.T)
of_array("transposed, gaps", NEG2, (300, 500), lambda array: array.T[1:])
of_array("broadcast", NEG2, LARGE, lambda array: np.broadcast_to(array, (3, LARGE)))
of_array("no dimension", SCALAR, ())
of_array("empty", NEG, 0)
of_array("empty, two dimensions", NEG2, (0, 3))
of_array("other library", NEG, LARGE, Foreign)
of_array("other library, transposed", NEG2, (300, 500), lambda array: Foreign(array.T))
of_array("value", NEG, LARGE, OrtValue.ortvalue_from_numpy)
of_array("list of lists", NEG2, (2, 3), lambda array: array.tolist())
of_array("number", SCALAR, (), float)
of_array("number of NumPy", SCALAR, (), lambda array: array[()])

@kind(NEG)
def value_updated():
    value = OrtValue.ortvalue_from_numpy(np.zeros(LARGE, np.float32))
    for number in range(FEEDS):
        value.update_inplace(np.full(LARGE, number, np.float32))
        yield {"x": value}

@kind(SUB)
def overlapping():
    array = np.zeros(LARGE + 1, np.float32)
    for number in range(FEEDS):
        array[...] = np.arange(LARGE + 1) * number
        yield {"x": array[1:], "w": array[:-1]}

@kind(SUB)
def one_array_twice():
    array, feed = np.zeros(LARGE, np.float32), {}
    for number in range(FEEDS):
        array[...] = number
        feed.update(x=array, w=array)
        yield feed

@kind(SUB)
def mixed():
    array, value = np.zeros(LARGE, np.float32), OrtValue.ortvalue_from_numpy(np.zeros(LARGE, np.float32))
    for number in range(FEEDS):
        array[...] = number
        value.update_inplace(array * 3)
        yield {"x": array, "w": value}

@kind(NEG)
def numbers():
    given = [0.0] * 50
    for number in range(FEEDS):
        given[:] = [number] * 50
        yield {"x": given}

@kind(NEG)
def mapping():
    array = np.zeros(LARGE, np.float32)
    for number in range(FEEDS):
        array[...] = number
        yield types.MappingProxyType({"x": array})

@kind(NEG)
def file():
    with tempfile.TemporaryFile() as opened:
        array = np.memmap(opened, np.float32, "w+", shape=LARGE)
        for number in range(FEEDS):
            array[...] = number
            yield {"x": array}

@kind(NEG)
def bytes_of_another():
    memory = bytearray(4 * LARGE)
    for number in range(FEEDS):
        memory[:] = np.full(LARGE, number, np.float32).tobytes()
        yield {"x": np.frombuffer(memory, np.float32)}

@kind(NEG)
def what_run_refuses():
    given = c_array.array("f", [0.0] * 9)
    for number in range(FEEDS):
        given[0] = number
        yield {"x": given}

@kind(NEG)
def wrong_in_the_middle():
    array = np.zeros(LARGE, np.float32)
    for number in range(FEEDS):
        array[...] = number
        yield {"x": array.reshape(-1, 2) if number == 5 else array}

@kind(NEG)
def no_input_in_the_middle():
    array, feed = np.zeros(LARGE, np.float32), {}
    for number in range(FEEDS):
        array[...] = number
        feed["x"] = array
        yield {} if number == 5 else feed

@kind(NOT)
def booleans():
    array = np.zeros(LARGE, bool)
    for number in range(FEEDS):
        array[number::3] ^= True
        yield {"x": array}

@kind(TEXT)
def text():
    array = np.array([""] * 5, object)
    for number in range(FEEDS):
        array[:] = [f"{number}-{each}" for each in range(5)]
        yield {"x": array}

@kind(TEXT)
def text_of_fixed_width():
    array = np.array([" " * 9] * 5)
    for number in range(FEEDS):
        array[:] = [f"{number}-{each}" for each in range(5)]
        yield {"x": array}

@kind(TEXT)
def text_of_objects():
    class Written:
        def __str__(self):
            return f"number {self.number}"
    one, array = Written(), np.empty(2, object)
    array[:] = [one, one]
    for number in range(FEEDS):
        one.number = number
        yield {"x": array}

@kind(SEQUENCE)
def sequence():
    one, two = np.zeros(3, np.float32), np.zeros(LARGE, np.float32)
    parts = [one, two]
    for number in range(FEEDS):
        one[...], two[...] = number, -number
        parts[:] = [one, two, one][: 2 + number % 2]
        yield {"x": parts}
"""

WAYS = """
def seen(value):
    if not isinstance(value, np.ndarray):
        return value
    return value.tolist() if value.dtype == object else (value.shape, value.dtype.str, zlib.crc32(value.tobytes()))

def noted(results):
    # Results, and the exception that ends them
    found = []
    try:
        for result in results:
            found.append([seen(each) for each in result])
    except Exception as error:
        found.append(type(error).__name__)
    return found

def looped(session, given):
    return noted(session.run(None, feed) for feed in given)

def mapped(each, given):
    return noted(each.map(given))

def submitted(pool, given):
    return noted(future.result() for future in [pool.submit(None, feed) for feed in given])

def late(seconds=0.004):
    # Whoever counts on a run to have begun is too early
    plain = InferenceSession.run
    def run(self, *given):
        time.sleep(seconds)
        return plain(self, *given)
    InferenceSession.run = run

def differing(session, pool, given):
    expected = looped(session, given())
    assert expected, "nothing to compare"
    ways = {"map": lambda: mapped(session, given()), "pool.map": lambda: mapped(pool, given()),
            "submit": lambda: submitted(pool, given())}
    return [way for way, taken in ways.items() if taken() != expected]
"""


# Those that follow are for memory that a stub of the CUDA runtime pins.
PINNED = """
from ortgpu.running.feed_copies import FeedCopies
from ortgpu.running.pinned import PinnedMemory
runtime, stub = stub_runtime(sys.argv[1])
MIB = 1 << 20
SIZE = MIB // 4  # of an array of 1 MiB

def is_pinned(array):
    return runtime.is_pinned(array.__array_interface__["data"][0])

def with_pinned(each, limit=64 * MIB):
    for session in getattr(each, "sessions", [each]):
        session._pinned = PinnedMemory(runtime, limit)
    return each

read = []  # whether each run read pinned memory
most = [0, 0]  # runs at a time, by now and at most

def watch(seconds=0.004):
    plain, lock = InferenceSession.run, threading.Lock()
    def run(self, *given):
        with lock:
            read.append(is_pinned(given[1]["x"]))
            most[0] += 1
            most[1] = max(most)
        time.sleep(seconds)
        try:
            return plain(self, *given)
        finally:
            with lock:
                most[0] -= 1
    InferenceSession.run = run

def counted(count, array):
    for number in range(count):
        array[...] = number
        yield {"x": array}

def last(results):
    return [int(result[0][-1]) for result in results]
"""


def reused(code: str, *arguments: str, deadline: float = 60) -> Any:
    return child(KINDS + WAYS + textwrap.dedent(code), *arguments, deadline=deadline)


def test_every_kind_of_feed_on_the_cpu() -> None:
    found = reused(
        """
        late()
        wrong = {}
        for name, (taking, given) in kinds.items():
            session, pool = GPUSession(taking), ortgpu.GPUSessionPool(taking)
            wrong[name] = differing(session, pool, given)
            pool.close()
        report([len(wrong), {name: ways for name, ways in wrong.items() if ways}, threads()])
        """,
        deadline=200,
    )
    assert found[0] > 30
    assert found[1:] == [{}, []]


@pytest.fixture
def with_stub(stubs: Stubs) -> Callable[..., Any]:
    return lambda code, deadline=60: reused(PINNED + textwrap.dedent(code), str(stubs.cudart), deadline=deadline)


@pytest.mark.parametrize("kind", ["GPUSession(NEG)", "ortgpu.GPUSessionPool(NEG)"])
def test_the_copy_is_in_pinned_memory_which_is_used_again(with_stub: Any, kind: str) -> None:
    """And no run copies it once more."""
    found = with_stub(f"""
        watch()
        each = with_pinned({kind})
        results = last(each.map(counted(60, np.zeros(SIZE, np.float32))))
        session = getattr(each, "sessions", [each])[0]
        report([results == [-n for n in range(60)], read.count(True), stub.stub_allocations() <= 8,
                session._pinned.bytes_in_use])
    """)
    assert found == [True, 60, True, 0]


def test_submit_waits_for_a_run_where_pinned_memory_is_full(with_stub: Any) -> None:
    """Not for one that was cancelled, nor in a callback of a future, where a run would wait for itself."""
    found = with_stub("""
        watch()
        pool = with_pinned(ortgpu.GPUSessionPool(NEG), 5 * MIB)
        requests = [pool.submit(None, feed) for feed in counted(30, np.zeros(SIZE, np.float32))]
        results = last(request.result() for request in requests)
        pinned = read.count(True), pool._service.feeds._copies._ordinary.bytes_held
        cancelled, more = 0, []
        for number, feed in enumerate(counted(60, np.zeros(SIZE, np.float32))):
            more.append(pool.submit(None, feed))
            cancelled += more[-1].cancel() if number % 3 else 0
        right = all(each.cancelled() or last([each.result()]) == [-n] for n, each in enumerate(more))
        asked = []
        for feed in counted(4, np.zeros(SIZE, np.float32)):
            pool.submit(None, feed).add_done_callback(
                lambda done: asked.append(pool.submit(None, {"x": done.result()[0]})))
        while len(asked) < 4:
            time.sleep(0.01)
        again = sorted(last(each.result() for each in asked))
        report([results == [-n for n in range(30)], pinned, right, cancelled > 0, again,
                pool.sessions[0]._pinned.bytes_in_use])
    """)
    assert found == [True, [30, 0], True, True, [0, 1, 2, 3], 0]


def test_submit_copies_to_pinned_memory(with_stub: Any) -> None:
    found = with_stub("""
        watch()
        pool = with_pinned(ortgpu.GPUSessionPool(NEG))
        requests = [pool.submit(None, feed) for feed in counted(30, np.zeros(SIZE, np.float32))]
        results = last(request.result() for request in requests)
        report([results == [-n for n in range(30)], read.count(True), pool.sessions[0]._pinned.bytes_in_use])
    """)
    assert found == [True, 30, 0]


@pytest.mark.parametrize("kind", ["GPUSession(NEG)", "ortgpu.GPUSessionPool(NEG)"])
def test_a_full_memory_is_waited_for(with_stub: Any, kind: str) -> None:
    """Copies have half of it: results need some as well."""
    found = with_stub(f"""
        watch()
        each = with_pinned({kind}, 5 * MIB)
        results, pinned = [], []
        for result in each.map(counted(30, np.zeros(SIZE, np.float32))):
            results.append(result)
            pinned.append(stub.stub_pinned_bytes())
        report([last(results) == [-n for n in range(30)], read.count(True), max(pinned), most[1]])
    """)
    assert found == [True, 30, 2 << 20, 2]


@pytest.mark.parametrize("limit", [0, 5])
def test_what_does_not_fit_is_copied_to_ordinary_memory_without_waiting(with_stub: Any, limit: int) -> None:
    """Where no memory is pinned, or the caller has all of it."""
    found = with_stub(f"""
        watch()
        session = with_pinned(GPUSession(NEG), {limit} * MIB)
        held = [session.pinned_empty(SIZE) for _ in range({limit})]
        results = last(session.map(counted(30, np.zeros(SIZE, np.float32))))
        report([results == [-n for n in range(30)], read.count(True), most[1] > 1])
    """)
    assert found == [True, 0, True]


def test_an_array_that_never_fits_is_not_waited_for(with_stub: Any) -> None:
    """The others of its feed fit, and are given back when runs end: waiting for that would leave one run at a time."""
    found = with_stub("""
        watch()
        session = with_pinned(GPUSession(ADD), 16 * MIB)
        def mixed():
            small, large = np.zeros(SIZE, np.float32), np.zeros((9, SIZE), np.float32)
            for number in range(20):
                small[...], large[...] = number, number
                yield {"x": small, "w": large}
        results = [int(result[0][-1, -1]) for result in session.map(mixed())]
        report([results == [2 * n for n in range(20)], read.count(True), most[1] > 1])
    """)
    assert found == [True, 20, True]


def test_a_feed_larger_than_the_memory(with_stub: Any) -> None:
    found = with_stub("""
        session = with_pinned(GPUSession(SUB), 3 * MIB)
        def two():
            one, other = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
            for number in range(12):
                one[...], other[...] = number, 3 * number
                yield {"x": one, "w": other}
        report([last(session.map(two())) == [-2 * n for n in range(12)], session._pinned.bytes_in_use])
    """)
    assert found == [True, 0]


@pytest.mark.parametrize(
    "end", ["results.close()", "del results", "outcome(lambda: list(results))", "interrupted(results)"]
)
def test_an_iteration_that_ends_early_gives_its_memory_back(with_stub: Any, end: str) -> None:
    found = with_stub(f"""
        session = with_pinned(GPUSession(NEG))
        def failing():
            array = np.zeros(SIZE, np.float32)
            yield from counted(20, array)
            raise (KeyboardInterrupt if {end!r}.startswith("interrupted") else OSError)
        def interrupted(results):
            try:
                list(results)
            except KeyboardInterrupt:
                pass
        results = session.map(failing())
        next(results)
        {end}
        gc.collect()
        before = session._pinned.bytes_in_use
        session.close()
        report([before, stub.stub_pinned_bytes(), threads()])
    """)
    assert found == [0, 0, []]


def test_lists_and_tuples_are_not_copied() -> None:
    """Nor is what is run before the next is asked for. A class of the caller's may do what a generator does."""
    found = reused("""
        addresses = []
        plain = InferenceSession.run
        def run(self, *given):
            addresses.append(given[1]["x"].__array_interface__["data"][0])
            return plain(self, *given)
        InferenceSession.run = run
        class Own(list):
            pass
        given = feeds(5, size=LARGE)
        own = {feed["x"].__array_interface__["data"][0] for feed in given}
        def copied(each, made, **arguments):
            addresses.clear()
            assert len(list(each.map(made, **arguments))) == 5
            return not own & set(addresses)
        ways = GPUSession(NEG), ortgpu.GPUSessionPool(NEG)
        report([[copied(each, made(given)) for made in (list, tuple, Own, iter)] for each in ways]
               + [[copied(each, iter(given), in_flight=1) for each in ways]])
    """)
    assert found == [[False, False, True, True]] * 2 + [[False, False]]


def test_what_cannot_be_copied_is_run_before_the_next_is_asked_for() -> None:
    found = reused("""
        ended, seen, plain = [], [], InferenceSession.run
        def run(self, *given):
            time.sleep(0.02)
            result = plain(self, *given)
            ended.append(given)
            return result
        InferenceSession.run = run
        class Unknown(list):  # numbers, of a class that ONNX Runtime takes and nobody else knows
            pass
        def taken():
            given = Unknown([0.0])
            for number in range(6):
                seen.append(len(ended))
                given[0] = number
                yield {"x": given}
            ended.clear()
        session, pool = GPUSession(NEG), ortgpu.GPUSessionPool(NEG)
        def submitted(given):
            return [request.result() for request in [pool.submit(None, feed) for feed in given]]
        ways = session.map, pool.map, submitted
        report([[int(result[0][-1]) for result in way(taken())] for way in ways] + [seen])
    """)
    assert found == [[-n for n in range(6)]] * 3 + [[*range(6)] * 3]


def test_a_value_that_cannot_be_copied_on_the_gpu_is_left_to_the_run(with_stub: Any) -> None:
    """Of a context that is lost, say: the run tells it by a typed error, and the copy raised CudaCallError."""
    found = with_stub("""
        import dataclasses
        from ortgpu.running import feed_copies
        session = GPUSession(NEG)
        session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0)
        session._provider_options = {"CUDAExecutionProvider": {}, "CPUExecutionProvider": {}}
        feed_copies.runtime_of = lambda device: runtime
        OrtValue.device_name = lambda self: "cuda"
        value = OrtValue.ortvalue_from_numpy(np.ones(4, np.float32))
        os.environ["STUB_CUDART_FAIL"] = "cudaPointerGetAttributes=700"
        report([y.tolist() for y, in session.map(iter([{"x": value}] * 3))])
    """)
    assert found == [[-1] * 4] * 3


def test_copies_of_any_array(with_stub: Any) -> None:
    """Large ones are copied in threads."""
    found = with_stub("""
        memory = PinnedMemory(runtime, 512 * MIB)
        copies = FeedCopies(lambda: [memory], 512 * MIB, 0)
        random, wrong = np.random.default_rng(0), []
        makers = {
            "plain": lambda array: array, "transposed": lambda array: array.T, "gaps": lambda array: array[:, ::2],
            "backwards": lambda array: array[::-1], "axes": lambda array: array.reshape(4, 10, -1).transpose(2, 0, 1),
            "fortran": np.asfortranarray, "bytes": lambda array: array.view(np.uint8)[3:],
        }
        for rows in (0, 40, 4000, 40_000):
            array = random.standard_normal((rows, 120), np.float32)
            for name, make in makers.items():
                given = make(array) if rows else array
                expected = given.tobytes()
                copied, is_whole = copies.of({"x": given})
                copy = copied["x"]
                array += 1
                if not is_whole or copy.tobytes() != expected or copy.shape != given.shape or copy.dtype != given.dtype:
                    wrong.append([rows, name])
                array -= 1
        report([wrong, copies._threads is not None])
    """)
    assert found == [[], True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["GPUSession", "ortgpu.GPUSessionPool"])
def test_any_feeds_of_a_generator_for_minutes(with_stub: Any, kind: str) -> None:
    """Arrays of any size and order, exchanged and filled again; limits that do not suffice; iterations that end
    anywhere."""
    found = with_stub(
        f"""
        late(0.001)
        numbers, rounds, wrong = np.random.default_rng(1), 0, []
        reference = GPUSession(SUB)
        ended = time.monotonic() + 270
        while time.monotonic() < ended:
            rounds += 1
            seed, limit = int(numbers.integers(1 << 30)), int(numbers.integers(0, 9)) * MIB
            each = with_pinned({kind}(SUB, pinned_memory_limit=limit), limit)
            def given():
                random = np.random.default_rng(seed)
                sizes = [int(random.choice([1, 5, 20_000, 200_000, 700_000])) for _ in range(3)]
                arrays = [np.zeros((2, size), np.float32) for size in sizes]
                values = [OrtValue.ortvalue_from_numpy(np.zeros(size, np.float32)) for size in sizes]
                feed = {{}}
                for number in range(int(random.integers(1, 40))):
                    place = int(random.integers(3))
                    array, value = arrays[place], values[place]
                    array += random.standard_normal(1, np.float32)
                    x, w = array[0], array[1]
                    shown = int(random.integers(6))
                    if shown == 0:
                        value.update_inplace(x + 1)
                        w = value
                    elif shown == 1:
                        x, w = x[::-1], Foreign(w)
                    elif shown == 2:
                        x, w = array.T[:, 0], np.broadcast_to(w[:1], w.shape)
                    elif shown == 3:
                        x, w = x[::3], w[1::3][: len(x[::3])]
                    elif shown == 4:
                        x = x[:9].tolist()
                        w = w[: len(x)]
                    feed["x"], feed["w"] = x, w
                    yield feed if shown != 5 else dict(feed)
            expected = noted(reference.run(None, feed) for feed in given())
            most = int(numbers.integers(1, 45))
            in_flight = int(numbers.integers(1, 9))
            results = each.map(given(), in_flight=in_flight)
            found = noted(itertools.islice(results, most))
            if found != expected[: len(found)] or len(found) < min(most, len(expected)):
                wrong.append([seed, limit, in_flight, len(found), len(expected)])
            results.close()
            if hasattr(each, "submit") and submitted(each, given()) != expected:
                wrong.append([seed, limit, "submit"])
            del results
            each.close()  # waits for requests after one that failed
            gc.collect()  # an error and the frames that it passed refer to each other
            if stub.stub_pinned_bytes():
                wrong.append([seed, limit, "pinned"])
        report([rounds > 20, wrong, threads()])
        """,
        deadline=400,
    )
    assert found == [True, [], []]
