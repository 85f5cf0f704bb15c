"""Sessions that stage their runs, as far as that goes without a GPU: for :func:`tests.support.cpu_session.child`.

The session is a real one on the CPU, and so is what runs it with inputs and outputs in its own memory; "device" memory
is the host's, and a stub runtime copies. It copies as late as CUDA may: what is read or used again too early shows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.installed import older_than
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child

STAGES = (1, 30)  # gives sessions memory on the device, create_ortvalue_from_shape_and_type

SETUP = """
import dataclasses
from ortgpu.running import copying
from ortgpu.running.copying import Copier
from ortgpu.running.pinned import PinnedMemory
from ortgpu.running.plain_runs import PlainRunner
from ortgpu.running.staged_runs import StagedRuns
from ortgpu.running.staging import StagedRunner
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
    # With each of them its threads: test_parallel_copy.py
    gc.collect()
    return len(copying._shared)

def big(value, size=100_000):
    return {"x": np.full(size, value, np.float32)}
"""


@pytest.fixture
def staged_child(stubs: Stubs) -> Callable[..., Any]:
    """Called with code and a deadline: what the code reported. It finds ``runtime``, ``stub``, ``ran`` and
    :func:`staged`."""
    if reason := older_than(STAGES):
        pytest.skip(reason)

    def run(code: str, deadline: float = 60) -> Any:
        return child(SETUP + textwrap.dedent(code), str(stubs.cudart), deadline=deadline)

    return run
