"""A cuDNN that has no code for the GPU at hand, while ONNX Runtime has: 9.11 and newer, and GPUs before 7.5.

The advice is executed in tests/faults, cudnn-without-code-for-the-gpu.
"""

from __future__ import annotations

from ortgpu.environment.inspection import inspect_environment
from ortgpu.environment.libraries.catalogue import CUDNN_CODE
from ortgpu.environment.libraries.wheel import coverage_by
from tests.support.cpu_session import child

OLD, KNOWN = (3, 5), (9, 0)  # no cuDNN 9 has code for the one, and each for the other


def test_the_installed_cudnn_says_which_gpus_it_has_code_for() -> None:
    environment = inspect_environment()
    assert {library.spec.stem for library in environment.libraries} >= set(CUDNN_CODE)
    held = environment.cudnn_architectures
    assert [coverage_by(held, capability) for capability in (KNOWN, (8, 6), OLD)] == ["native", "native", "none"]


def test_a_session_is_refused_where_its_operators_need_what_is_not_there() -> None:
    found = child("session.cudnn_code.a_session_is_refused_where_its_operators_need_what_is_not_there")
    assert found == [["Conv", "Relu"], None, None, None, ["Conv"], None]


def test_what_cudnn_fails_with_there_is_told_as_that() -> None:
    """Operators of older releases that are not known to need cuDNN: issue 25676 is of ReduceSum in 1.22."""
    found = child("session.cudnn_code.what_cudnn_fails_with_there_is_told_as_that")
    other = "ProviderFailureError"
    assert [kind for kind, _ in found] == [other, "UnsupportedDeviceError", other, other, other]
    assert "holds no code for cuda:0 (Tesla) (compute capability 3.5)" in found[1][1]
    assert "install cuDNN 9.10" in found[1][1]
