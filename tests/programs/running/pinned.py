"""Programs of ``tests/running/test_pinned.py``."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading

import numpy as np

from ortgpu import GPUSession
from ortgpu.running.pinned import PinnedMemory
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, model, outcome, report, stub_runtime, threads

runtime, stub = stub_runtime(sys.argv[1])
MIB = 1 << 20


def an_array_is_pinned_and_its_memory_used_again() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    array = memory.empty((256, 1024), np.float32)
    array[:] = 1
    view = array[3:5].T
    address = array.__array_interface__["data"][0]
    pinned = runtime.is_pinned(address), runtime.is_pinned(np.ones(9).__array_interface__["data"][0])
    del array
    held = memory.bytes_in_use
    del view
    free = memory.bytes_in_use
    again = memory.empty(1 << 19, np.uint16)
    report(
        [
            pinned,
            held,
            free,
            again.__array_interface__["data"][0] == address,
            again.flags.writeable,
            stub.stub_allocations(),
            stub.stub_pinned_bytes() == memory.bytes_held,
        ]
    )


def types_with_a_shape_or_fields_are_those_of_numpy() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    kinds = [("f4", 3), (("f4", 3), (2, 1)), [("a", "u1"), ("b", "f8", 2)], ([("a", "i4", 2)], 4), "U3", "M8[s]"]
    same = []
    for kind in map(np.dtype, kinds):
        for shape in (4, (2, 3), ()):
            ours, plain = memory.empty(shape, kind), np.empty(shape, kind)
            ours[...] = plain[...] = np.zeros((), kind)
            kept = memory.try_empty(plain.shape, plain.dtype)
            same.append(
                [
                    (each.shape, each.dtype) == (plain.shape, plain.dtype)
                    and memory.is_pinned(each)
                    and each.flags.writeable
                    for each in (ours, kept)
                ]
                + [ours.tobytes() == plain.tobytes()]
            )
    fields = np.zeros(MIB // 8, [("a", "i4"), ("b", "f4")])
    fields["b"] = 2
    staged = memory.staged({"x": fields})["x"]
    report([same, memory.is_pinned(staged), bool((staged == fields).all())])


def an_interrupt_while_memory_is_pinned_leaves_it_for_the_next() -> None:
    memory, plain = PinnedMemory(runtime, 8 * MIB), runtime._library.cudaHostAlloc

    def pin(*arguments):
        plain(*arguments)
        raise KeyboardInterrupt

    runtime._library.cudaHostAlloc = pin
    try:
        memory.empty(MIB, np.uint8)
    except KeyboardInterrupt:
        left = stub.stub_pinned_bytes(), memory.bytes_held, memory.bytes_in_use
    runtime._library.cudaHostAlloc = plain
    report([left, memory.is_pinned(memory.empty(MIB, np.uint8)), stub.stub_allocations(), stub.stub_capture_mode()])


def an_interrupt_anywhere_loses_no_memory() -> None:
    import weakref

    from ortgpu.running import cudart, pinned

    memory, places, lost = PinnedMemory(runtime, 4 * MIB), set(), []
    files = {module.__file__ for module in (cudart, pinned, weakref)}

    def interrupt(frame, event, argument):
        code, caller = frame.f_code, frame.f_back and frame.f_back.f_code
        if event not in ("call", "c_return") or code.co_filename not in files:
            return
        if not {code.co_name, caller.co_name} & {"_release", "_free", "_free_blocks", "free_pinned"}:
            place = event, frame.f_lineno, code, caller, getattr(argument, "__name__", None)
            if place not in places:  # each one once
                sys.setprofile(None)
                places.add(place)
                raise KeyboardInterrupt

    def use():
        for size in (MIB, MIB, 4 * MIB):
            array = memory.empty(size, np.uint8)
            del array

    sys.unraisablehook = lambda _: None  # of what is called at the end of an array
    before = -1
    while before < len(places):
        before = len(places)
        sys.setprofile(interrupt)
        try:
            use()
        except KeyboardInterrupt:
            pass
        sys.setprofile(None)
        if memory.bytes_in_use or stub.stub_pinned_bytes() != memory.bytes_held:
            lost.append([memory.bytes_in_use, stub.stub_pinned_bytes(), memory.bytes_held])
    report([lost[:3], len(places) > 20, memory.is_pinned(memory.empty(4 * MIB, np.uint8))])


def the_limit_counts_what_is_used_and_what_is_kept() -> None:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    messages = []
    logging.getLogger("ortgpu").addFilter(lambda record: messages.append(record.getMessage()) or True)
    memory = PinnedMemory(runtime, 4 * MIB)
    one, two = memory.empty(3 * MIB, np.uint8), memory.empty(2 * MIB, np.uint8)
    beyond = [runtime.is_pinned(each.__array_interface__["data"][0]) for each in (one, two)]
    most = stub.stub_pinned_bytes()
    del one
    small = [memory.empty(MIB // 2, np.uint8) for _ in range(4)]  # the 3 MiB that are kept must make room
    report([beyond, most, stub.stub_pinned_bytes() <= 4 * MIB, memory.bytes_in_use, messages])


def closing_gives_back_what_is_kept_and_later_what_is_used() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    kept, used = memory.empty(MIB, np.uint8), memory.empty(2 * MIB, np.uint8)
    used[:] = 7
    del kept
    memory.close()
    memory.close()
    after = stub.stub_pinned_bytes()
    intact = bool((used == 7).all())
    ordinary = runtime.is_pinned(memory.empty(MIB, np.uint8).__array_interface__["data"][0])
    del used
    report([after, intact, ordinary, stub.stub_pinned_bytes(), stub.stub_last_error()])


def a_session_that_is_dropped_gives_it_back() -> None:
    session = GPUSession(NEG)
    session._pinned = PinnedMemory(runtime, 8 * MIB)
    session.pinned_empty(MIB, np.uint8)
    before = stub.stub_pinned_bytes()
    del session
    gc.collect()
    report([before, stub.stub_pinned_bytes()])


def a_session_that_is_constructed_again_gives_it_back() -> None:
    session = GPUSession(NEG)
    memory = session._pinned = PinnedMemory(runtime, 8 * MIB)
    session.pinned_empty(MIB, np.uint8)
    kept = session.pinned_empty(2 * MIB, np.uint8)
    before = stub.stub_pinned_bytes()
    session.__init__(NEG)
    report([before, stub.stub_pinned_bytes()])


def a_session_that_cannot_be_opened_again_keeps_it() -> None:
    session = GPUSession(NEG)
    memory = session._pinned = PinnedMemory(runtime, 8 * MIB)
    session.pinned_empty(MIB, np.uint8)
    os.environ.pop("ORTGPU_ALLOW_CPU")
    raised = "type" in outcome(lambda: session.set_providers(["CUDAExecutionProvider"]))
    kept = stub.stub_pinned_bytes()
    again = session.pinned_empty(MIB, np.uint8)
    report([raised, session._pinned is memory, kept, stub.stub_pinned_bytes()])


def what_cannot_be_pinned_is_ordinary_memory_and_leaves_no_error_behind() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    stub.stub_fail(2)
    array = memory.empty((3, 5), np.int64)
    array[:] = 1
    failed = runtime.is_pinned(array.__array_interface__["data"][0])
    error = stub.stub_last_error()
    stub.stub_fail(0)
    report([failed, array.sum().item(), error, runtime.is_pinned(memory.empty(3).__array_interface__["data"][0])])


def shapes_and_types() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    made = [
        memory.empty(*each)
        for each in ((0, "f4"), ((), "f8"), ((2, 0, 3), "i1"), (5, "f2"), ((1, 2, 3), "c8"), ((4,), "U3"), (3,))
    ]
    report(
        [
            [each.shape for each in made],
            [each.dtype.str for each in made],
            outcome(lambda: memory.empty(3, object)),
            outcome(lambda: memory.empty(-1)),
        ]
    )


def shapes_as_numpy_takes_them() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)

    def shape_of(made):
        return outcome(lambda: list(made().shape))

    given = (np.int64(3), np.array([2, 3]), [np.int32(2), 3], (), 0, 1.5, "3", None, -1, (-1, -2), (2**40, 2**40))
    report([[shape_of(lambda: memory.empty(each)), shape_of(lambda: np.empty(each, np.float32))] for each in given])


def a_map_stages_large_arrays_in_few_blocks_and_gives_the_results_of_run() -> None:
    session = GPUSession(NEG)
    session._pinned = PinnedMemory(runtime, 64 * MIB)
    given = [{"x": np.random.default_rng(n).standard_normal(500_000, np.float32)} for n in range(30)]
    given[3] = {"x": np.arange(1_000_000, dtype=np.float32)[::2]}  # with gaps
    given[4] = {"x": session.pinned_empty(500_000)}
    given[4]["x"][:] = 4
    given[5] = feeds(6)[5]  # small
    right = [bool((result[0] == -feed["x"]).all()) for feed, result in zip(given, session.map(given))]
    del given
    blocks, left = stub.stub_allocations(), session._pinned.bytes_in_use
    session.close()
    report([all(right), len(right), blocks, left, stub.stub_pinned_bytes()])


def a_result_is_not_the_memory_of_its_feed() -> None:
    session = GPUSession(
        model("""through (float[n] x) => (float[n] y, float[n] z) <int64[1] s = {-1}> {
    y = Identity(x)
    z = Reshape(x, s)
}""")
    )
    session._pinned = PinnedMemory(runtime, 64 * MIB)
    given = [{"x": np.full(500_000, n, np.float32)} for n in range(30)]
    results = list(session.map(given))
    report([all((each == n).all() for each in result) for n, result in enumerate(results)])


def an_array_that_copies_in_its_own_way_is_taken_as_it_is() -> None:
    class Percent(np.ndarray):
        def __array_function__(self, function, types, arguments, options):
            raise TypeError(function.__name__)

    session = GPUSession(NEG)
    session._pinned = PinnedMemory(runtime, 64 * MIB)
    x = np.arange(100_000, dtype=np.float32).view(Percent)
    [[mapped]] = session.map([{"x": x}])
    report([bool((mapped == session.run(None, {"x": x})[0]).all()), stub.stub_allocations()])


def a_map_beyond_the_limit_works_without() -> None:
    session = GPUSession(NEG)
    session._pinned = PinnedMemory(runtime, MIB)
    given = [{"x": np.full(500_000, n, np.float32)} for n in range(9)]
    report([[int(result[0][-1]) for result in session.map(given)], stub.stub_allocations()])


def a_map_that_is_ended_early_holds_no_pinned_memory() -> None:
    session = GPUSession(NEG)
    session._pinned = PinnedMemory(runtime, 64 * MIB)
    results = session.map([{"x": np.zeros(500_000, np.float32)}] * 100)
    next(results)
    results.close()  # type: ignore[attr-defined]  # set here, or of the type that it is
    report([session._pinned.bytes_in_use, threads()])


def memory_that_was_lost_keeps_no_ordinary_memory_for_results() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    kept, used = (memory.ordinary.empty((size,), np.dtype(np.uint8)) for size in (MIB, 2 * MIB))
    used[:] = 7
    del kept
    memory.abandon()
    left = memory.ordinary.bytes_held
    report([left, bool((used == 7).all()), memory.is_pinned(memory.empty(9))])


def any_order_of_taking_and_giving_back() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 600_000)))

    @settings(max_examples=150, deadline=None, database=None)
    @given(steps, st.integers(0, 12).map(lambda number: number << 18))
    def check(steps, limit):
        memory, arrays = PinnedMemory(runtime, limit), {}
        for number, (slot, size) in enumerate(steps):
            arrays.pop(slot, None)
            if size % 3:
                arrays[slot] = number % 251, memory.empty(size, np.uint8)
                arrays[slot][1][:] = number % 251
            assert stub.stub_pinned_bytes() == memory.bytes_held <= limit
            assert all((array == value).all() for value, array in arrays.values())
        memory.close()
        assert stub.stub_pinned_bytes() == memory.bytes_in_use
        arrays.clear()
        assert stub.stub_pinned_bytes() == memory.bytes_in_use == 0

    check()
    report(stub.stub_last_error())


def the_current_device_is_that_of_the_session_while_memory_is_taken() -> None:
    from ortgpu.running import cudart

    current = lambda: [stub.cudaGetDevice(ctypes.byref(number)), number.value][1]
    import ctypes

    number = ctypes.c_int()
    second, found, address = cudart.CudaRuntime(sys.argv[1], 1), [], ctypes.c_void_p()
    for has_context in (True, False):
        cudart.context_is_active = lambda ordinal: has_context  # type: ignore[attr-defined]  # its name in there
        stub.cudaSetDevice(0)
        second.allocate_pinned(4096, address)
        second.free_pinned(address.value)
        found.append(current())
    report(found)


def a_forked_child_frees_nothing_and_pins_nothing() -> None:
    memory = PinnedMemory(runtime, 8 * MIB)
    kept, used = memory.empty(MIB, np.uint8), memory.empty(MIB, np.uint8)
    del kept
    closed = PinnedMemory(runtime, 8 * MIB)
    last = closed.empty(MIB, np.uint8)
    closed.close()
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        array = memory.empty(MIB, np.uint8)
        ordinary = runtime.is_pinned(array.__array_interface__["data"][0])
        del used, last
        memory.close()
        os.write(write, json.dumps([ordinary, stub.stub_pinned_bytes()]).encode())
        os._exit(0)
    os.wait()
    report([json.loads(os.read(read, 1000)), stub.stub_pinned_bytes()])


def threads_share_it() -> None:
    memory = PinnedMemory(runtime, 3 * MIB)
    wrong, most = [], []

    def work(number):
        for step in range(200):
            array = memory.empty(MIB // (1 + (number + step) % 4), np.uint8)
            array[:] = number
            if (array != number).any():
                wrong.append(number)
            most.append(memory.bytes_held)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    memory.close()
    report([wrong, max(most) <= 3 * MIB, memory.bytes_in_use, stub.stub_pinned_bytes()])
