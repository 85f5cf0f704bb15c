"""What was made in a CUDA context that another library destroyed, over the stub driver and the stub runtime."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab.fixtures import Lab
from tests.lab.models import Models
from tests.lab.stubs import GPU, Cuda, Stubs
from tests.support.children import DEADLINE_VARIABLE, run_python

ROOT = Path(__file__).resolve().parents[2]


def run(stubs: Stubs, code: str) -> str:
    env = {**os.environ, **Cuda(devices=(GPU(),)).variables(), "STUB_CUDA_CONTEXT": "1", "PYTHONPATH": str(ROOT)}
    env["LD_LIBRARY_PATH"] = str(stubs.cuda.parent)
    env[DEADLINE_VARIABLE] = "60"
    return run_python(code, str(stubs.cudart), behind="on_cpu provider.contexts", env=env).ok().stdout.strip()


@pytest.mark.parametrize(("now", "gone"), [(1, False), (2, True), (0, True)])
def test_a_session_knows_whether_its_context_is_gone(stubs: Stubs, now: int, gone: bool) -> None:
    code = f"lifetime.watch(session); reset({now}); print(*map(lifetime.has_lost_context, (session, other)))"
    assert run(stubs, code) == f"{gone} False"


def test_no_context_when_it_was_opened_is_none_to_lose(stubs: Stubs) -> None:
    assert (
        run(stubs, "reset(0); lifetime.watch(session); reset(1); print(lifetime.has_lost_context(session))") == "False"
    )


@pytest.mark.parametrize("abandoned", [False, True])
def test_memory_that_was_lost_is_not_freed(stubs: Stubs, abandoned: bool) -> None:
    """The driver has freed it, and may have given its address to somebody else since."""
    code = f"""
memory = PinnedMemory(runtime, 1 << 30)
kept, array = memory.empty(1 << 18), memory.empty(1 << 18)
del array
if {abandoned}:
    memory.abandon()
memory.close()
del kept
print(stub.stub_pinned_bytes(), memory.try_empty((4,), np.dtype("f4")))
"""
    assert run(stubs, code) == f"{2 << 20 if abandoned else 0} None"


def test_a_session_that_lost_its_context_lets_go_of_nothing(stubs: Stubs) -> None:
    code = """
session = Session()  # which nothing else holds
native = session._sess
session._pinned, session._gpu_runner = PinnedMemory(runtime, 1 << 30), object()
session._pinned.empty(1 << 18)
lifetime.watch(session)
assert not lifetime.abandon_if_context_is_gone(session)
before = sys.getrefcount(native)  # by the session, among others
reset(2)
try:
    lifetime.refuse_if_unusable(session)
except ortgpu.ProviderFailureError as error:
    print(error.status)
assert "_gpu_runner" not in vars(session)
assert lifetime.error_of(session) is not None
del session
gc.collect()
print(stub.stub_pinned_bytes(), sys.getrefcount(native) >= before)
"""
    assert run(stubs, code).split("\n") == ["CUDA_ERROR_CONTEXT_IS_DESTROYED", f"{1 << 20} True"]


def test_a_bound_gpu_without_a_context_is_not_taken_for_one(lab: Lab, models: Models, provider_library: str) -> None:
    machine = lab.machine_that_places(provider_library)
    error = machine.but(env={"STUB_CUDA_CONTEXT": "0"}).open_session(models.relu).error
    assert error is not None
    assert error.type == "ProviderFallbackError"
    assert "bound cuda:0, and this process has no CUDA context there" in str(error.summary)
