"""ONNX Runtime's TensorRT provider beside that of CUDA. TensorRT is a stub that builds no engine: CUDA has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.stubs import Stubs

from .children import Report, run_program
from .plugin import built_in_only

pytestmark = [pytest.mark.ortgpu, built_in_only]

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.fixture(scope="module")
def report(mlp: Path, stubs: Stubs) -> Report:
    return run_program("tensorrt_before_cuda", {"model": mlp, "folder": stubs.tensorrt})


def test_before_cuda_it_stays_there(report: Report) -> None:
    session = report.returned("before CUDA")
    assert session["providers"] == [TENSORRT, CUDA, CPU]
    assert session["is_gpu"]
    assert set(session["placement"]) == {CUDA}
    assert session["difference"] < 1e-2
    assert "Gemm" in session["TensorRT options"]["trt_op_types_to_exclude"]


def test_behind_cuda_it_stays_there(report: Report) -> None:
    assert report.returned("behind CUDA") == [CUDA, TENSORRT, CPU]


def test_cuda_is_put_behind_it(report: Report) -> None:
    assert report.returned("alone") == [TENSORRT, CUDA, CPU]


def test_both_work_on_one_gpu(report: Report) -> None:
    assert report.error("on another GPU").type == "ProviderRequestError"
