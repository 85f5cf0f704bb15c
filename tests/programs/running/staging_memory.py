"""Programs of ``tests/running/test_staging_memory.py``."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys

import numpy as np

from tests.programs.on_cpu import NEG, outcome, report
from tests.programs.staged import MIB, big, copies_left, is_pinned, on_a_gpu, ran, runtime, staged, stub


def large_results_are_in_memory_that_is_used_again() -> None:
    session = staged(NEG)
    addresses = set()
    for number in range(20):
        (result,) = session.run(None, big(number))
        assert not is_pinned(result) and (result == -number).all()
        addresses.add(result.__array_interface__["data"][0])
        del result
    ordinary = session._pinned.ordinary
    report([len(addresses), stub.stub_allocations(), ordinary.bytes_in_use, ordinary.bytes_held, ran.count(True)])


def a_result_is_never_another_s_while_it_or_a_view_of_it_lives() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

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
            assert stub.stub_pinned_bytes() == session._pinned.bytes_held <= limit
            assert session._pinned.ordinary.bytes_held <= limit
            assert all((np.asarray(array) == -value).all() for value, array in held.values())
        session.close()
        assert all((np.asarray(array) == -value).all() for value, array in held.values())
        assert stub.stub_pinned_bytes() == 0

    check()
    report([all(ran), len(ran) > 100])


def results_that_are_kept_are_beyond_the_limit_in_memory_of_their_own() -> None:
    session = staged(NEG, limit=4 * MIB)
    results = [session.run(None, big(number, MIB // 8))[0] for number in range(12)]
    ordinary = session._pinned.ordinary
    in_use = ordinary.bytes_in_use
    right = all((each == -number).all() for number, each in enumerate(results))
    del results
    report([in_use, right, ordinary.bytes_in_use, ordinary.bytes_held, stub.stub_pinned_bytes(), all(ran)])


def out_of_pinned_memory_copies_the_ordinary_way() -> None:
    session = staged(NEG)
    stub.stub_fail(2)
    (result,) = session.run(None, big(3))
    again = session.run(None, big(4))[0]
    stub.stub_fail(0)
    report([result[0].item(), again[0].item(), is_pinned(result), ran])


def closed_it_says_so_and_results_live_on() -> None:
    session = staged(NEG)
    (result,) = session.run(None, big(3))
    session.close()
    session.close()
    failed = outcome(lambda: session.run(None, big(3)))
    left = stub.stub_pinned_bytes(), copies_left(), stub.stub_streams() + stub.stub_events()
    report([failed["type"], result[-1].item(), left])


def dropped_without_closing_only_what_results_use_stays() -> None:
    from ortgpu.running import pinned

    session = staged(NEG, limit=2 * MIB)
    session._pinned = None
    pinned.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
    results = [session.run(None, big(number, MIB // 8))[0] for number in range(5)]
    array = session.pinned_empty(MIB // 4)
    before = stub.stub_pinned_bytes()
    ordinary = session._pinned.ordinary
    del results[1:4], session
    gc.collect()
    left = stub.stub_pinned_bytes(), ordinary.bytes_held, [int(r[0]) for r in results]
    del results, array
    report([before, left, stub.stub_pinned_bytes(), ordinary.bytes_held, copies_left()])


def a_forked_child_keeps_its_results_refuses_and_frees_nothing() -> None:
    session = on_a_gpu(staged(NEG))
    (result,) = session.run(None, big(3))
    before, ordinary = stub.stub_pinned_bytes(), session._pinned.ordinary
    held = ordinary.bytes_held
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
    report([json.loads(os.read(read, 1000)), again[0].item(), ordinary.bytes_held == held])


def results_are_written_into_shared_memory_where_there_is_some() -> None:
    import socket

    from ortgpu.process.channel import Channel, memory_file
    from ortgpu.session.pool.shared_memory import Exchange

    if not (sys.argv[2] == "True"):
        os.environ["STUB_CUDART_FAIL"] = "cudaHostRegister=2"
    one, other = map(Channel, socket.socketpair())
    file = memory_file("ortgpu-test")
    ours = Exchange(one, file)
    theirs = Exchange(other, os.dup(file), runtime=runtime)
    session = staged(NEG)
    session._gpu_runner._runs.place = theirs.try_empty
    pinned, right = [], []
    for number in range(4):
        ours.send(None, [big(number)["x"]])
        _, (array,) = theirs.receive()
        (result,) = session.run(None, {"x": array})
        pinned.append([is_pinned(array), is_pinned(result)])
        theirs.send(None, [result])
        _, (arrived,) = ours.receive()
        right.append(bool((arrived == -number).all()))
        del array, result, arrived
        theirs.end(frees=False), ours.end(frees=True)
    allocations = stub.stub_allocations()
    ours.close(), theirs.close()
    session.close()
    gc.collect()
    report([right, pinned, allocations, stub.stub_pinned_bytes(), stub.stub_last_error(), ran])
