"""What other code of a process does to the GPU: sessions say what it was, and go on where they can."""

from __future__ import annotations

import importlib.util
import re

import pytest

from .children import run_program

pytestmark = pytest.mark.ortgpu


@pytest.mark.parametrize("first", ["run", "large", "map"])
def test_a_reset_of_the_gpu(first: str) -> None:
    """Plain ONNX Runtime says 709 or 1 of a small array; with pinned memory that is gone a run would crash.

    Plain ONNX Runtime 1.31.1 itself dies of SIGSEGV in the next run, if the session had two runs at a time before.
    """
    found = run_program("reset_under_sessions", {"first": first})
    assert found.returned("before") == [[-1, 2], -1, [-1, -2]][: 2 if first == "run" else 3]
    assert found.returned("reset") == 0
    for name in ("first", "then run", "then large", "then map", "other session"):
        error = found.error(name)
        assert error.type == "ProviderFailureError", error.text
        assert error.fields["status"] == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        assert "reset the GPU" in error.text
    assert found.returned("new session") == [[-1, 2], -1, [-1, -2]]
    assert "error" not in found["close"]
    assert found.returned("new session still") == [-1, 2]
    assert found.child.returncode == 0, found.child.output


@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("way", ["run", "graph", "run_with_iobinding", "bind_cpu_input", "map"])
def test_a_small_run_after_a_reset(way: str, attempt: int) -> None:
    """ONNX Runtime would copy in a stream that the reset destroyed. Plain sessions raise failure 709 mostly; those with
    the options that a GPUSession chooses for this model died of SIGSEGV in two of six runs."""
    found = run_program("reset_before_small_runs", {"way": way})
    assert found.returned("reset") == 0
    for name in ("first", "second"):
        error = found.error(name)
        assert error.type == "ProviderFailureError", error.text
        assert "reset the GPU" in error.text
    assert found.returned("new session") == [-1, 2]


def test_a_session_is_closed_after_a_reset() -> None:
    found = run_program("reset_and_close")
    assert "error" not in found["close"]
    assert found.returned("new session") == [-1, 2]
    assert found.child.returncode == 0, found.child.output


@pytest.fixture
def torch_is_there() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch with CUDA")


@pytest.mark.usefixtures("torch_is_there")
def test_a_cuda_graph_that_is_captured_meanwhile() -> None:
    found = run_program("captured_elsewhere", {"mode": "global"})
    for name in ("first run", "new session"):
        error = found.error(name)
        assert error.type == "ProviderFailureError", error.text  # and not a lack of memory, nor a driver that is broken
        # cuBLAS itself only says that it was not initialised; CUDA's code says that a graph is captured.
        assert re.search("captures a CUDA graph|capturing a CUDA graph", error.text)
    assert found.returned("afterwards") == [[-1, 2]] * 3


@pytest.mark.usefixtures("torch_is_there")
def test_a_capture_that_forbids_its_own_thread_alone() -> None:
    """What the advice says."""
    found = run_program("captured_elsewhere", {"mode": "thread_local"})
    assert found.returned("run") == [-1, 2]
    assert found.returned("capture") == "captured"
    assert found.returned("afterwards") == [[-1, 2]] * 3


@pytest.mark.parametrize("left", [4, 8, 16, 24])
def test_too_few_descriptors(left: int) -> None:
    """The driver says 304, 999, 100 or, of a context, 46: of too many open files CUDA has no word."""
    error = run_program("few_descriptors", {"left": left}).error("session")
    if error.type == "OSError":  # Python itself, which did not get to import what the diagnosis needs
        assert "Too many open files" in error.text
        return
    assert error.type == "DriverUnusableError", error.text
    assert "too few are left for CUDA" in error.text
    (fix,) = (line.strip() for line in error.text.splitlines() if line.strip().startswith("import resource"))
    assert run_program("few_descriptors", {"left": left, "fix": fix}).returned("session") == [-1, 2]
