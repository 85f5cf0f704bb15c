"""What was made in a CUDA context that another library destroyed, over the stub driver and the stub runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_session import PRELUDE
from tests.lab.stubs import GPU, Cuda, Stubs

ROOT = Path(__file__).resolve().parents[1]
START = """
from ortgpu import contexts
from ortgpu.cudart import DeviceBuffer
from ortgpu.environment.cuda import context_id, initialise
from ortgpu.pinned import PinnedMemory

assert initialise().code == 0
runtime, stub = stub_runtime(sys.argv[1])

def reset(context):
    os.environ["STUB_CUDA_CONTEXT"] = str(context)
"""


def run(stubs: Stubs, code: str) -> str:
    env = {**os.environ, **Cuda(devices=(GPU(),)).variables(), "STUB_CUDA_CONTEXT": "1", "PYTHONPATH": str(ROOT)}
    env["LD_LIBRARY_PATH"] = str(stubs.cuda.parent)
    command = [sys.executable, "-c", PRELUDE + START + code, str(stubs.cudart)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("now", "gone"), [(1, False), (2, True), (0, True)])
def test_a_session_knows_whether_its_context_is_gone(stubs: Stubs, now: int, gone: bool) -> None:
    code = f"contexts.remember(7, 0); reset({now}); print(contexts.is_gone(7), contexts.is_gone(8))"
    assert run(stubs, code) == f"{gone} False"


def test_no_context_when_it_was_opened_is_none_to_lose(stubs: Stubs) -> None:
    assert run(stubs, "reset(0); contexts.remember(7, 0); reset(1); print(contexts.is_gone(7))") == "False"


@pytest.mark.parametrize(("now", "left"), [(1, 0), (2, 1 << 20)])
def test_memory_of_a_context_that_is_gone_is_not_freed(stubs: Stubs, now: int, left: int) -> None:
    """The driver has freed it, and may have given its address to somebody else since."""
    code = f"""
memory = PinnedMemory(runtime, 1 << 30)
array = memory.empty(1 << 18)
before = stub.stub_pinned_bytes()
reset({now})
del array
memory.close()
print(before, stub.stub_pinned_bytes())
"""
    assert run(stubs, code) == f"{1 << 20} {left}"


@pytest.mark.parametrize(("now", "left"), [(1, 0), (2, 4096)])
def test_what_belongs_to_an_object_goes_with_its_context(stubs: Stubs, now: int, left: int) -> None:
    code = f"buffer = DeviceBuffer(runtime, 4096); reset({now}); del buffer; print(stub.stub_device_bytes())"
    assert run(stubs, code) == str(left)
