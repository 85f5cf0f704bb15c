"""Programs of ``tests/running/test_graph_buffers.py``."""

from __future__ import annotations

import gc
import os
import sys
import threading

import numpy as np

import ortgpu
from ortgpu.running.cuda_graph import MAX_SHAPES
from tests.programs.on_cpu import NEG, feeds, model, outcome, report
from tests.programs.with_graphs import bound, capturing, stub

PAIR = model("""pair (float[n, 2] x, float[m] w) => (float[n, 2] y, float[m] z, int64[2] s) {
    y = Neg(x)
    z = Neg(w)
    s = Shape(x)
}""")
SMALL, LARGE, HUGE = 65536, 65537, 1 << 19  # floats: 256 KiB, more, and 2 MiB, which threads copy


def right(session, value, rows, size, names=None):
    feed = {"x": np.full((rows, 2), value, np.float32), "w": np.full(size, value + 1, np.float32)}
    found = session.run(names, feed)
    feed["x"][:] = feed["w"][:] = 99
    expected = {"y": np.full((rows, 2), -value), "z": np.full(size, -value - 1), "s": np.array([rows, 2])}
    names = names or list(expected)
    return len(found) == len(names) and all(
        type(each) is np.ndarray
        and each.flags.writeable
        and each.shape == expected[name].shape
        and bool((each == expected[name]).all())
        for name, each in zip(names, found)
    )


def what_is_computed_on_the_cpu_is_the_callers_own_too() -> None:
    session = capturing(PAIR)
    session._gpu_runner.graphs._on_cpu = frozenset({"s"})
    found = []
    for value in range(4):
        found.append(right(session, value, 3, 5))
        session.run(["s"], {"x": np.ones((3, 2), np.float32), "w": np.ones(5, np.float32)})[0][:] = 7
    report([found, stub.stub_device_bytes()])


def small_arrays_of_all_graphs_are_given_back_with_their_graphs() -> None:
    session = capturing(NEG)
    for size in range(1, MAX_SHAPES + 9):
        session.run(None, feeds(1, size)[0])
    full = session._pinned.bytes_in_use, session._pinned.bytes_held
    del session
    gc.collect()
    report([full, stub.stub_pinned_bytes()])


def results_are_not_overwritten_by_later_runs_of_any_thread() -> None:
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


def a_tracer_sees_each_run_of_a_session_that_is_captured_after_it_came() -> None:
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


def large_arrays_in_any_order_of_memory_and_pinned_ones() -> None:
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


def where_no_thread_can_be_started_one_copies() -> None:
    from ortgpu.running import copying

    def full(threads):
        raise RuntimeError("can't start new thread")

    copying._check_that_there_can_be = full
    session = capturing(PAIR)
    report([[right(session, value, 3, HUGE) for value in range(3)], type(session._sess._copier._copies).__name__])


def threads_that_copy_end_with_the_session() -> None:
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


def out_of_pinned_memory_the_copies_are_the_ordinary_ones() -> None:
    session = capturing(PAIR)
    os.environ["STUB_CUDART_FAIL"] = "cudaHostAlloc=2"
    found = [right(session, value, 3, size) for value in range(3) for size in (5, HUGE)]
    del os.environ["STUB_CUDART_FAIL"]
    found += [right(session, value, 3, 6) for value in range(3)]
    report([all(found), stub.stub_pinned_bytes(), stub.stub_last_error()])


def a_session_that_refuses_replays_nothing() -> None:
    import dataclasses

    from ortgpu.provider import lifetime

    session = capturing(NEG)
    session.device = dataclasses.replace(session.device, kind="cuda")
    session.run(None, feeds(1)[0])
    lifetime.noted(ortgpu.PoisonedContextError("lost", fixes=[]))
    report([outcome(lambda: session.run(None, feeds(1)[0]))["type"], len(bound)])


def the_memory_of_a_large_result_is_used_again_once_the_caller_has_dropped_it() -> None:
    session, size = capturing(PAIR, limit=1 << int(sys.argv[3])), {"LARGE": LARGE, "HUGE": HUGE}[sys.argv[2]]

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


def small_and_large_arrays_in_one_graph() -> None:
    session, found = capturing(PAIR, limit=int(sys.argv[2])), []
    for round in range(6):
        for rows, size in ((1, 1), (1, LARGE), (SMALL // 2, SMALL), (LARGE, 3), (LARGE, LARGE), (HUGE, HUGE)):
            for names in (None, ["z"], ["s", "z"], ["y", "y"]):
                found.append(right(session, len(found), rows, size, names))
    pinned, threads_copy = stub.stub_pinned_bytes(), "_copier" in vars(session._sess)
    session.close()
    report([len(found), all(found), threads_copy, pinned, stub.stub_pinned_bytes(), stub.stub_device_bytes()])
