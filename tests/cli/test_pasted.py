"""`ortgpu explain` with what people paste: lines of ONNX Runtime, of the loader and of Python, from any machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ortgpu.__main__ import main
from ortgpu.cli.pasted import recognise
from ortgpu.errors import catalogue
from tests.support.children import run_python
from tests.support.command_line import DEADLINE, NO_GPU

BRIDGE = (
    "2026-11-23 16:49:15.358 [E:onnxruntime:Default, provider_bridge_ort.cc:2458 operator()] /onnxruntime_src/"
    "onnxruntime/core/session/provider_bridge_ort.cc:2043 onnxruntime::Provider& onnxruntime::ProviderLibrary::Get() "
    "[ONNXRuntimeError] : 1 : FAIL : Failed to load library /x/libonnxruntime_providers_cuda.so with error: "
)
WARNED = (
    "[W:onnxruntime:Default, onnxruntime_pybind_state.cc:1295 CreateExecutionProviderFactoryInstance] Failed to create "
    "CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all dependencies as mentioned in the GPU "
    "requirements page (https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#requirements)"
)
CALL = (
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 std::conditional_t onnxruntime::CudaCall(...) "
)
RUN = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Name:'a' "
ABSENT = "cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"{BRIDGE}libcublasLt.so.12: {ABSENT}\n\n{WARNED}\n", "library-not-found"),
        (f"{WARNED}\n{BRIDGE}libcudnn.so.9: {ABSENT}", "library-not-found"),
        (WARNED, "provider-fallback"),
        # microsoft/onnxruntime#22767, li-plus/chatglm.cpp#12
        (f"{CALL}CUDA failure 222: the provided PTX was compiled with an unsupported toolchain. ; GPU=0",
            "driver-too-old"),
        ("CUDA error cudaErrorUnsupportedPtxVersion:the provided PTX was compiled with an unsupported toolchain.",
            "driver-too-old"),
        # aigc-apps/sd-webui-EasyPhoto#410
        ("EP Error /x/onnxruntime_pybind_state.cc:729 void onnxruntime::python::RegisterTensorRTPluginsAsCustomOps("
            "PySessionOptions&) Please install TensorRT libraries as mentioned in the GPU requirements page.\n"
            " when using ['TensorrtExecutionProvider', 'CUDAExecutionProvider']", "library-not-found"),
        # pytorch/pytorch#111469, as Python and as ctypes say it
        *((f"{kind}: /v/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1, version libnvJitLink.so.12",
            "library-version") for kind in ("ImportError", "OSError")),
        # neuralchen/SimSwap#98, microsoft/onnxruntime#18973, huggingface/optimum#1402, pytorch/TensorRT#3893
        ("RuntimeError: CUDA_PATH is set but CUDA wasnt able to be loaded. Please install the correct version of CUDA "
            "andcuDNN", "library-not-found"),
        (r'LoadLibrary failed with error 127 "" when trying to load "C:\a\onnxruntime_providers_cuda.dll"',
            "library-version"),
        ("ValueError: Asked to use CUDAExecutionProvider, but `onnxruntime-gpu` package was not found.",
            "cpu-only-package"),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.13.0. Make sure that it is installed correctly.",
            "library-not-found"),
        (f"{BRIDGE}libcuda.so.1: {ABSENT}", "driver-not-found"),
        (f"ImportError: libcudart.so.13: {ABSENT}", "library-not-found"),
        (f"{BRIDGE}/x/libcublas.so.13: undefined symbol: cublasLtFoo, version libcublasLt.so.13", "library-version"),
        (f"{BRIDGE}/x/libcudnn.so.9: failed to map segment from shared object", "broken-package"),
        ("ImportError: /lib/libc.so.6: version `GLIBC_2.34' not found (required by /x/onnxruntime_pybind11_state.so)",
            "unsupported-platform"),
        ("ImportError: Error loading shared library ld-linux-x86-64.so.2: No such file or directory (needed by "
            "/usr/lib/python3.12/site-packages/onnxruntime/capi/onnxruntime_pybind11_state.so)",
            "unsupported-platform"),
        (r'[ONNXRuntimeError] : 1 : FAIL : Error loading "C:\x\onnxruntime_providers_cuda.dll" which depends on '
            r'"cudnn64_9.dll" which is missing. (Error 126: "The specified module could not be found.")',
            "library-not-found"),
        (r'[ONNXRuntimeError] : 1 : FAIL : Error loading "C:\x\onnxruntime_providers_cuda.dll" which depends on '
            r'"nvcuda.dll" which is missing. (Error 126: "The specified module could not be found.")',
            "driver-not-found"),
        ("ImportError: DLL load failed while importing onnxruntime_pybind11_state: A dynamic link library (DLL) "
            "initialization routine failed.", "broken-package"),
        ("UserWarning: Specified provider 'CUDAExecutionProvider' is not in available provider names.Available "
            "providers: 'AzureExecutionProvider, CPUExecutionProvider'", "cpu-only-package"),
        ("Traceback (most recent call last):\n  File \"app.py\", line 1, in <module>\n    import onnxruntime\n"
            "ModuleNotFoundError: No module named 'onnxruntime'\n", "onnxruntime-not-installed"),
        ("AttributeError: module 'onnxruntime' has no attribute 'InferenceSession'", "broken-package"),
        ("ModuleNotFoundError: No module named 'onnxruntime.capi'", "broken-package"),
        (f"{CALL}CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version", "driver-too-old"),
        (f"{CALL}CUDA failure 100: no CUDA-capable device is detected", "no-device"),
        (f"{CALL}CUDA failure 101: invalid device ordinal", "device-not-found"),
        (f"{CALL}CUDA failure 803: system has unsupported display driver", "driver-unusable"),
        (f"{CALL}CUDA failure 46: all CUDA-capable devices are busy or unavailable", "device-busy"),
        (f"{CALL}CUDA failure 2: out of memory", "insufficient-device-memory"),
        (f"{RUN}Status Message: {CALL}CUDA failure 2: out of memory", "gpu-out-of-memory"),
        (f"{RUN}Status Message: {CALL}CUDA failure 700: an illegal memory access", "poisoned-context"),
        (f"{RUN}Status Message: CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED", "provider-failure"),
        ('EP Error Unknown provider option: "cudnn_conv_algo". when using [\'CUDAExecutionProvider\']',
            "provider-option"),
        ("    raise error\northpu\nortgpu.errors.DriverNotFoundError: the NVIDIA driver's library cannot be loaded",
            "driver-not-found"),
        ("To fix it:\n    look\nMore: ortgpu explain rank-device\n", "rank-device"),
        ("More: ortgpu explain placement", "placement"),
        ("DriverNotFoundError: the NVIDIA driver's library libcuda.so.1 cannot be loaded", "driver-not-found"),
        ("model.onnx is running on the CPU, as allowed [no-device]: CUDA shows this process no GPU", "no-device"),
        ("SKIPPED [1] test_model.py:6: no GPU can be used: driver-too-old: the driver is old", "driver-too-old"),
        ("    except GPUError as error:\nortgpu.errors.DeviceBusyError: the GPU is busy", "device-busy"),
        ("ortgpu.errors.GPUError: the model m.onnx is a pointer of Git LFS", "gpu-error"),
        ("[W:onnxruntime:, transformer_memcpy.cc:83 ApplyImpl] 3 Memcpy nodes are added to the graph main_graph for "
            "CUDAExecutionProvider. It might have negative impact on performance", "placement"),
        ("[W:onnxruntime:, session_state.cc:1280 VerifyEachNodeIsAssignedToAnEp] Some nodes were not assigned to the "
            "preferred execution providers which may or may not have an negative impact on performance.", "placement"),
        ("app.py:3: CPUNodesWarning: 2 of 5 nodes compute on the CPU: Unique (2)", "placement"),
        (f"Could not load library libcudnn_ops_infer.so.8. Error: libcudnn_ops_infer.so.8: {ABSENT}",
            "library-not-found"),
        ("Unable to load any of {libcudnn_cnn.so.9.1.0, libcudnn_cnn.so.9.1, libcudnn_cnn.so.9, libcudnn_cnn.so}",
            "library-not-found"),
        (r'[ONNXRuntimeError] : 1 : FAIL : LoadLibrary failed with error 126 "" when trying to load '
            r'"C:\x\onnxruntime_providers_cuda.dll"', "library-not-found"),
        ("Could not locate cudnn_ops64_9.dll. Please make sure it is in your library path!", "library-not-found"),
    ],
)  # fmt: skip
def test_text_leads_to_its_code(text: str, code: str) -> None:
    found = recognise(text)
    assert found is not None
    assert found[0] == code in catalogue()
    assert found[1] in text


@pytest.mark.parametrize(
    "text",
    [
        "hello world",
        "ModuleNotFoundError: No module named 'pandas'",
        "rm: cannot remove 'x': Operation not permitted",
        "[ONNXRuntimeError] : 3 : NO_SUCHFILE : Load model from CUDA failure 700/m.onnx failed: File doesn't exist",
        "ortgpu explain nothing-of-this-name",
        "/srv/no-device/app.py: placement of the text, with --no-device",
    ],
)
def test_other_text_leads_nowhere(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert recognise(text) is None
    assert main(["explain", text]) == 2
    assert "no check knows a line of this text" in capsys.readouterr().err


def test_text_in_quotes_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"libcublas.so.12: {ABSENT}"
    for arguments in ([words], words.split()):
        assert main(["explain", *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("library-not-found: ")
        assert captured.err == f"In the text: {words}\n"


def test_what_onnxruntime_says_here_is_explained_from_a_pipe() -> None:
    """Plain ONNX Runtime, in a process without ortgpu: it finds no CUDA library, or no GPU."""
    program = """
        import onnx.parser, onnxruntime
        text = '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
        model = onnx.parser.parse_model(text).SerializeToString()
        onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"])
    """
    said = run_python(program, env={**os.environ, **NO_GPU}).stderr
    assert "onnxruntime" in said
    command = [sys.executable, "-m", "ortgpu", "explain", "-"]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.split(":")[0] in {"library-not-found", "no-device", "driver-too-old"}, said


def test_long_log_takes_no_time() -> None:
    started = time.monotonic()
    assert recognise("2026-11-23 INFO a request was answered in 3 ms\n" * 5_000 + "CUDA failure 100: x") is not None
    assert time.monotonic() - started < 20  # seconds; it takes one


def test_long_line_without_spaces_is_read() -> None:
    """As a log holds an image in base64: patterns that start anew at each letter would take hours for it."""
    said = f"2026-11-23 a request holds {'QUJD' * 500_000}\n{CALL}CUDA failure 100: no CUDA-capable device is detected"
    command = [sys.executable, "-m", "ortgpu", "explain", "-"]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.startswith("no-device: ")
