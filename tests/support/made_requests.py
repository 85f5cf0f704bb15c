"""Requests as callers make them: names of providers, and what becomes of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ortgpu.errors import GPUError

TENSORRT, CUDA, CPU_PROVIDER = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
RTX = "NvTensorRTRTXExecutionProvider"
ALL_KNOWN = [RTX, TENSORRT, CUDA, "MIGraphXExecutionProvider", "OpenVINOExecutionProvider", "CoreMLExecutionProvider",
             "AzureExecutionProvider", CPU_PROVIDER]  # fmt: skip
AVAILABLE = [TENSORRT, CUDA, CPU_PROVIDER]

Result = TypeVar("Result")


def attempt(function: Callable[[], Result]) -> Result | GPUError:
    """What a function returns, or the GPUError that it raises."""
    try:
        return function()
    except GPUError as error:
        return error
