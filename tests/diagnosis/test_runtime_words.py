"""What ONNX Runtime's words mean when a run fails, and whose words they are: of the GPU, of the host, of the caller."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import replace
from typing import Any

import pytest

from ortgpu.diagnosis.checks import classifier, devices
from ortgpu.diagnosis.checks.classifier import explain_opening, explain_run
from ortgpu.environment.gpu import driver
from ortgpu.environment.libraries.catalogue import CUDNN_CODE
from ortgpu.environment.libraries.wheel import Architecture
from ortgpu.errors import GPUOutOfMemoryError, LibraryNotFoundError, UnsupportedDeviceError
from ortgpu.provider.devices import CPU, Device
from tests.lab.fixtures import Lab
from tests.lab.overlay import installed_site
from tests.support.children import run_python
from tests.support.cpu_session import child
from tests.support.made_facts import HEALTHY

GPU = Device("cuda", 0, "GPU-1", "NVIDIA H200", (9, 0), 150 << 30, None)
NODE = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node. Name:'{}' Status Message: "
)
ARENA = (
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::BFCArena::AllocateRawInternal("
    "size_t, bool, onnxruntime::Stream*) "
)


def assert_understood(text: str, error: str, details: dict[str, Any]) -> None:
    found = explain_run(NODE.format("conv") + text, "Fail", GPU)
    assert type(found).__name__ == error
    assert found is not None
    assert details.items() <= found.details().items()


@pytest.mark.parametrize(
    ("text", "error", "details"),
    [
        # cuda_mempool_arena.cc of 1.26
        ("CudaMempoolArena::AllocOnStream: cudaMallocFromPoolAsync failed on stream=94: out of memory (2), size=4096",
            "GPUOutOfMemoryError", {"requested": 4096}),
        ("CudaMempoolArena::Alloc: cudaMallocFromPoolAsync failed: an illegal memory access (700), size=8",
            "PoisonedContextError", {"cuda_code": 700}),
        # cuda_allocator.cc: of the host
        ("CUDA failure 2: out of memory ; GPU=0 ; file=cuda_allocator.cc ; expr=cudaMallocHost((void**)&p, size);",
            "ProviderFailureError", {"library": "CUDA", "status": "cudaErrorMemoryAllocation"}),
        ("CUDA failure 2: out of memory ; GPU=0 ; file=cuda_allocator.cc ; expr=cudaMalloc((void**)&p, size);",
            "GPUOutOfMemoryError", {}),
        # system_error.h of thrust
        ("copy_if failed to synchronize: cudaErrorIllegalAddress: an illegal memory access was encountered",
            "PoisonedContextError", {"cuda_code": 700}),
        ("std::bad_alloc: cudaErrorMemoryAllocation: out of memory", "GPUOutOfMemoryError", {}),
        # cudnn_graph.h of cuDNN 9.2 and newer, curand.h: they have names of their own for it
        ("CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0", "GPUOutOfMemoryError", {}),
        ("CUDNN failure 4004: unrecognized error code ; GPU=0 ; hostname=h", "GPUOutOfMemoryError", {}),
        # triton-inference-server/server issue 7296
        ("CUDNN failure 4000: unrecognized error code ; GPU=0 ; hostname=b8ba6e13da2b",
            "ProviderFailureError", {"status": "CUDNN_STATUS_INTERNAL_ERROR"}),
        # cudnn_graph.h; cuBLAS says so of half precision on GPUs before 5.3
        ("CUDNN failure 3007: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH ; GPU=0", "UnsupportedDeviceError",
            {"compute_capability": (9, 0)}),
        ("CUBLAS failure 8: CUBLAS_STATUS_ARCH_MISMATCH ; GPU=0", "UnsupportedDeviceError", {"device": "NVIDIA H200"}),
        # NVIDIA/Model-Optimizer issue 2326, flatironinstitute/nemos issue 317
        ("CUDNN failure 1008: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED ; GPU=0", "LibraryNotFoundError",
            {"missing": ("libcudnn.so.9",)}),
        ("CURAND failure 102: CURAND_STATUS_ALLOCATION_FAILED ; GPU=0", "GPUOutOfMemoryError", {}),
        ("CUDNN failure 4003: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ; GPU=0",
            "ProviderFailureError", {"library": "CUDNN"}),
        # tensorrt_execution_provider.cc, issue 26170
        ("TensorRT EP execution context enqueue failed.", "ProviderFailureError", {"library": "TensorRT"}),
    ],
)  # fmt: skip
def test_failures_of_what_stands_beside_the_arena(text: str, error: str, details: dict[str, Any]) -> None:
    assert_understood(text, error, details)


@pytest.mark.parametrize(
    ("text", "error", "advice"),
    [
        ("CUDA failure 221: PTX JIT compiler library not found", "ProviderFailureError",
            "cudaErrorJitCompilerNotFound"),
        ("CUDA failure 222: the provided PTX was compiled with an unsupported toolchain.", "DriverTooOldError",
            "install a newer NVIDIA driver"),
        ("radix_sort: cudaErrorUnsupportedPtxVersion: the provided PTX was compiled with an unsupported toolchain.",
            "DriverTooOldError", "install a newer NVIDIA driver"),
        ("CUDA failure 999: unknown error", "ProviderFailureError", "grep -i xid"),
    ],
)  # fmt: skip
def test_what_the_driver_did_not_compile_is_its_own_fault(text: str, error: str, advice: str) -> None:
    found = explain_run(NODE.format("conv") + text, "Fail", GPU)
    assert type(found).__name__ == error
    assert advice in str(found)


@pytest.mark.parametrize(
    "text",
    [
        # issue 19259, on an L4
        r"D:\a\_work\1\s\onnxruntime\contrib_ops/cuda/bert/tensorrt_fused_multihead_attention/"
        "fused_multihead_attention_v2.h:3189 onnxruntime::contrib::cuda::FusedMultiHeadAttentionXMMAKernelV2::run "
        "findIter != mFunctions.end() was false. Failed to find kernel: s=256 d=32 interleaved=0 forceUnroll=0 "
        "withRelativePositionBias=0 flash_attention=0 causal_mask=0\nWas the plugin compiled on a compatible CUDA and "
        "SM version?\n\t Compiled on CUDA 11080\n\t Current SM version: 89\n",
        "BFloat16 MatMulNBits is not supported on cuda device with compute capability < 8.0",
        "bfloat16 requires Ampere and above GPUs with Compute Capability >= 8. Got major=7 and minor=5",
        "QOrderedMatmul need sm75 or highter",
    ],
)
def test_an_operator_that_is_for_other_gpus(text: str) -> None:
    found = explain_run(NODE.format("conv") + text, "RuntimeException", GPU)
    assert isinstance(found, UnsupportedDeviceError)
    assert (found.device, found.compute_capability) == ("NVIDIA H200", (9, 0))
    assert explain_run(NODE.format(text) + "indices element out of data bounds, idx=9", "Fail", GPU) is None
    assert isinstance(explain_opening(f"Exception during initialization: {text}", HEALTHY), UnsupportedDeviceError)
    quoted = f"[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Foo(1) node '{text}'"
    assert explain_opening(quoted, HEALTHY) is None


@pytest.mark.parametrize(
    "text",
    [
        # DavideCatto/XFeat-ONNX issue 2, onnxruntime issues 13090 and 16305, triton's onnxruntime_backend issue 95
        "/onnxruntime_src/onnxruntime/core/providers/cuda/math/topk.cc:84 onnxruntime::common::Status onnxruntime::cuda"
        "::TopK<inputk>::ComputeInternal(onnxruntime::OpKernelContext*) const [with bool inputk = true] K_ >= 0 && K_ "
        "<= tensor_X->Shape().GetDims()[axis] was false.\n",
        "Expand_2355: left operand cannot broadcast on dim 0 LeftShape: {1000,1}, RightShape: {0,0}",
        "bad allocation",
        "not enough space: expected 270080, got 261760",
    ],
)
def test_what_is_wrong_with_the_values_or_the_host_stays_onnx_runtimes_own(text: str) -> None:
    assert explain_run(NODE.format("conv") + text, "RuntimeException", GPU) is None


@pytest.mark.parametrize("words", [b"\0CUDA error \0", b"\0cudaMallocHost((void**)&p, size)\0"])
def test_the_words_of_a_kernel_are_in_the_installed_provider(words: bytes) -> None:
    """Those of CudaKernel::Compute are joined when they are said: "CUDA error ", the name of the error, ":"."""
    provider = installed_site() / "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    with provider.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(words) > 0


@pytest.mark.parametrize(
    "name",
    [
        "CUDA failure 700: x",
        "CUDA error cudaErrorIllegalAddress:x",
        "requested buffer of size 5",
        "cuDNN is unavailable",
        "TensorRT EP",
    ],
)
def test_the_name_of_a_node_says_nothing_about_the_gpu(name: str) -> None:
    assert explain_run(NODE.format(name) + "indices element out of data bounds, idx=9", "Fail", GPU) is None
    shapes = f"{name}: left operand cannot broadcast on dim 0 LeftShape: {{1000,1}}, RightShape: {{0,0}}"
    assert explain_run(NODE.format(name) + shapes, "RuntimeException", GPU) is None


WORDS = [
    "CUDA failure 700: an illegal memory access was encountered",
    "CUDA failure 999: unknown error",
    "Status Message: CUDA failure 700: x",
    "Failed to allocate memory for requested buffer of size 5",
    "cuDNN is not available",
    "CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR",
]

# Over the lab's driver, in whose context all is well: a client's names reach ONNX Runtime by every way that there is.


@pytest.fixture(scope="module")
def named_by_clients(module_lab: Lab, provider_library: str) -> Any:
    """What came of each way, and whether sessions worked afterwards."""
    return (
        module_lab.machine_that_places(provider_library)
        .run_program("diagnosis.run_words_on_gpus.named", json.dumps(WORDS))
        .ok()
        .json
    )


def test_a_name_that_a_client_chose_is_never_an_error_of_the_gpu(named_by_clients: Any) -> None:
    named, works = named_by_clients
    assert {way: len(found) for way, found in named.items()} == dict.fromkeys(named, len(WORDS))
    typed = [text for way in named.values() for _, is_typed, text in way if is_typed]
    assert typed == []
    assert works == [[3], [3]]


def test_the_driver_decides_whether_a_sticky_error_is_one(lab: Lab, provider_library: str) -> None:
    found = lab.machine_that_places(provider_library).run_program("diagnosis.run_words_on_gpus.sticky").ok().json
    assert found == [["Fail", None], ["Fail", None], ["PoisonedContextError", "PoisonedContextError"]]


@pytest.mark.parametrize("words", ["CUDA failure 700: x", "requested buffer of size 5", "cuDNN is unavailable"])
def test_names_in_a_model_that_cannot_be_read_say_nothing_about_the_gpu(
    words: str, lab: Lab, provider_library: str
) -> None:
    """The text of that says nothing of loading a model where it came as bytes."""
    found = lab.machine_that_places(provider_library).run_program("diagnosis.run_words_on_gpus.unfit", words).ok().json
    assert len(found) == 8
    assert found[::2] == found[1::2]
    assert all(words in text for _, text in found)


def test_a_process_without_a_context_has_none_to_lose(lab: Lab, provider_library: str) -> None:
    found = (
        lab.machine_that_places(provider_library).run_program("diagnosis.run_words_on_gpus.without_context").ok().json
    )
    assert found == ["PoisonedContextError", "cuda", "PoisonedContextError", "PoisonedContextError"]


@pytest.mark.parametrize("words", ["CUDA failure 700: x", "requested buffer of size 5", "cuDNN is unavailable"])
def test_the_name_of_a_node_does_not_decide_why_a_model_is_refused(words: str, lab: Lab, provider_library: str) -> None:
    """CUDA has no Tan, and the CPU none for double: the text of that quotes the node."""
    ours, plain = (
        lab.machine_that_places(provider_library).run_program("diagnosis.run_words_on_gpus.refused", words).ok().json
    )
    assert words in plain[1]
    assert ours == plain


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("cuDNN is unavailable or disabled for CUDA Execution Provider: cuDNN is not available.", "libcudnn.so.9"),
        ("cuFFT is unavailable for CUDA Execution Provider: cuFFT is not available.", "libcufft.so.12"),
    ],
)
def test_a_library_that_is_opened_at_need_is_named_as_the_loader_knows_it(text: str, missing: str) -> None:
    """Of a model in ONNX Runtime's own format nobody knows before what it needs."""
    found = explain_run(f"[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : {text}", "NotImplemented", GPU)
    assert isinstance(found, LibraryNotFoundError)
    assert found.details()["missing"] == (missing,)
    assert "ortgpu doctor" in found.fixes[0]


