"""Programs of ``tests/behaviour/test_unseen_fork.py``."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal

from onnxruntime.capi import onnxruntime_pybind11_state as native

import ortgpu
from ortgpu import GPUSession
from ortgpu.environment.gpu import cuda
from tests.programs.on_cpu import NEG, feeds, outcome, report


class Failing:
    # cudaErrorInitializationError: CUDA's answer in a forked process (driver_types.h)
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, *_):
        raise native.Fail("CUDA failure 3: initialization error ; GPU=0 ; hostname=h ; file=/x.cc ; line=1 ; expr=f();")


def in_a_child(function):
    # As C does it: os.fork would call what is registered with os.register_at_fork
    reader, writer = os.pipe()
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        signal.alarm(30)
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.close(writer)
    told = os.read(reader, 1 << 16)
    os.waitpid(pid, 0)
    return json.loads(told)


session, other, on_cpu = GPUSession(NEG), GPUSession(NEG), GPUSession(NEG)
for each in (session, other):
    each.device = dataclasses.replace(each.device, kind="cuda", ordinal=0)
    each._sess = Failing(each._sess)


def a_run_of_the_parents_session_says_so() -> None:
    cuda._state = cuda.CudaState(0, (), os.getpid())  # as after the first session on a GPU

    def told():
        first = outcome(lambda: session.run(None, feeds(1)[0]))
        return [
            first,
            outcome(lambda: list(other.map(feeds(1))))["type"],
            on_cpu.run(None, feeds(1)[0])[0].tolist(),
            [each.alive for each in ortgpu.sessions()],
        ]

    report([os.getpid(), in_a_child(told)])


def in_the_process_that_made_it_a_failure_is_what_it_is() -> None:
    cuda._state = cuda.CudaState(0, (), os.getpid())
    report(outcome(lambda: session.run(None, feeds(1)[0])))
