"""Each row of the table of words: what it becomes while a session opens, while it runs, and in a pasted text."""

from __future__ import annotations

import re

import pytest

from ortgpu.diagnosis.checks.classifier import (
    TABLE,
    explain_line,
    explain_opening,
    explain_opening_code,
    explain_run,
    explain_run_code,
)
from ortgpu.diagnosis.messages.cuda_codes import NAMES
from ortgpu.errors import GPUError
from tests.support.made_facts import HEALTHY

LOAD = r'[ONNXRuntimeError] : 1 : FAIL : LoadLibrary failed with error {} "" when trying to load "C:\a\onnxruntime_'

# A text, and the codes while opening, while running and in a pasted text. In the order of the table, a text for a row
ROWS = (
    (
        "Available memory of 5 is smaller than requested bytes of 9",
        "insufficient-device-memory",
        "gpu-out-of-memory",
        None,
    ),
    ("cudaMallocFromPoolAsync failed: x (2), size=9", "insufficient-device-memory", "gpu-out-of-memory", None),
    (
        "Failed to allocate memory for requested buffer of size 9",
        "insufficient-device-memory",
        "gpu-out-of-memory",
        None,
    ),
    ("CUDA failure 719: unspecified launch failure", "poisoned-context", "poisoned-context", None),
    ("This session cannot use the graph capture feature", "provider-option", None, None),
    ('Unknown provider option: "x"', "provider-option", None, None),
    ('Failed to map enum name to value: "x" for option "y"', "provider-option", None, None),
    ('Failed to parse provider option "y"', "provider-option", None, None),
    ("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED", "provider-failure", "provider-failure", None),
    ("Please install TensorRT libraries", "library-not-found", None, None),
    ("TensorRT EP failed", "provider-failure", "provider-failure", None),
    ("cuDNN is unavailable", "library-not-found", "library-not-found", None),
    ("lrn.cc:68 norm_desc_.Set(size, alpha, beta, bias) was false", None, None, None),
    ("cuFFT is unavailable", None, "library-not-found", None),
    ("it requires SM 90", "unsupported-device", "unsupported-device", None),
    (LOAD.format(126) + 'providers_tensorrt.dll"', "library-not-found", None, None),
    ("Failed to load library libonnxruntime_providers_tensorrt.so", "provider-failure", None, None),
    (LOAD.format(126) + 'providers_cuda.dll"', "provider-fallback", None, "library-not-found"),
    ("CUDA_PATH is set but CUDA wasnt able to be loaded", "provider-fallback", None, "library-not-found"),
    (LOAD.format(127) + 'providers_cuda.dll"', "provider-fallback", None, "library-version"),
    ("Failed to load library libonnxruntime_providers_cuda.so", "provider-fallback", None, None),
    ("/x/cuda_execution_provider.cc:1 failed", "provider-fallback", None, None),
    ("the CUDA EP failed", "provider-fallback", None, None),
    (
        "Specified provider 'CUDAExecutionProvider' is not in available provider names.",
        None,
        None,
        "cpu-only-package",
    ),
    ("but `onnxruntime-gpu` package was not found.", None, None, "cpu-only-package"),
    ("2 Memcpy nodes are added to the graph main_graph", None, None, "placement"),
    ("CPUNodesWarning: 1 of 2 nodes", None, None, "placement"),
    ("ModuleNotFoundError: No module named 'onnxruntime'", None, None, "onnxruntime-not-installed"),
    ("module 'onnxruntime' has no attribute 'InferenceSession'", None, None, "broken-package"),
    ("module 'onnxruntime' has no attribute '__version__'", None, None, "broken-package"),
    ("No module named 'onnxruntime.capi'", None, None, "broken-package"),
)


def code(error: GPUError | None) -> str | None:
    return error.code if error is not None else None


@pytest.mark.parametrize(("text", "opening", "running", "elsewhere"), ROWS)
def test_row(text: str, opening: str | None, running: str | None, elsewhere: str | None) -> None:
    assert code(explain_opening(text, HEALTHY)) == opening
    assert code(explain_run(text, "Fail", None)) == running
    assert code(explain_line(text)) == elsewhere


def test_every_row_has_a_text() -> None:
    assert [row.pattern for row in TABLE if not any(re.search(row.pattern, text) for text, *_ in ROWS)] == []


@pytest.mark.parametrize("number", NAMES)
def test_every_code_becomes_an_error_in_both_phases(number: int) -> None:
    for error in (
        explain_opening_code(number, HEALTHY, ["said"]),
        explain_run_code(number, f"CUDA failure {number}: x", None),
    ):
        assert isinstance(error, GPUError)
        assert error.evidence, "what was said"


@pytest.mark.parametrize("text", ["error 126 when trying to load a file", "CUDAExecutionProvider.onnx: no such file"])
def test_a_name_in_quotes_is_none_of_these(text: str) -> None:
    assert explain_opening(f"failed: '{text}'", HEALTHY) is None