def test_the_node_in_a_branch_is_the_one_that_failed() -> None:
    text = NODE.format("If_1") + NODE.format("CUDA failure 700: x") + "CUDA failure 719: unspecified launch failure"
    found = explain_run(text, "Fail", GPU)
    assert found is not None
    assert found.details()["cuda_code"] == 719


def test_wrong_arguments_and_exceptions_of_the_caller_are_theirs() -> None:
    said = child("diagnosis.run_words.wrong_arguments_and_exceptions_of_the_caller_are_theirs")
    assert [each["type"] for each in said] == ["ValueError", "ValueError", "InvalidArgument", "KeyError"]


@pytest.mark.parametrize(
    ("text", "summary", "advice"),
    [
        (ARENA + "Available memory of 67108864 is smaller than requested bytes of 268435456",
            "the session's gpu_mem_limit is reached: 256 MiB were asked for", "raise that provider option"),
        (ARENA + "Failed to allocate memory for requested buffer of size 1073741824",
            "the GPU ran out of memory: 1024 MiB were asked for", "stop other processes on the GPU"),
    ],
)  # fmt: skip
def test_what_was_too_little(text: str, summary: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "read_gpu_memory", lambda uuid: (1 << 30, 150 << 30))
    monkeypatch.setattr(driver, "processes_on", lambda uuid: {})
    found = explain_run(NODE.format("conv") + text, "Fail", GPU)
    assert isinstance(found, GPUOutOfMemoryError)
    assert found.summary == summary
    assert advice in found.fixes[-1]
    assert ".cc:" not in found.evidence[0], "the C++ signature tells a user nothing"


