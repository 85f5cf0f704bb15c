"""Which requests the guard judges, and what of them can be had: made-up builds of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ortgpu import guard_policy
from tests.guarded_programs import CPU, CUDA, OPENVINO, TENSORRT

GPU_BUILD = (TENSORRT, CUDA, CPU)
CPU_BUILD = ("AzureExecutionProvider", CPU)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide which providers the installed ONNX Runtime has, and whether TensorRT's libraries are there."""

    def have(*available: str, tensorrt: bool = False) -> None:
        monkeypatch.setattr(guard_policy, "_available", lambda: available)
        monkeypatch.setattr(guard_policy, "_known", lambda: {*GPU_BUILD, *CPU_BUILD, OPENVINO})
        monkeypatch.setattr(guard_policy, "_tensorrt_is_loadable", lambda: tensorrt)

    have(*GPU_BUILD)
    return have


def test_all_that_a_cpu_build_has_is_nothing_in_particular(build: Callable[..., None]) -> None:
    assert guard_policy.judge(CPU_BUILD, None) == "other"
    build(*CPU_BUILD)
    assert guard_policy.judge(list(CPU_BUILD), None) == "guarded"
    assert guard_policy.judge([CPU], None) == "cpu"


@pytest.mark.parametrize(
    ("providers", "options", "left"),
    [
        ([TENSORRT, CUDA, CPU], None, [(CUDA, {}), (CPU, {})]),
        ([(TENSORRT, {"a": 1}), (CUDA, {"device_id": 1})], None, [(CUDA, {"device_id": "1"})]),
        ([OPENVINO, CUDA], [{"b": 1}, {"device_id": 1}], [(CUDA, {"device_id": "1"})]),
        (["ROCMExecutionProvider", CUDA, CPU], None, [(CUDA, {}), (CPU, {})]),
        ([(CUDA, {"device_id": 1}), CUDA], None, [(CUDA, {"device_id": "1"})]),
        ((CUDA, CUDA), ({"device_id": 1}, {"device_id": 2}), [(CUDA, {"device_id": "1"})]),
    ],
)
def test_what_cannot_be_had_beside_cuda_is_left_out(
    build: Callable[..., None], providers: Any, options: Any, left: Any
) -> None:
    assert guard_policy.attainable(providers, options) == (left, None)


def test_tensorrt_that_is_there_is_used(build: Callable[..., None]) -> None:
    build(*GPU_BUILD, tensorrt=True)
    kept, _ = guard_policy.attainable([TENSORRT, CUDA], None)
    assert [name for name, _ in kept] == [TENSORRT, CUDA]


@pytest.mark.parametrize("providers", [None, [], [TENSORRT], [CPU, TENSORRT], CUDA, [1, CUDA], [[CUDA, {}]]])
def test_what_is_refused_or_says_nothing_stays_as_it_was(build: Callable[..., None], providers: Any) -> None:
    assert guard_policy.attainable(providers, None) == (providers, None)


def test_a_build_without_cuda_is_not_hidden(build: Callable[..., None]) -> None:
    build(*CPU_BUILD)
    assert guard_policy.attainable([CUDA, CPU], None) == ([CUDA, CPU], None)
