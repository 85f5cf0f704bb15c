"""What ONNX Runtime's words mean, with the facts beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ortgpu.diagnosis.checks.classifier import explain_opening, explain_run
from ortgpu.environment.gpu.cuda import CudaState
from ortgpu.errors import (
    DeviceNotFoundError,
    GPUOutOfMemoryError,
    InsufficientDeviceMemoryError,
    ProviderFailureError,
)
from tests.support.made_facts import (
    CUDA_H200,
    H200,
    HEALTHY,
    NO_DRIVER,
    Change,
    all_of,
    nvml,
    observed,
    part,
    request,
    variables,
)

PREFIX = (
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 std::conditional_t onnxruntime::CudaCall(...) "
)
SUFFIX = (
    " ; GPU=-1 ; hostname=h ; file=/onnxruntime_src/cuda_execution_provider.cc ; line=355 ; expr=cudaSetDevice(id);"
)


@pytest.mark.parametrize(
    ("text", "error", "details"),
    [
        (f"{PREFIX}CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version{SUFFIX}",
            "DriverTooOldError", {"needed_cuda": (13, 0)},),
        (f"{PREFIX}CUDA failure 100: no CUDA-capable device is detected{SUFFIX}", "NoDeviceError", {}),
        (f"{PREFIX}CUDA failure 101: invalid device ordinal{SUFFIX}", "DeviceNotFoundError", {}),
        (f"{PREFIX}CUDA failure 3: initialization error{SUFFIX}", "DriverUnusableError", {"cuda_code": 3}),
        (f"{PREFIX}CUDA failure 803: system has unsupported display driver / cuda driver combination{SUFFIX}",
            "DriverUnusableError", {"cuda_code": 803},),
        (f"{PREFIX}CUDA failure 999: unknown error{SUFFIX}", "DriverUnusableError", {"cuda_code": 999}),
        (f"{PREFIX}CUDA failure 46: all CUDA-capable devices are busy or unavailable{SUFFIX}", "DeviceBusyError", {}),
        (f"{PREFIX}CUDA failure 2: out of memory{SUFFIX}", "InsufficientDeviceMemoryError", {}),
        (f"{PREFIX}CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMallocHost((void**)&p, size);",
            "ProviderFailureError", {"library": "CUDA"}),
        (f"{PREFIX}CUDA failure 700: an illegal memory access was encountered{SUFFIX}", "PoisonedContextError",
            {"cuda_code": 700},),
        ("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Relu node. Name:'' "
            "Status Message: CUDA error cudaErrorIllegalAddress:an illegal memory access was encountered",
            "PoisonedContextError", {"cuda_code": 700},),
        (f"{PREFIX}CUDA failure 719: unspecified launch failure{SUFFIX}", "PoisonedContextError", {"cuda_code": 719}),
        (f"{PREFIX}CUDA failure 209: no kernel image is available for execution on the device{SUFFIX}",
            "UnsupportedDeviceError", {"compute_capability": (9, 0)},),
        (f"{PREFIX}CUDA failure 218: a PTX JIT compilation failed{SUFFIX}", "UnsupportedDeviceError", {}),
        ('Unknown provider option: "devise_id"', "ProviderOptionError", {"option": "devise_id"}),
        ("[ONNXRuntimeError] : 1 : FAIL : provider_options_utils.h:187 Parse Failed to parse provider option "
            '"arena_extend_strategy"', "ProviderOptionError", {"option": "arena_extend_strategy"},),
        ('[ONNXRuntimeError] : 1 : FAIL : Failed to map enum name to value: "x" for option "cudnn_conv_algo_search"',
            "ProviderOptionError", {"option": "cudnn_conv_algo_search"},),
        ("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: /src/bfc_arena.cc:376 void* "
            "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer "
            "of size 4294967296\n", "InsufficientDeviceMemoryError", {"requested": 4294967296},),
        ("[ONNXRuntimeError] : 1 : FAIL : Exception during initialization: /src/bfc_arena.cc:360 void* BFCArena"
            "::AllocateRawInternal(size_t) Available memory of 1048576 is smaller than requested bytes of 2097152",
            "InsufficientDeviceMemoryError", {"requested": 2097152},),
        (f"{PREFIX}CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; expr=cublasCreate(&cublas_handle_);",
            "InsufficientDeviceMemoryError", {},),
        (f"{PREFIX}CUBLAS failure 3: the resource allocation failed ; GPU=0 ; expr=cublasCreate(&cublas_handle_);",
            "InsufficientDeviceMemoryError", {},),
        (f"{PREFIX}CUBLAS failure 13: the function failed to launch on the GPU ; expr=cublasGemm()",
            "ProviderFailureError", {"library": "CUBLAS", "status": "CUBLAS_STATUS_EXECUTION_FAILED"},),
        (f"{PREFIX}CUBLAS failure 99: unrecognized status ; expr=cublasGemm()",
            "ProviderFailureError", {"library": "CUBLAS", "status": "status 99"},),
        ("CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "LibraryConflictError", {},),
        ("CUDNN failure 1002: unrecognized error code ; GPU=0", "LibraryConflictError", {},),
        ("CUDNN failure 13: CUDNN_STATUS_VERSION_MISMATCH ; GPU=0", "LibraryConflictError", {},),  # cuDNN 8's name
        ("CUDNN failure 1008: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED ; GPU=0 ; expr=cudnnCreate(&cudnn_handle_);",
            "LibraryNotFoundError", {"missing": ("libcudnn.so.9",)},),
        # sdbds/TRELLIS-for-windows issue 34
        (r"D:\a\_work\1\s\onnxruntime\python\onnxruntime_pybind_state.cc:507 onnxruntime::python::"
            "RegisterTensorRTPluginsAsCustomOps Please install TensorRT libraries as mentioned in the GPU requirements "
            "page, make sure they're in the PATH or LD_LIBRARY_PATH, and that your GPU is supported.\n",
            "LibraryNotFoundError", {},),
        ("[ONNXRuntimeError] : 1 : FAIL : TensorRT EP could not deserialize engine from binary data",  # issue 22139
            "ProviderFailureError", {"library": "TensorRT"},),
        ("[ONNXRuntimeError] : 11 : EP_FAIL : CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED", "ProviderFailureError",
            {"status": "CUDNN_BACKEND_API_FAILED"},),
        ("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : cuDNN is not available. Install cuDNN, or set enable_cudnn=0",
            "LibraryNotFoundError", {"missing": ("libcudnn.so.9",)},),
        # facefusion issue 187, pykeio/ort issue 548, and the words of 1.22 and newer (pull request 24053)
        (r"D:\a\_work\1\s\onnxruntime\core\session\provider_bridge_ort.cc:1193 onnxruntime::ProviderLibrary::Get "
            r'[ONNXRuntimeError] : 1 : FAIL : LoadLibrary failed with error 126 "" when trying to load "D:\AI\venv\Lib'
            r'\site-packages\onnxruntime\capi\onnxruntime_providers_tensorrt.dll"' "\n",
            "LibraryNotFoundError", {},),
        (r'[ONNXRuntimeError] : 1 : FAIL : LoadLibrary failed with error 127 "" when trying to load "D:\AI\venv\Lib'
            r'\site-packages\onnxruntime\capi\onnxruntime_providers_tensorrt.dll"' "\n",
            "ProviderFailureError", {"library": "TensorRT"},),
        ("/x/provider_bridge_ort.cc:1952 Provider &onnxruntime::ProviderLibrary::Get() [ONNXRuntimeError] : 1 : FAIL : "
            "Failed to load library /x/libonnxruntime_providers_cuda.so with error: libcublasLt.so.12: cannot open "
            "shared object file: No such file or directory\n", "ProviderFallbackError", {},),
        (r'[ONNXRuntimeError] : 1 : FAIL : Error loading "C:\x\onnxruntime_providers_cuda.dll" which depends on '
            r'"cudnn64_9.dll" which is missing. (Error 126: "The specified module could not be found.")' " ",
            "ProviderFallbackError", {},),
        ("Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all dependencies",
            "ProviderFallbackError", {},),
    ],
)  # fmt: skip
def test_words_about_the_gpu(text: str, error: str, details: dict[str, Any]) -> None:
    found = explain_opening(text, HEALTHY)
    assert found is not None
    assert type(found).__name__ == error
    assert {name: found.details()[name] for name in details} == details
    if not text.endswith('"'):
        assert PREFIX not in str(found), "the C++ signature tells a user nothing"


WITHOUT_A_HANDLE = [
    # issue 2386
    "CUBLAS failure 1: CUBLAS_STATUS_NOT_INITIALIZED ; GPU=0 ; hostname=h ; expr=cublasCreate(&cublas_handle_); ",
    "CUBLAS failure 1: the library was not initialized ; GPU=0 ; expr=cublasCreate(&cublas_handle_);",
    # issue 15718, after a change of the driver
    "CUDNN failure 1: CUDNN_STATUS_NOT_INITIALIZED ; GPU=5 ; hostname=h ; expr=cudnnCreate(&cudnn_handle_); ",
    # issue 26322, and pykeio/ort issue 467, where cuDNN was of another CUDA
    "CUDNN failure 1001: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0 ; hostname=PC-5CG50729R0 ; file=D:\\a\\_work\\1\\s\\"
    "onnxruntime\\core\\providers\\cuda\\cuda_execution_provider.cc ; line=182 ; expr=cudnnCreate(&cudnn_handle_);",
]
# issue 15355
INTERNAL = "CUDNN failure 4: CUDNN_STATUS_INTERNAL_ERROR ; GPU=0 ; hostname=xxx ; expr=cudnnCreate(&cudnn_handle_);"
INITIALISING = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: "


@pytest.mark.parametrize("text", WITHOUT_A_HANDLE)
def test_a_gpu_is_not_full_as_long_as_it_has_memory(text: str) -> None:
    found = explain_opening(INITIALISING + PREFIX + text, HEALTHY)
    assert isinstance(found, ProviderFailureError)
    assert "though the GPU has free memory" in found.summary
    assert "fit ONNX Runtime's CUDA" in found.fixes[0]
    full = nvml(gpus=(replace(H200, memory_free=300 << 20),))
    assert isinstance(explain_opening(INITIALISING + PREFIX + text, full(HEALTHY)), InsufficientDeviceMemoryError)
    unknown = nvml(gpus=())
    assert isinstance(explain_opening(INITIALISING + PREFIX + text, unknown(HEALTHY)), InsufficientDeviceMemoryError)


def test_a_handle_that_is_not_made_has_causes_of_its_own() -> None:
    """Whatever the model is, and whenever it is made: at the first run, too."""
    for found in (
        explain_opening(INITIALISING + PREFIX + INTERNAL, HEALTHY),
        explain_run(PREFIX + INTERNAL, "Fail", None),
    ):
        assert isinstance(found, ProviderFailureError)
        assert (found.library, found.status) == ("CUDNN", "CUDNN_STATUS_INTERNAL_ERROR")
        assert any("open files" in fix for fix in found.fixes)
        assert "free memory" not in found.summary
    full = nvml(gpus=(replace(H200, memory_free=300 << 20),))  # hacksider/Deep-Live-Cam issue 1318
    assert isinstance(explain_opening(INITIALISING + PREFIX + INTERNAL, full(HEALTHY)), InsufficientDeviceMemoryError)


@pytest.mark.parametrize(
    ("text", "change", "error"),
    [
        ("CUDA failure 35: x", NO_DRIVER, "DriverNotFoundError"),
        ("CUDA failure 35: x", part("driver", cuda_version=(12, 8)), "DriverTooOldError"),
        ("CUDA failure 100: x", variables(CUDA_VISIBLE_DEVICES="-1"), "NoDeviceError"),
        ("CUDA failure 101: x", request(device=5), "DeviceNotFoundError"),
        ("cuDNN is unavailable or disabled", request(cudnn_disabled=True, cudnn_operators=("Conv",)),
            "ProviderOptionError",),
    ],
)  # fmt: skip
def test_words_and_facts_together(text: str, change: Change, error: str) -> None:
    found = explain_opening(text, change(HEALTHY))
    assert type(found).__name__ == error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[ONNXRuntimeError] : 3 : NO_SUCHFILE : Load model from /m.onnx failed: File doesn't exist",
        "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from /m.onnx failed:Protobuf parsing failed.",
        "[ONNXRuntimeError] : 3 : NO_SUCHFILE : Load model from /CUDA EP/m.onnx failed:File doesn't exist",
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Load model from /CUDAExecutionProvider/m.onnx failed:No graph",
        "[ONNXRuntimeError] : 1 : FAIL : External data path validation failed for initializer: w. Error: "
        'tensorprotoutils.cc:461 External data path does not exist: "/gpu/CUDAExecutionProvider/my model/w.data"',
        "[ONNXRuntimeError] : 1 : FAIL : Deserialize tensor w failed.env.cc:538 Random-access reads "
        "require a regular file: /gpu/CUDAExecutionProvider/w.data",
        "[ONNXRuntimeError] : 1 : FAIL : Deserialize tensor w failed.tensorprotoutils.cc:1876 External initializer: "
        "CUDAExecutionProvider/w offset: 0 size to read: 256 given file_length: 100 are out of bounds",
        "[ONNXRuntimeError] : 1 : FAIL : This is an invalid model. Error: two nodes with same node name (CUDA EP).",
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Foo(1) node 'CUDA EP'",
        "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. In Node, (CUDA failure 700: x, Foo) ...",
        "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. Error: No Op registered for Foo",
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Foo(1) node with name ''",
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the following indices",
        "[ONNXRuntimeError] : 1 : FAIL : Load model failed: Unsupported model IR version: 99, max supported IR 11",
        "Specified provider 'CUDAExecutionProvider' is not in available provider names. Available: 'CPU'",
        "Required inputs (['x']) are missing from input feed ([]).",
        # issues 20708 and 23114, 6670
        f"{INITIALISING}/onnxruntime_src/onnxruntime/contrib_ops/cuda/fused_conv.cc:19 onnxruntime::contrib::cuda::"
        "FusedConv<T>::FusedConv(const onnxruntime::OpKernelInfo&) [with T = float] [ONNXRuntimeError] : 2 : "
        'INVALID_ARGUMENT : unsupported conv activation mode "Sigmoid"\n',
        f"{INITIALISING}std::bad_alloc",
        "failure 35, error 100, and 803 nodes",
    ],
)
def test_words_about_something_else(text: str) -> None:
    assert explain_opening(text, HEALTHY) is None


@pytest.mark.parametrize(
    ("variables_of_launcher", "first"),
    [
        ({}, "Failed to allocate memory for requested buffer of size 5"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "on rank 1 of 2"),
        ({"RANK": "1"}, "Failed to allocate memory for requested buffer of size 5"),
    ],
    ids=["alone", "in a job", "launcher not known"],
)
def test_who_ran_out_of_memory(
    variables_of_launcher: dict[str, str], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables_of_launcher.items():
        monkeypatch.setenv(name, value)
    error = explain_run("Failed to allocate memory for requested buffer of size 5", "Fail", None)
    assert isinstance(error, GPUOutOfMemoryError)
    assert error.evidence[0] == first


def test_a_device_that_nobody_named_is_not_called_none() -> None:
    """itsnine/yolov5-onnxruntime issue 20: a session for the first GPU."""
    found = explain_opening(
        f"{PREFIX}CUDA failure 101: invalid device ordinal ; GPU=0 ; hostname=4dbec2b03d4e", HEALTHY
    )
    assert isinstance(found, DeviceNotFoundError)
    assert "None" not in str(found)
    assert "CUDA_VISIBLE_DEVICES" in found.fixes[0]


@pytest.mark.parametrize(
    "change",
    [
        observed(cuda=CudaState(0, (CUDA_H200,), 1)),
        all_of(observed(cuda=CudaState(0, None, 1)), nvml(available=False, error="not found", gpus=())),
    ],
    ids=["listed", "nothing known"],
)
def test_a_device_that_cuda_refuses_is_not_counted_among_none(change: Change) -> None:
    found = explain_opening("CUDA failure 101: invalid device ordinal", all_of(change, request(device=0))(HEALTHY))
    assert isinstance(found, DeviceNotFoundError)
    assert found.requested == 0
    assert "0 GPUs" not in str(found)
    assert "below 0" not in str(found)


def test_a_limit_of_the_callers_own_is_not_the_memory_of_the_gpu() -> None:
    found = explain_opening("Available memory of 1048576 is smaller than requested bytes of 2097152", HEALTHY)
    assert found is not None
    assert "gpu_mem_limit" in found.summary
    assert [str(fix) for fix in found.fixes] == ["raise the provider option gpu_mem_limit, or leave it out"]
