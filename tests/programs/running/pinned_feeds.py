"""Programs of ``tests/running/test_reused_feeds.py``."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time

import numpy as np
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, OrtValue

import ortgpu
from ortgpu import GPUSession
from ortgpu.running.feed_copies import FeedCopies
from ortgpu.running.pinned import PinnedMemory
from tests.programs.on_cpu import NEG, report, stub_runtime, threads
from tests.programs.running.reused_feeds import ADD, SUB, Foreign, late, noted, submitted

# Those that follow are for memory that a stub of the CUDA runtime pins.
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


def submit_waits_for_a_run_where_pinned_memory_is_full() -> None:
    watch()
    pool = with_pinned(ortgpu.GPUSessionPool(NEG), 5 * MIB)
    requests = [pool.submit(None, feed) for feed in counted(30, np.zeros(SIZE, np.float32))]
    results = last(request.result() for request in requests)
    pinned = read.count(True), pool._service.feeds._memory._ordinary.bytes_held
    cancelled, more = 0, []
    for number, feed in enumerate(counted(60, np.zeros(SIZE, np.float32))):
        more.append(pool.submit(None, feed))
        cancelled += more[-1].cancel() if number % 3 else 0
    right = all(each.cancelled() or last([each.result()]) == [-n] for n, each in enumerate(more))
    asked = []
    for feed in counted(4, np.zeros(SIZE, np.float32)):
        pool.submit(None, feed).add_done_callback(lambda done: asked.append(pool.submit(None, {"x": done.result()[0]})))
    while len(asked) < 4:
        time.sleep(0.01)
    again = sorted(last(each.result() for each in asked))
    report(
        [results == [-n for n in range(30)], pinned, right, cancelled > 0, again, pool.sessions[0]._pinned.bytes_in_use]
    )


def submit_copies_to_pinned_memory() -> None:
    watch()
    pool = with_pinned(ortgpu.GPUSessionPool(NEG))
    requests = [pool.submit(None, feed) for feed in counted(30, np.zeros(SIZE, np.float32))]
    results = last(request.result() for request in requests)
    report([results == [-n for n in range(30)], read.count(True), pool.sessions[0]._pinned.bytes_in_use])


def an_array_that_never_fits_is_not_waited_for() -> None:
    watch(0.05)  # longer than a busy machine keeps a thread from its run
    session = with_pinned(GPUSession(ADD), 16 * MIB)

    def mixed():
        small, large = np.zeros(SIZE, np.float32), np.zeros((9, SIZE), np.float32)
        for number in range(20):
            small[...], large[...] = number, number
            yield {"x": small, "w": large}

    results = [int(result[0][-1, -1]) for result in session.map(mixed())]
    report([results == [2 * n for n in range(20)], read.count(True), most[1] > 1])


def a_feed_larger_than_the_memory() -> None:
    session = with_pinned(GPUSession(SUB), 3 * MIB)

    def two():
        one, other = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        for number in range(12):
            one[...], other[...] = number, 3 * number
            yield {"x": one, "w": other}

    report([last(session.map(two())) == [-2 * n for n in range(12)], session._pinned.bytes_in_use])


def a_value_that_cannot_be_copied_on_the_gpu_is_left_to_the_run() -> None:
    import dataclasses

    from ortgpu.running import feed_copies

    session = GPUSession(NEG)
    session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0)
    session._provider_options = {"CUDAExecutionProvider": {}, "CPUExecutionProvider": {}}
    feed_copies.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
    OrtValue.device_name = lambda self: "cuda"
    value = OrtValue.ortvalue_from_numpy(np.ones(4, np.float32))
    os.environ["STUB_CUDART_FAIL"] = "cudaPointerGetAttributes=700"
    report([y.tolist() for (y,) in session.map(iter([{"x": value}] * 3))])


def copies_of_any_array() -> None:
    memory = PinnedMemory(runtime, 512 * MIB)
    copies = FeedCopies(lambda: [memory], 512 * MIB, 0)
    random, wrong = np.random.default_rng(0), []
    makers = {
        "plain": lambda array: array,
        "transposed": lambda array: array.T,
        "gaps": lambda array: array[:, ::2],
        "backwards": lambda array: array[::-1],
        "axes": lambda array: array.reshape(4, 10, -1).transpose(2, 0, 1),
        "fortran": np.asfortranarray,
        "bytes": lambda array: array.view(np.uint8)[3:],
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


def any_feeds_of_a_generator_for_minutes() -> None:
    kind = {"GPUSession": GPUSession, "GPUSessionPool": ortgpu.GPUSessionPool}[sys.argv[2]]
    late(0.001)
    numbers, rounds, wrong = np.random.default_rng(1), 0, []
    reference = GPUSession(SUB)
    ended = time.monotonic() + 270
    while time.monotonic() < ended:
        rounds += 1
        seed, limit = int(numbers.integers(1 << 30)), int(numbers.integers(0, 9)) * MIB
        each = with_pinned(kind(SUB, pinned_memory_limit=limit), limit)

        def given():
            random = np.random.default_rng(seed)
            sizes = [int(random.choice([1, 5, 20_000, 200_000, 700_000])) for _ in range(3)]
            arrays = [np.zeros((2, size), np.float32) for size in sizes]
            values = [OrtValue.ortvalue_from_numpy(np.zeros(size, np.float32)) for size in sizes]
            feed = {}
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
