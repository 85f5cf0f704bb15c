"""One model in processes that came by CUDA in different ways: each opens, computes right, and has nothing to say; a
diagnosis finds nothing, and the doctor ends with 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.children import child_environment
from tests.support.this_machine import GPUs, nvidia_folders, overlay, without_cuda_variables

from .children import Report, run_program
from .libraries import cuda_major, cudnn_home, toolkit

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"
TOLERANCE = 1e-2  # TF32


def assert_healthy(report: Report) -> None:
    assert report.child.returncode == 0, report.child.output
    assert report["device"]["providers"][0] == CUDA
    assert report["device"]["is_gpu"]
    assert report["error against the CPU"] <= TOLERANCE
    assert report["warnings"] == []
    assert report.complaints() == []
    assert_single_copies(report["libraries"])
    assert report["problems"] == []
    assert [step for step in report["probe"] if not step[1]] == []
    assert report["doctor"] is None or report["doctor"]["status"] == 0, report["doctor"]["output"]


def assert_single_copies(libraries: Mapping[str, list[str]]) -> None:
    assert {name: paths for name, paths in libraries.items() if len(paths) > 1} == {}


def test_as_installed(conv: Path) -> None:
    assert_healthy(run_program("variation", {"model": conv}))


# Where the libraries come from


def assert_from(libraries: Mapping[str, list[str]], root: Path) -> None:
    """Every CUDA library was mapped from below `root`; cuDNN is installed apart, and may come from elsewhere."""
    real = root.resolve()
    paths = [Path(path) for name, found in libraries.items() if not name.startswith("libcudnn") for path in found]
    assert [path for path in paths if real not in path.resolve().parents] == []


def test_toolkit_named_by_cuda_home(conv: Path, tmp_path: Path) -> None:
    home, _ = toolkit()
    cudnn = cudnn_home()
    changes = {**without_cuda_variables(), "CUDA_HOME": str(home), "CUDNN_HOME": str(cudnn) if cudnn else None}
    env = child_environment(changes, python_path=[overlay(tmp_path / "packages", nvidia="none")])
    report = run_program("variation", {"model": conv}, env=env, interpreter=["-S"])
    assert_healthy(report)
    assert_from(report["libraries"], home)


def test_toolkit_on_the_loader_path(conv: Path, tmp_path: Path) -> None:
    _, folder = toolkit()
    cudnn = cudnn_home()
    changes = without_cuda_variables()
    folders = [str(folder), *([str(cudnn / "lib")] if cudnn else []), changes["LD_LIBRARY_PATH"]]
    changes["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    env = child_environment(changes, python_path=[overlay(tmp_path / "packages", nvidia="none")])
    report = run_program("variation", {"model": conv}, env=env, interpreter=["-S"])
    assert_healthy(report)
    assert_from(report["libraries"], folder)


def test_only_wheels(conv: Path, tmp_path: Path) -> None:
    major = cuda_major()
    roots = [folder for folder in nvidia_folders() if any(folder.glob(f"*/lib/libcublas.so.{major}"))]
    if not roots:
        pytest.skip(f"NVIDIA's wheels for CUDA {major} are not installed")
    env = child_environment(without_cuda_variables(), python_path=[overlay(tmp_path / "packages", nvidia="all")])
    report = run_program("variation", {"model": conv}, env=env, interpreter=["-S"])
    assert_healthy(report)
    assert_from(report["libraries"], roots[0])


# Who else is in the process


def assert_usable(report: Report, user: str) -> None:
    if report.get("unusable"):
        pytest.skip(f"{user} does not work on this host: {report['unusable']}")


def test_torch_first(conv: Path) -> None:
    report = run_program("variation", {"model": conv, "before": "torch"}, deadline=120)
    assert_usable(report, "torch")
    assert_healthy(report)
    for name, paths in report["libraries before"].items():
        assert report["libraries"][name] == paths, f"a second {name} beside torch's"


def test_torch_afterwards(conv: Path) -> None:
    report = run_program("variation", {"model": conv, "after": "torch"}, deadline=120)
    if "No module named 'torch'" in str(report.get("error")):
        pytest.skip("torch is not installed")
    assert_healthy(report)
    assert report["after"] == 0, "the session computes something else since torch came"
    assert_single_copies(report["libraries after"])


def test_cupy_first(conv: Path) -> None:
    report = run_program("variation", {"model": conv, "before": "cupy"}, deadline=120)
    assert_usable(report, "cupy")
    assert_healthy(report)


def test_onnxruntime_imported_first(conv: Path) -> None:
    report = run_program("variation", {"model": conv, "before": "onnxruntime"})
    assert report["onnxruntime"]
    assert_healthy(report)


# Which GPUs are shown


def test_visible_devices_by_index(conv: Path, gpus: GPUs) -> None:
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        pytest.skip("CUDA_VISIBLE_DEVICES is set already: an index would mean another GPU")
    report = run_program("variation", {"model": conv}, env=child_environment({"CUDA_VISIBLE_DEVICES": "0"}))
    assert_healthy(report)
    assert report["device"]["ordinal"] == 0
    assert report["device"]["uuid"] == gpus.visible[0].uuid


def test_visible_devices_by_uuid(conv: Path, gpus: GPUs) -> None:
    last = gpus.visible[-1]
    report = run_program("variation", {"model": conv}, env=child_environment({"CUDA_VISIBLE_DEVICES": last.uuid}))
    assert_healthy(report)
    assert (report["device"]["ordinal"], report["device"]["uuid"]) == (0, last.uuid)
