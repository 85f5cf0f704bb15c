"""What is said inside Python for Windows, under Wine, of libraries that its loader refuses.

Rows are those of the corpus. Errors that Wine does not answer (127, and those of guards) are put in its mouth.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.lab.windows import CUDNN, Windows
from tests.support.made_dlls import ARM64
from tests.windows.inside import CAPI, CUDA_OF_WHEELS, CUDNN_OF_WHEELS, MODEL, PROVIDER, REQUIRED, answering, ask

pytestmark = [pytest.mark.windows, pytest.mark.slow, pytest.mark.timeout(1200)]

LINKED = {"cublasLt64_13.dll": ["cublasLtCreate"], "cublas64_13.dll": ["cublasCreate_v2"]}  # each from one, in C
CUBLAS_LT, CUBLAS = (f"{CUDA_OF_WHEELS}\\{name}" for name in REQUIRED)


@pytest.fixture(autouse=True)
def _cuda(machine: Windows) -> None:
    machine.install_cuda()


def error_of(machine: Windows, *providers: str, first: str = "") -> Any:
    """The error that opening a session ends in; there is no other cause."""
    errors = ask(machine, "session", MODEL, *providers, first=first)["errors"]
    assert {error["type"] for error in errors} == {errors[0]["type"]}
    return errors[0]


def put_provider(machine: Windows, needs: Mapping[str, Sequence[str]], architecture: int | None = None) -> None:
    """Another provider, of which the package does not say that it was altered."""
    machine.remove("onnxruntime_gpu-1.31.1.dist-info/RECORD")
    machine.make(PROVIDER, needs={**LINKED, **needs}, machine=architecture)


def test_a_provider_that_links_what_is_nowhere(machine: Windows) -> None:
    """W01: error 126."""
    put_provider(machine, {"helper.dll": ["help"]})
    error = error_of(machine)
    assert (error["type"], error["details"]["missing"]) == ("LibraryNotFoundError", ["helper.dll"])
    assert "install what brings helper.dll" in error["fixes"][0]["text"]


def test_a_provider_for_another_machine(machine: Windows) -> None:
    put_provider(machine, {}, ARM64)
    error = error_of(machine)
    assert error["type"] == "BrokenPackageError"
    assert "built for aarch64, this is x86_64" in error["text"]


def test_a_provider_for_newer_libraries(machine: Windows) -> None:
    """W02: error 127."""
    machine.make(CUBLAS_LT, exports={"call": 0})
    error = error_of(machine, first=answering(127, "onnxruntime_providers_cuda.dll"))
    assert error["type"] == "LibraryVersionError"
    assert "lacks cublasLtCreate" in error["text"]
    assert error["details"]["found"] == {"cublasLt64_13.dll": CUBLAS_LT}


def test_a_cublas_of_another_release_is_loaded_already(machine: Windows) -> None:
    """W02. It is at fault, and not the file that Windows refuses."""
    other = "C:\\other\\cublasLt64_13.dll"
    machine.make(other, exports={"of_old": 0})
    machine.make(CUBLAS, needs={"cublasLt64_13.dll": ["of_new"]})
    first = f"import ctypes; ctypes.CDLL({other!r})\n{answering(127, 'cublas64_13.dll')}"
    error = error_of(machine, first=first)
    assert (error["type"], error["details"]["libraries"]) == ("LibraryConflictError", [other])
    assert f"it takes of_new from cublasLt64_13.dll, and {other} of this process does not have that" in error["text"]


@pytest.mark.parametrize("code", [225, 1260, 4551])
def test_a_guard_of_windows_blocks_a_library(code: int, machine: Windows) -> None:
    assert "virus scanner" in error_of(machine, first=answering(code, "cublas64_13.dll"))["fixes"][0]["text"]


def test_copies_under_the_name_of_another_release(machine: Windows) -> None:
    """W02: earlier on PATH."""
    machine.make("tool\\cublas64_12.dll", exports={"call": 0})
    machine.path("tool\\cublas64_12.dll").rename(machine.path("tool\\cublas64_13.dll"))
    machine.search("tool")
    found = ask(machine, "preloaded")
    assert {source for source, _ in found["libraries"].values()} == {"nvidia wheels"}
    why = "its own name is cublas64_12.dll, cublas64_13.dll is needed"
    assert found["rejected"] == {"C:\\tool\\cublas64_13.dll": [why, None]}


def test_parts_of_cudnn_that_are_missing_or_cut_short(machine: Windows) -> None:
    """W05."""
    machine.remove("nvidia/cudnn/bin/cudnn_cnn64_9.dll")
    part = f"{CUDNN_OF_WHEELS}\\cudnn_engines_tensor_ir64_9.dll"
    machine.write(part, machine.path(part).read_bytes()[:1100])
    (problem,) = [one for one in ask(machine, "diagnosed") if one["type"] == "LibraryNotFoundError"]
    assert problem["details"]["missing"] == ["cudnn_cnn64_9.dll", "cudnn_engines_tensor_ir64_9.dll"]
    assert "truncated: 1100 of" in problem["text"]
    assert "nvidia-cudnn-cu13" in problem["fixes"][0]["text"]


def test_a_cudnn_of_two_releases_and_for_another_cuda(machine: Windows) -> None:
    answers = {"cudnnGetCudartVersion": 12090, "cudnnOpsVersionCheck": 1002}
    machine.make(f"{CUDNN_OF_WHEELS}\\cudnn64_9.dll", exports=answers)
    cuda, mixed = ask(machine, "preloaded")["cuDNN"]
    assert (cuda, {os.path.basename(path.replace("\\", "/")) for path in mixed}) == (12, {*CUDNN})
    conflicts = [one["text"] for one in ask(machine, "diagnosed") if one["type"] == "LibraryConflictError"]
    assert any("cudnn64_9.dll in this process is built for CUDA 12" in text for text in conflicts)


def test_tensorrt_is_missed_by_its_name_and_found_along_path(machine: Windows) -> None:
    providers = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
    needs = {"nvinfer_10.dll": ["infer"], "nvonnxparser_10.dll": ["parse"], **LINKED}
    machine.make(f"{CAPI}\\onnxruntime_providers_tensorrt.dll", needs=needs)
    error = error_of(machine, *providers)
    assert error["details"]["missing"] == ["nvinfer_10.dll", "nvonnxparser_10.dll"]
    assert "TensorRT in a release 10.*" in error["fixes"][0]["text"]
    assert "nvinfer_10.dll was not found (error 126)" in error["text"]
    machine.make("trt\\nvinfer_10.dll", exports={"infer": 0})
    machine.make("trt\\nvonnxparser_10.dll", needs={"nvinfer_10.dll": ["infer"]}, exports={"parse": 0})
    machine.search("trt")
    found = ask(machine, "session", MODEL, *providers)
    assert {"C:\\trt\\nvinfer_10.dll", "C:\\trt\\nvonnxparser_10.dll"} <= {*found["loaded"]}
    assert found["errors"][0]["type"] != "LibraryNotFoundError"