def test_who_else_holds_memory_of_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {os.getpid(): 5 << 30, 4711: 3 << 30, 4712: None}
    monkeypatch.setattr(driver, "read_gpu_memory", lambda uuid: (1 << 30, 150 << 30))
    monkeypatch.setattr(driver, "processes_on", lambda uuid: held)
    found = explain_run(ARENA + "Failed to allocate memory for requested buffer of size 2147483648", "Fail", GPU)
    assert isinstance(found, GPUOutOfMemoryError)
    assert (found.requested, found.free, found.total) == (2 << 30, 1 << 30, 150 << 30)
    assert "1024 of 153600 MiB free" in found.evidence[1]
    assert found.evidence[2:] == ("process 4711 holds 3072 MiB", "process 4712 holds unknown MiB")


def test_memory_of_the_host_is_not_that_of_a_gpu() -> None:
    """The arena of the CPU has the same words."""
    raised = child("diagnosis.run_words.memory_of_the_host_is_not_that_of_a_gpu")
    assert raised[0] == str(CPU)
    assert raised[1]["type"] in ("Fail", "RuntimeException")
    assert "requested buffer of size 4000000000000000" in raised[1]["text"]


@pytest.mark.parametrize(
    ("text", "error", "details"),
    [
        # cuda_kernel.h: what ONNX Runtime says of a kernel that was not launched, issues 22441 and 27725
        ("CUDA error cudaErrorNoKernelImageForDevice:no kernel image is available for execution on the device",
            "UnsupportedDeviceError", {"compute_capability": (9, 0)}),
        ("CUDA error cudaErrorIllegalAddress:an illegal memory access was encountered",
            "PoisonedContextError", {"cuda_code": 700}),
        ("CUDA error cudaErrorInvalidDeviceFunction:invalid device function",  # issue 8972
            "UnsupportedDeviceError", {"compute_capability": (9, 0)}),
        # kijai/ComfyUI-WanAnimatePreprocess issue 4
        ("CUDA error cudaErrorInvalidPtx:a PTX JIT compilation failed", "UnsupportedDeviceError", {}),
        ("CUDA error cudaErrorInvalidKernelImage:device kernel image is invalid", "UnsupportedDeviceError", {}),
        ("CUDA error cudaErrorCallRequiresNewerDriver:API call is not supported in the installed CUDA driver",
            "DriverTooOldError", {}),
        ("CUDA error cudaErrorMemoryAllocation:out of memory", "GPUOutOfMemoryError", {}),
        ("CUDA error cudaErrorInvalidConfiguration:invalid configuration argument",
            "ProviderFailureError", {"library": "CUDA", "status": "cudaErrorInvalidConfiguration"}),
    ],
)  # fmt: skip
def test_a_kernel_that_was_not_launched(text: str, error: str, details: dict[str, Any]) -> None:
    assert_understood(text, error, details)


