"""Programs of ``tests/running/test_staging_threads.py``."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np

import ortgpu
from ortgpu.running import copying
from ortgpu.running.copying import Copier
from ortgpu.running.plain_runs import PlainRunner
from tests.programs import staged as module
from tests.programs.on_cpu import NEG, outcome, report
from tests.programs.staged import MIB, Before, big, copies_left, on_a_gpu, ran, runtime, same, staged, stub


def threads_over_one_session() -> None:
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
    bounded = max(pinned) <= 8 * MIB
    session.close()
    report(
        [
            wrong,
            mapped == [-n for n in range(30)],
            all(ran),
            bounded,
            copies_left(),
            session._pinned.bytes_in_use,
            stub.stub_pinned_bytes(),
            stub.stub_streams(),
        ]
    )


def sessions_share_the_threads_that_copy() -> None:
    sessions = [staged(NEG) for _ in range(5)]
    right = [session.run(None, big(number))[0][0].item() for number, session in enumerate(sessions)]
    shared = copies_left()
    del sessions[1:]
    again = copies_left(), sessions[0].run(None, big(7))[0][0].item()
    sessions.clear()
    report([right, shared, again, copies_left(), stub.stub_streams(), stub.stub_pinned_bytes()])


def a_run_under_way_when_the_session_is_closed_ends() -> None:
    session = staged(NEG)
    entered, closed = threading.Event(), threading.Event()

    class Waiting(Copier):
        def fetch(self, *arguments):
            entered.set()
            assert closed.wait(20)
            super().fetch(*arguments)

    session._gpu_runner._runs._copier = Waiting(runtime, 3, 1000)
    results = []
    worker = threading.Thread(target=lambda: results.append(session.run(None, big(3))[0][-1].item()))
    worker.start()
    assert entered.wait(20)
    session.close()
    closed.set()
    worker.join(20)
    report([results, copies_left(), stub.stub_pinned_bytes(), stub.stub_streams()])


def a_process_that_lost_the_gpu_refuses() -> None:
    from ortgpu.provider import lifetime

    session = on_a_gpu(staged(NEG))
    (result,) = session.run(None, big(3))
    lifetime.noted(ortgpu.PoisonedContextError("lost", fixes=[]))
    report([outcome(lambda: session.run(None, big(3)))["type"], result[0].item()])


def a_sticky_error_of_a_copy_is_told_by_run_itself() -> None:
    session = on_a_gpu(staged(NEG))

    class Lost(Before):
        def run(self, *arguments):
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered ; GPU=0")

    session._sess = Lost(session._sess)
    os.environ["STUB_CUDART_FAIL"] = "cudaMemcpyAsync=700"
    report([outcome(lambda: session.run(None, big(3)))["type"] for _ in range(2)])


def what_another_session_captures_is_not_spoilt() -> None:
    import ctypes

    modes = []

    class Noted(Before):
        def run_with_ortvaluevector(self, *arguments):
            modes.append(stub.stub_capture_mode())
            return self.inner.run_with_ortvaluevector(*arguments)

    session = staged(NEG, piece=50_000)
    session._sess = Noted(session._sess)
    stream, graph = ctypes.c_void_p(runtime.new_stream()), ctypes.c_void_p()
    stub.stub_begin_capture(stream)
    results = [session.run(None, big(number, 100_000 * (number + 1)))[0][-1].item() for number in range(4)]
    allocations = stub.stub_allocations()
    session._gpu_runner = PlainRunner(session)
    session.close()
    code = stub.cudaStreamEndCapture(stream, ctypes.byref(graph))
    after = stub.stub_pinned_bytes(), modes, stub.stub_capture_mode(), code
    report([results, ran, allocations > 1, *after])


def two_runs_compute_at_a_time_while_others_copy() -> None:
    session, lock, now, most, waiting = staged(NEG), threading.Lock(), [0], [], threading.Barrier(2)

    class Counting(Before):
        def run_with_ortvaluevector(self, *arguments):
            with lock:
                now[0] += 1
                most.append(now[0])
            waiting.wait(20)  # one alone would not go on
            time.sleep(0.02)
            try:
                return self.inner.run_with_ortvaluevector(*arguments)
            finally:
                with lock:
                    now[0] -= 1

    session._sess = Counting(session._sess)
    results = [int(result[0][0]) for result in session.map([big(number) for number in range(12)])]
    report([results, sorted(set(most)), all(ran)])


def a_run_that_fails_gives_up_its_turn() -> None:
    session, failures = staged(NEG), 5

    class Failing(Before):
        def run_with_ortvaluevector(self, *arguments):
            raise MemoryError

    inner = session._sess
    session._sess = Failing(inner)
    first = [outcome(lambda: session.run(None, big(3))[0][0].item()) for _ in range(failures)]
    session._sess = inner
    report([first, session.run(None, big(4))[0][0].item(), ran])


def nobody_waits_for_the_copies_of_another_run() -> None:
    session = staged(NEG, piece=10**6)
    inside, most, plain_copy = threading.Barrier(4), [], runtime.copy_pinned

    def copy(to, source, size, stream):
        inside.wait(20)
        most.append(stream)
        plain_copy(to, source, size, stream)

    runtime.copy_pinned = copy
    workers = [threading.Thread(target=lambda: session.run(None, big(1))) for _ in range(4)]
    [worker.start() for worker in workers]
    [worker.join(30) for worker in workers]
    runtime.copy_pinned = plain_copy
    at_first, streams = len(set(most[:4])), stub.stub_streams()
    session.run(None, big(1))
    report([ran, at_first, streams, stub.stub_streams()])


def an_array_with_gaps_is_one_piece() -> None:
    session = staged(NEG, piece=20_000)
    gaps = np.arange(200_000, dtype=np.float32).reshape(500, 400)[:, ::2].reshape(-1)[::2]
    report([same(session.run(None, {"x": gaps}), [-gaps]), ran])


def where_the_system_gives_no_threads_one_copies() -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    from ortgpu.running import staging

    session = staged(NEG)
    session._gpu_runner._runs = None
    staging.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
    plain = native.InferenceSession

    def refuse(*_, **__):
        raise RuntimeError("pthread_create failed, error code: 11 error msg: Resource temporarily unavailable")

    copying._shared.clear()
    native.InferenceSession = refuse
    results = [session.run(None, big(3))[0][[0, -1]].tolist()]
    native.InferenceSession = plain
    results.append(session.run(None, big(4))[0][[0, -1]].tolist())
    report([results, ran, session._pinned.bytes_in_use])


def no_other_device_gets_a_context() -> None:
    from ortgpu.running.cudart import CudaRuntime

    module.runtime = CudaRuntime(sys.argv[1], 1)
    session = staged(NEG, piece=20_000)
    results = [session.run(None, big(number))[0][-1].item() for number in range(5)]
    report([results, ran, stub.stub_contexts()])


def sessions_on_several_devices_have_threads_of_their_own() -> None:
    import ctypes

    from ortgpu.running.cudart import CudaRuntime

    wrong, sessions = [], []

    def noting(runtime, ordinal):
        plain_copy = runtime.copy_pinned

        def copy(*arguments):
            current = ctypes.c_int()
            stub.cudaGetDevice(ctypes.byref(current))
            if current.value != ordinal:
                wrong.append((ordinal, current.value))
            plain_copy(*arguments)

        runtime.copy_pinned = copy
        return runtime

    for ordinal in range(2):
        module.runtime = noting(CudaRuntime(sys.argv[1], ordinal), ordinal)
        sessions.append(staged(NEG, piece=20_000))
    for number in range(6):
        sessions[number % 2].run(None, big(number))
    report([wrong, ran, copies_left()])
