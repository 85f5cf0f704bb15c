"""A process in which cuDNN cannot be found. Since 1.28 ONNX Runtime opens there, and fails at the first convolution."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.children import child_environment
from tests.support.this_machine import nvidia_folders, overlay, without_cuda_variables

from .children import Report, run_program
from .libraries import cuda_major, hidden_from_the_loader, toolkit

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"
CUDNN = "libcudnn.so.9"
TABLE = json.loads((Path(__file__).parents[1] / "support" / "cudnn_forms.json").read_text(encoding="utf-8"))
SEEN = {name: seen for seen, names in TABLE["forms"].items() for name in names}


@pytest.fixture(scope="module")
def without_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Runs a program where cuDNN cannot be found."""
    changes = without_cuda_variables()
    if not any(any(folder.glob(f"*/lib/libcublas.so.{cuda_major()}")) for folder in nvidia_folders()):
        home, folder = toolkit()
        if any(folder.glob(f"{CUDNN}*")):
            pytest.skip(f"the only CUDA libraries of this host are in {folder}, and cuDNN is among them")
        changes["CUDA_HOME"] = str(home)
    packages = overlay(tmp_path_factory.mktemp("without-cudnn") / "packages", nvidia="all but cudnn")
    env = child_environment(changes, python_path=[packages])
    before = hidden_from_the_loader(CUDNN, env)
    return functools.partial(run_program, env=env, before=before, interpreter=["-S"])


@pytest.fixture(scope="module")
def report(without_library: Callable[..., Report], conv: Path, mlp: Path) -> Report:
    return without_library("without_cudnn", {"conv": conv, "mlp": mlp})


@pytest.fixture(scope="module")
def forms(without_library: Callable[..., Report]) -> Report:
    return without_library("forms_without_cudnn", deadline=200)


def test_the_forms_that_need_it_are_those_of_the_table(forms: Report) -> None:
    """When this fails, ONNX Runtime has other kernels: tests/support/cudnn_forms.json and provider/cudnn.py change."""
    assert len(forms["plain"]) > 500
    assert {name: seen for name, seen in forms["plain"].items() if seen != SEEN.get(name)} == {}


def test_a_session_refuses_those_forms_and_no_others(forms: Report) -> None:
    assert len(forms["ours"]) > 30
    expected = {name: "LibraryNotFoundError" if SEEN[name] == "needs it" else "ran" for name in forms["ours"]}
    assert forms["ours"] == expected


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
