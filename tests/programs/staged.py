"""What programs with sessions that stage their runs share: see tests/support/staged_sessions.py."""

import dataclasses
import gc
import os
import sys

import numpy as np

from ortgpu import GPUSession
from ortgpu.running import copying
from ortgpu.running.copying import Copier
from ortgpu.running.pinned import PinnedMemory
from ortgpu.running.plain_runs import PlainRunner
from ortgpu.running.staged_runs import StagedRuns
from ortgpu.running.staging import StagedRunner
from tests.programs import no_search
from tests.programs.on_cpu import stub_runtime

os.environ["STUB_CUDART_LATE"] = "1"
runtime, stub = stub_runtime(sys.argv[1])
MIB = 1 << 20
ran = []  # whether each run was staged


class Before:
    # Stands before the session of ONNX Runtime in a GPUSession
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Noting(StagedRunner):
    def _run_staged(self, *arguments):
        results = super()._run_staged(*arguments)
        ran.append(results is not None)
        return results


def staged(model, staged_from=64, threads=3, piece=1000, limit=64 * MIB, **arguments):
    session = GPUSession(model, pinned_memory_limit=limit, **arguments)
    session._pinned = PinnedMemory(runtime, limit)
    stage(session, staged_from, threads, piece)
    return session


def stage(session, staged_from, threads, piece):
    session._gpu_runner = Noting(session, staged_from=staged_from)
    session._gpu_runner._runs = StagedRuns(session, runtime, staged_from, threads, piece)


def same(found, expected):
    assert len(found) == len(expected) and type(found) is type(expected)
    for a, b in zip(found, expected):
        assert type(a) is type(b) and a.dtype.char == b.dtype.char and a.shape == b.shape and a.flags.writeable
        assert a.tobytes() == b.tobytes()
    return True


def is_pinned(array):
    return runtime.is_pinned(array.__array_interface__["data"][0])


def on_a_gpu(session):
    # So that it is refused what a session on a GPU is
    session.device = dataclasses.replace(session.device, kind="cuda")
    return session


def copies_left():
    # With each of them its threads: test_copying.py
    gc.collect()
    return len(copying._shared)


def big(value, size=100_000):
    return {"x": np.full(size, value, np.float32)}
