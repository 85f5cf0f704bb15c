"""Questions to ortgpu in a Windows with a driver, an RTX 4090 and no CUDA: fixture ``machine`` of conftest.py."""

from __future__ import annotations

import json
from typing import Any

from tests.lab.stubs import GPU
from tests.lab.windows import SITE_PACKAGES, Windows

RTX_4090 = GPU(name="NVIDIA GeForce RTX 4090", capability=(8, 9))
MODEL = "C:\\relu.onnx"
WHEELS = f"C:\\{SITE_PACKAGES}\\nvidia"
CUDA_OF_WHEELS, CUDNN_OF_WHEELS = f"{WHEELS}\\cu13\\bin\\x86_64", f"{WHEELS}\\cudnn\\bin"
CAPI = f"C:\\{SITE_PACKAGES}\\onnxruntime\\capi"
PROVIDER = f"{CAPI}\\onnxruntime_providers_cuda.dll"
REQUIRED = ("cublasLt64_13.dll", "cublas64_13.dll")


def ask(machine: Windows, program: str, *arguments: str, first: str = "", **variables: str) -> Any:
    """The answer of one of ``programs.py``, which runs after ``first``."""
    command = ("-m", "tests.windows.programs", program, first, *arguments)
    return json.loads(machine.python(*command, variables=variables).ok().stdout.splitlines()[-1])


def reaches_the_driver(found: Any) -> bool:
    """All that the provider links was loaded, and it too: that is as far as a session gets over a stub."""
    (error,) = (one for one in found["errors"] if one["severity"] == "fatal")
    assert error["type"] == "DriverUnusableError", error
    assert "CUDA_ERROR_NOT_SUPPORTED" in error["text"]
    return any(path.endswith("\\onnxruntime_providers_cuda.dll") for path in found["loaded"])


def folders_of(found: Any, names: tuple[str, ...] = REQUIRED) -> set[str]:
    """The folders that libraries of that process are from."""
    return {path.rpartition("\\")[0] for path in found["loaded"] if path.rpartition("\\")[2] in names}


def answering(code: int, *names: str) -> str:
    """What has Windows' loader answer an error for these files that Wine's does not, before a program runs."""
    return f"""
from ortgpu.environment.libraries.loader_windows import WindowsLoader
load = WindowsLoader.load
WindowsLoader.load = lambda self, path: {code} if path.endswith({names!r}) else load(self, path)
"""
