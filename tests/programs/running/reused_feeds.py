"""Programs of ``tests/running/test_reused_feeds.py``."""

from __future__ import annotations

import array as c_array
import tempfile
import time
import types
import zlib

import numpy as np
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, OrtValue

import ortgpu
from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, model, report, threads

# A kind of feed is a generator that is made anew for each way to run it. Its model takes what it gives.

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
            return f"number {self.number}"  # type: ignore[attr-defined]  # set here, or of the type that it is

    one, array = Written(), np.empty(2, object)
    array[:] = [one, one]
    for number in range(FEEDS):
        one.number = number  # type: ignore[attr-defined]  # set here, or of the type that it is
        yield {"x": array}


@kind(SEQUENCE)
def sequence():
    one, two = np.zeros(3, np.float32), np.zeros(LARGE, np.float32)
    parts = [one, two]
    for number in range(FEEDS):
        one[...], two[...] = number, -number
        parts[:] = [one, two, one][: 2 + number % 2]
        yield {"x": parts}


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
    ways = {
        "map": lambda: mapped(session, given()),
        "pool.map": lambda: mapped(pool, given()),
        "submit": lambda: submitted(pool, given()),
    }
    return [way for way, taken in ways.items() if taken() != expected]


def every_kind_of_feed_on_the_cpu() -> None:
    late()
    wrong = {}
    for name, (taking, given) in kinds.items():
        session, pool = GPUSession(taking), ortgpu.GPUSessionPool(taking)
        wrong[name] = differing(session, pool, given)
        pool.close()
    report([len(wrong), {name: ways for name, ways in wrong.items() if ways}, threads()])


def lists_and_tuples_are_not_copied() -> None:
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
    report(
        [[copied(each, made(given)) for made in (list, tuple, Own, iter)] for each in ways]
        + [[copied(each, iter(given), in_flight=1) for each in ways]]
    )


def what_cannot_be_copied_is_run_before_the_next_is_asked_for() -> None:
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
