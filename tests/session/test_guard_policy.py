"""Which requests the guard judges, and what of them can be had: made-up builds of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest

from ortgpu.session import guard_policy
from tests.lab.installed import older_than
from tests.support.children import program_path
from tests.support.cpu_session import child
from tests.support.guarded_programs import CPU, CUDA, OPENVINO, TENSORRT

GPU_BUILD = (TENSORRT, CUDA, CPU)
CPU_BUILD = ("AzureExecutionProvider", CPU)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide which providers the installed ONNX Runtime has, and whether TensorRT's libraries are there."""

    def have(*available: str, tensorrt: bool = False) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
        monkeypatch.setattr(guard_policy, "_known", lambda: {*GPU_BUILD, *CPU_BUILD, OPENVINO})
        monkeypatch.setattr(guard_policy, "_is_usable", lambda name: tensorrt)

    have(*GPU_BUILD)
    return have


def test_all_that_a_cpu_build_has_is_nothing_in_particular(build: Callable[..., None]) -> None:
    assert guard_policy.judge(CPU_BUILD, None) == "other"
    build(*CPU_BUILD)
    assert guard_policy.judge(list(CPU_BUILD), None) == "guarded"
    assert guard_policy.judge([CPU, (CPU_BUILD[0], {})], None) == "guarded", "in another order"
    assert guard_policy.judge([CPU_BUILD[0]], None) == "other"
    assert guard_policy.judge([CPU], None) == "cpu"


@pytest.mark.parametrize(
    ("providers", "options", "left"),
    [
        ([TENSORRT, CUDA, CPU], None, [(CUDA, {}), (CPU, {})]),
        ([(TENSORRT, {"a": 1}), (CUDA, {"device_id": 1})], None, [(CUDA, {"device_id": "1"})]),
        ([OPENVINO, CUDA], [{"b": 1}, {"device_id": 1}], [(CUDA, {"device_id": "1"})]),
        (["ROCMExecutionProvider", CUDA, CPU], None, [(CUDA, {}), (CPU, {})]),
        ([OPENVINO, (CUDA, {"device_id": 1}), CUDA], None, [(CUDA, {"device_id": "1"})]),
        ((CUDA, CUDA, OPENVINO), ({"device_id": 1}, {"device_id": 2}, {}), [(CUDA, {"device_id": "1"})]),
    ],
)
def test_what_cannot_be_had_beside_cuda_is_left_out(
    build: Callable[..., None], providers: Any, options: Any, left: Any
) -> None:
    assert guard_policy.attainable(providers, options) == (left, None)


def test_tensorrt_that_is_there_is_used(build: Callable[..., None]) -> None:
    build(*GPU_BUILD, tensorrt=True)
    assert guard_policy.attainable([TENSORRT, CUDA], None) == ([TENSORRT, CUDA], None)


@pytest.mark.parametrize(
    "providers", [None, [], [TENSORRT], [CPU, TENSORRT], CUDA, [1, CUDA], [[CUDA, {}]], [CUDA, CUDA]]
)
def test_what_is_refused_or_says_nothing_stays_as_it_was(build: Callable[..., None], providers: Any) -> None:
    assert guard_policy.attainable(providers, None) == (providers, None)


@pytest.mark.parametrize(
    "providers",
    [
        CUDA,
        "cuda",
        {CUDA: {}},
        [(CUDA,), CPU],
        [("CudaExecutionProvider", {}), CPU],
        ["CUDAExecutionprovider", CPU],
        ["cuda:0", CPU],
        ["GPUExecutionProvider", CPU],
        ["NvidiaExecutionProvider", CPU],
        ["TensorRTExecutionProvider", CPU],
        ["trt", CPU],
        ["cuda_ep", CPU],
        [b"CUDAExecutionProvider", CPU],
        [None, CPU],
        "",
        5,
    ],
)
def test_what_may_mean_cuda_is_guarded(build: Callable[..., None], providers: Any) -> None:
    assert guard_policy.judge(providers, None) == "guarded"


@pytest.mark.parametrize(
    ("providers", "verdict"),
    [
        (CPU, "cpu"),
        ([(CPU,)], "cpu"),
        ({CPU: {}}, "cpu"),
        ([CPU, CPU], "cpu"),
        ("OpenVINOExecutionProvider", "other"),
        (["ROCMExecutionProvider", CPU], "other"),
        ([("SNPEExecutionProvider", {}), CPU], "other"),
        (["TvmExecutionProvider"], "other"),
        (["npu"], "other"),
        (["cpu"], "other"),
    ],
)
def test_what_has_nothing_to_do_with_cuda_passes(build: Callable[..., None], providers: Any, verdict: str) -> None:
    assert guard_policy.judge(providers, None) == verdict
    assert guard_policy.judge(providers, [{}, {}, {}]) == verdict, "ONNX Runtime judges what is malformed"


def test_a_build_without_cuda_is_not_hidden(build: Callable[..., None]) -> None:
    build(*CPU_BUILD)
    assert guard_policy.attainable([CUDA, CPU], None) == ([CUDA, CPU], None)


carried = pytest.mark.skipif(older_than((1, 23)) is not None, reason=older_than((1, 23)) or "")


@carried
def test_a_policy_that_finds_no_gpu_is_refused() -> None:
    """ONNX Runtime is silent: it asked for the GPU, and runs on the CPU."""
    found = child("session.guard_policy.a_policy_that_finds_no_gpu_is_refused")
    assert found[0] == found[2] == ["CPUExecutionProvider"]
    for refused in found[1]:
        assert refused["type"] == "ProviderRequestError"
        assert "leave this session on the CPU" in refused["text"]
        assert "devices that they choose from: CPUExecutionProvider" in refused["text"]
    assert "CPUExecutionWarning" in found[3]
    assert set(found[4]) == {program_path("session.guard_policy")}
    assert found[5][-1] == "other"


@carried
def test_what_else_the_options_carry_passes_without_a_fallback() -> None:
    """Another provider than the CPU's takes a device: the session says that it has one."""
    found = child("session.guard_policy.what_else_the_options_carry_passes_without_a_fallback")
    assert found == [True, False, ["other"], [-1] * 4]


@carried
def test_carried_options_do_not_hide_what_is_wrong_with_the_machine() -> None:
    found = child("session.guard_policy.carried_options_do_not_hide_what_is_wrong_with_the_machine")
    assert [each["type"] for each in found] == ["DriverNotFoundError", *["ProviderRequestError"] * 2]
