"""Sessions without a handle of cuDNN compute the same, are made where they can be, and leave nothing on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.provider.runtime import load_runtime

from .children import Report, run_program
from .plugin import built_in_only

pytestmark = [
    pytest.mark.ortgpu,
    pytest.mark.skipif(load_runtime().release < (1, 31), reason="chosen for ONNX Runtime 1.31 and newer"),
]

TOLERANCE = 1e-2  # of the largest output, beside the CPU: TF32
COUNT = 1500  # sessions, of which each would leave 10 KB with a handle: 15 MiB
MEMORY_MARGIN = 4 * 2**20


@pytest.fixture(scope="module")
def operators() -> Report:
    return run_program("operators_without_cudnn", deadline=120)


@pytest.fixture(scope="module")
def sessions(mlp: Path, conv: Path) -> Report:
    return run_program("sessions_without_handles", {"mlp": mlp, "conv": conv, "count": COUNT}, deadline=120)


@built_in_only
def test_each_operator_computes_the_same_bits(operators: Report) -> None:
    assert operators["operators"]["compared"] > 50
    assert operators["operators"]["different"] == []


@built_in_only
def test_they_were_compared_on_the_gpu(operators: Report) -> None:
    """Shapes and constants are the business of the CPU."""
    assert set(operators["operators"]["not on the GPU"]) <= {"Shape", "Constant", "ConstantOfShape"}


@built_in_only
def test_a_session_does_without(sessions: Report) -> None:
    assert sessions["options"] == "0"
    assert sessions["chosen"][0] == "0"


def test_its_results_are_right(sessions: Report) -> None:
    assert 0 < sessions["error"] <= TOLERANCE
    assert 0 < sessions["error of a graph"] <= TOLERANCE


def test_a_caller_has_the_handle_that_was_asked_for(sessions: Report) -> None:
    assert sessions["asked for"] == ["1", False]


def test_convolutions_beside_it_have_theirs(sessions: Report) -> None:
    assert sessions["conv"] == "1"
    assert 0 < sessions.returned("conv runs") <= TOLERANCE


def test_many_sessions_leave_nothing(sessions: Report) -> None:
    if sessions["lost"] is None:
        pytest.skip("neither NVML nor the CUDA runtime tells the free memory of this GPU")
    assert sessions["lost"] <= MEMORY_MARGIN
