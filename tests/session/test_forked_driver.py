"""What a forked worker is told where the driver refuses: of the fork only where that is the cause."""

from __future__ import annotations

import pytest

from tests.lab import GPU, Cuda
from tests.lab.fixtures import Lab

UNUSED, USED = "unused", "used"  # by another library, before the fork


def told(lab: Lab, before: str, code: int = 0, visible: str | None = None) -> tuple[str, str]:
    machine = lab.machine(cuda=Cuda(devices=(GPU(),), init=code), env={"CUDA_VISIBLE_DEVICES": visible})
    name, text = machine.run_program("session.forked_driver.worker", before).ok().json
    return name, text


@pytest.mark.parametrize(
    ("code", "error"),
    [(100, "NoDeviceError"), (803, "DriverUnusableError"), (802, "DriverUnusableError"), (999, "DriverUnusableError")],
)
@pytest.mark.parametrize("before", [UNUSED, USED])
def test_a_driver_that_refuses_for_another_reason_is_not_the_forks_fault(
    lab: Lab, before: str, code: int, error: str
) -> None:
    name, text = told(lab, before, code)
    assert name == error
    assert "fork" not in text


def test_a_hidden_gpu_is_not_the_forks_fault(lab: Lab) -> None:
    name, text = told(lab, UNUSED, visible="")
    assert name == "NoDeviceError"
    assert "CUDA_VISIBLE_DEVICES" in text


def test_a_parent_in_which_another_library_used_cuda_is_to_blame(lab: Lab) -> None:
    name, text = told(lab, USED)
    assert name == "ForkedSessionError"
    assert "cuInit returned 3 (CUDA_ERROR_NOT_INITIALIZED)" in text
    assert "spawn" in text


def test_a_child_of_a_parent_that_only_imported_ortgpu_finds_the_gpu(lab: Lab) -> None:
    """The stub's GPU goes no further than CUDA's runtime, which knows NVIDIA's own driver."""
    name, text = told(lab, UNUSED)
    assert name != "ForkedSessionError"
    assert "fork" not in text