def test_the_names_are_those_of_the_runtime() -> None:
    """An older one does not know them all: that of CUDA 12 lacks five."""
    code = "diagnosis.run_words.the_names_are_those_of_the_runtime"
    done = run_python(code).ok()
    assert done.stdout == "67 True None"


@pytest.mark.parametrize(("count", "named"), [(0, False), (1, False), (2, True), (3, True)])
def test_other_sessions_are_named_where_there_are_some(
    count: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that ran out of memory is in the list, too."""
    monkeypatch.setattr(driver, "read_gpu_memory", lambda uuid: None)
    monkeypatch.setattr(driver, "processes_on", lambda uuid: {})
    monkeypatch.setattr(devices, "sessions_on_gpu", lambda every, uuid: list(range(count)))
    monkeypatch.setattr(devices, "named_sessions", lambda every: [f"session {number}" for number in every])
    found = explain_run(ARENA + "Failed to allocate memory for requested buffer of size 1024", "Fail", GPU)
    assert found is not None
    assert (devices.CLOSE_SESSIONS in found.fixes) is named
    assert [line for line in found.evidence if line.startswith("session ")] == [
        f"session {number}" for number in range(count if named else 0)
    ]


@pytest.mark.parametrize(
    ("capability", "fix"),
    [
        ((6, 1), "install cuDNN 9.10, and restart this process"),
        ((7, 0), "install cuDNN 9.10, and restart this process"),  # the last one for a V100
        ((7, 5), "install a newer cuDNN, and restart this process"),
        ((10, 3), "install a newer cuDNN, and restart this process"),
    ],
)
def test_a_cudnn_without_code_is_replaced_by_one_that_has_it(
    capability: tuple[int, int], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (Architecture(8, 0, ptx=False, specific=False),)
    paths = [f"/x/{name}.so.9" for name in CUDNN_CODE]
    monkeypatch.setattr(classifier, "read_mapped_libraries", lambda: paths)
    monkeypatch.setattr(classifier, "read_architectures_of_cudnn", lambda found: held if found == paths else None)
    text = "CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; expr=x;"
    found = explain_run(text, "Fail", replace(GPU, compute_capability=capability))
    assert isinstance(found, UnsupportedDeviceError)
    assert found.fixes == (fix,)
    assert f"compute capability {capability[0]}.{capability[1]}" in found.summary
