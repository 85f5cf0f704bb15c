"""A process in which cuDNN cannot be found. Since 1.28 ONNX Runtime opens there, and fails at the first convolution."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.children import child_environment
from tests.support.this_machine import nvidia_folders, overlay, without_cuda_variables

from .children import Report, run_program
from .libraries import cuda_major, hidden_from_the_loader, toolkit

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"
CUDNN = "libcudnn.so.9"


@pytest.fixture(scope="module")
def report(conv: Path, mlp: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    changes = without_cuda_variables()
    if not any(any(folder.glob(f"*/lib/libcublas.so.{cuda_major()}")) for folder in nvidia_folders()):
        home, folder = toolkit()
        if any(folder.glob(f"{CUDNN}*")):
            pytest.skip(f"the only CUDA libraries of this host are in {folder}, and cuDNN is among them")
        changes["CUDA_HOME"] = str(home)
    packages = overlay(tmp_path_factory.mktemp("without-cudnn") / "packages", nvidia="all but cudnn")
    env = child_environment(changes, python_path=[packages])
    before = hidden_from_the_loader(CUDNN, env)
    return run_program("without_cudnn", {"conv": conv, "mlp": mlp}, env=env, before=before, interpreter=["-S"])


def test_a_model_with_a_convolution_is_refused(report: Report) -> None:
    error = report.error("conv")
    assert error.type == "LibraryNotFoundError"
    assert CUDNN in error.fields["missing"]
    assert CUDNN in error.text


@pytest.mark.parametrize("when", ["mlp", "mlp again"])
def test_a_model_without_one_runs(report: Report, when: str) -> None:
    outcome = report.returned(when)
    assert outcome["providers"][0] == CUDA
    assert outcome["error against the CPU"] <= 1e-2


def test_cudnn_really_was_absent(report: Report) -> None:
    assert [name for name in report["libraries"] if name.startswith("libcudnn")] == []


def test_plain_onnxruntime_opens_and_fails_at_the_first_run(report: Report) -> None:
    """The behaviour that makes the check above necessary: when this fails, ONNX Runtime has changed."""
    assert CUDA in report.returned("plain opens")
    assert "cudnn" in report.error("plain runs").text.lower()
