"""A session that was verified once stays on the GPU, or says why it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortgpu.provider.runtime import load_runtime
from ortgpu.provider.settings import FEW_THREADS

from .children import Report, run_program
from .plugin import not_at_start

pytestmark = pytest.mark.ortgpu

ASYNCHRONOUS_TOLERANCE = 1e-2  # of the largest output, beside another session: TF32

# Of the threads' run; the minute is for a run on its own: ORTGPU_SOAK_SECONDS=60.
SECONDS = float(os.environ.get("ORTGPU_SOAK_SECONDS", "10"))


@pytest.fixture(scope="module")
def memory() -> Report:
    return run_program("out_of_memory")


@pytest.mark.parametrize("method", ["run", "run_with_ort_values", "bind_cpu_input"])
def test_out_of_memory_is_typed_with_its_sizes(memory: Report, method: str) -> None:
    error = memory.error(method)
    assert error.type == "GPUOutOfMemoryError"
    assert error.is_a("MemoryError")
    assert error.fields["requested"] == 256 << 20
    assert 0 < error.fields["free"] < error.fields["total"]
    assert "256 MiB were asked for" in error.text


@pytest.mark.parametrize("name", ["next run", "next run with values", "new session"])
def test_the_next_run_is_right(memory: Report, name: str) -> None:
    assert memory.returned(name) == [-1, 2]


@pytest.fixture(scope="module")
def poison() -> Report:
    return run_program("poisoned")


def test_a_sticky_error_names_the_cuda_error(poison: Report) -> None:
    assert poison.returned("before") == [-1, 2]
    error = poison.error("poison")
    assert error.type == "PoisonedContextError"
    assert error.fields["cuda_code"] == 700
    assert "cudaErrorIllegalAddress" in error.text


def test_the_driver_is_asked_and_says_which_error_it_is(poison: Report) -> None:
    assert set(poison["driver before"].values()) == {0}
    assert poison["driver after"]["context_error"] == 700
    assert poison["driver after"]["cuMemGetInfo"] == 700


@pytest.mark.parametrize("way", ["feed", "output", "binding", "tuning results"])
def test_a_name_that_a_client_chose_ends_nothing(poison: Report, way: str) -> None:
    error = poison.error(f"name: {way}")
    assert "CUDA failure 700" in error.text
    assert error.module != "ortgpu.errors"
    assert poison["name: asynchronous"] is True
    assert poison.returned("before") == [-1, 2]


@pytest.mark.parametrize("name", ["same session", "other session", "io_binding", "new session"])
def test_everything_refuses_after_it(poison: Report, name: str) -> None:
    error = poison.error(name)
    assert error.type == "PoisonedContextError"
    assert error.fields["cuda_code"] == 700
    assert "restart this process" in error.text


def test_the_cpu_is_taken_after_it_only_when_allowed(poison: Report) -> None:
    assert poison.returned("new session, cpu allowed") == "cpu"


def test_a_poisoned_process_ends_by_itself(poison: Report) -> None:
    assert poison.child.returncode == 0, poison.child.output
    assert "error" not in poison["close"]


@pytest.fixture(scope="module")
def forks() -> Report:
    return run_program("forked")


@not_at_start
def test_a_child_forked_before_cuda_works(forks: Report) -> None:
    assert forks.returned("child before CUDA") == [-1, 2]


@pytest.mark.parametrize("name", ["run", "run_with_iobinding", "io_binding", "new session"])
def test_a_child_forked_after_cuda_is_told(forks: Report, name: str) -> None:
    error = forks.error(name)
    assert error.type == "ForkedSessionError"
    assert error.fields["creator_pid"] != error.fields["pid"]
    assert "spawn" in error.text
    assert forks[f"{name}: status"] == 0


def test_the_parent_goes_on(forks: Report) -> None:
    assert forks.returned("parent") == [-1, 2]
    assert forks["children that came to their end"] == 6
    assert forks.child.returncode == 0, forks.child.output


def test_a_child_of_a_server_that_does_not_tell_python_is_told() -> None:
    report = run_program("forked_unseen")
    assert report.error("run").type == "ForkedSessionError"
    assert report["status"] == 0


def test_a_child_whose_parent_used_cuda_through_torch_is_told() -> None:
    report = run_program("forked_after_torch")
    if report.get("torch") is None:
        pytest.skip(f"torch has no CUDA here: {report.child.stderr[-200:]}")
    assert report["cuInit in the child"] == 3
    assert report.error("new session").type == "ForkedSessionError"


def test_a_child_whose_parent_initialised_cuda_by_itself_is_told() -> None:
    report = run_program("forked_after_another_library")
    assert report["cuInit"] == 0
    assert report["cuInit in the child"] == 3
    assert report.error("new session").type == "ForkedSessionError"


@not_at_start
def test_pickling_opens_and_verifies_again() -> None:
    report = run_program("pickled")
    uuid, _ = report["device"]
    assert report["unpickled"] == f"[-1.0, 2.0] {uuid} 2"
    assert any("NoDeviceError" in line for line in report["unpickled without a GPU"])


def test_threads_on_one_session_beside_construction(mlp: Path) -> None:
    arguments = {"model": mlp, "threads": 64, "seconds": SECONDS}
    outcome = run_program("many_threads", arguments, deadline=SECONDS + 60)["threads"]
    assert outcome["wrong"] == []
    assert outcome["least"] > 0


def test_the_first_sessions_of_a_process_in_parallel(mlp: Path) -> None:
    report = run_program("first_sessions_in_parallel", {"model": mlp, "threads": 8})
    assert report["outcomes"] == ["0"] * 8


@pytest.fixture(scope="module")
def asynchronous(mlp: Path) -> Report:
    return run_program("asynchronous", {"model": mlp})


def test_runs_that_were_handed_over_are_right(asynchronous: Report) -> None:
    assert asynchronous["errors"] == []
    assert asynchronous["error"] <= ASYNCHRONOUS_TOLERANCE


@pytest.mark.timeout(600)
def test_no_session_that_goes_out_of_scope_is_destroyed_in_a_thread_of_its_own(mlp: Path) -> None:
    found = run_program("asynchronous_and_dropped", {"model": mlp, "count": 500}, deadline=580)
    assert found["errors"] == []
    assert found["ran"] == sum(found["destroyed"].values()) == 500
    assert set(found["destroyed"]) <= {"ortgpu-async", "MainThread"}
    assert found["sessions"] == 0


@pytest.mark.skipif(load_runtime().release < (1, 31), reason="measured with ONNX Runtime 1.31")
@pytest.mark.skipif(
    (os.cpu_count() or 1) <= 2 * FEW_THREADS, reason="few processors: ONNX Runtime's own choice is left"
)
def test_a_session_has_fewer_threads_than_a_plain_one(asynchronous: Report) -> None:
    assert asynchronous["chosen"][0] == str(FEW_THREADS)
    assert asynchronous["threads"] < asynchronous["threads of a plain session"]


def test_termination_during_a_run_leaves_no_process(resnet50: Path) -> None:
    ended = run_program("terminated", {"model": resnet50})["ended"]
    assert ended["returncode"] == -15
    assert ended["seconds"] < 10
