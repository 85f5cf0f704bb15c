"""Real models on a real GPU: right numbers, every computing node on CUDA, and the driver sees the process there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.this_machine import GPUs

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"
MODELS = ("mlp", "resnet50", "encoder")
BATCHES = (1, 8)

# Largest difference from the CPU provider, in units of the largest output. TF32 keeps 10 bits of each factor's mantissa
# (one part in 2,000 a product, several layers deep); without it both sides compute in fp32 and differ in order only.
TF32_TOLERANCE = 1e-2
FP32_TOLERANCE = 1e-4

# Libraries of which a process must hold one copy, from one place. cuDNN is apart: it is no part of the toolkit.
TOOLKIT = ("libcudart", "libcublas", "libcublasLt", "libcurand", "libcufft", "libnvrtc")

MakeModel = Callable[[str], tuple[Path, str]]


@pytest.fixture(scope="module")
def reports(make_model: MakeModel, gpus: GPUs) -> Callable[[str], Report]:
    """One child per model, run when its first test asks."""
    known: dict[str, Report] = {}

    def get(name: str) -> Report:
        if name not in known:
            path, _ = make_model(name)
            arguments = {"model": path, "batches": BATCHES, "uuids": [gpu.uuid for gpu in gpus.visible]}
            known[name] = run_program("run_model", arguments, deadline=120)
        return known[name]

    return get


@pytest.fixture(params=MODELS)
def opened(request: pytest.FixtureRequest, reports: Callable[[str], Report]) -> Report:
    return reports(request.param)


def test_resnet50_is_an_exported_one(make_model: MakeModel) -> None:
    _, recipe = make_model("resnet50")
    if "export" not in recipe:
        pytest.skip(f"torchvision's ResNet-50 could not be exported here; its graph was made with {recipe}")


def test_opens_without_a_word(opened: Report) -> None:
    assert opened["warnings"] == []


def test_is_bound_to_cuda(opened: Report, gpus: GPUs) -> None:
    device = opened["device"]
    assert device["providers"][0] == CUDA
    assert device["is_gpu"]
    assert device["uuid"] in {gpu.uuid for gpu in gpus.visible}
    (visible,) = (gpu for gpu in gpus.visible if gpu.uuid == device["uuid"])
    assert (device["ordinal"], device["name"]) == (visible.ordinal, visible.name)
    assert device["options"]["device_id"] == str(visible.ordinal)


@pytest.mark.parametrize("batch", BATCHES)
def test_agrees_with_the_cpu(opened: Report, batch: int) -> None:
    assert opened["tf32"][str(batch)] <= TF32_TOLERANCE


@pytest.mark.parametrize("batch", BATCHES)
def test_agrees_closely_without_tf32(opened: Report, batch: int) -> None:
    assert opened["fp32"][str(batch)] <= FP32_TOLERANCE


def test_every_computing_node_is_on_cuda(opened: Report) -> None:
    nodes = opened["placement"]["nodes"]
    assert nodes, "no node was recorded"
    elsewhere = [node for node in nodes if node[3] == "compute" and node[2] != CUDA]
    assert elsewhere == []
    assert any(node[3] == "compute" for node in nodes)
    assert opened["placement"]["by_provider"][CUDA] >= 1


def test_the_driver_sees_the_process_on_that_gpu(opened: Report) -> None:
    memory: dict[str, Any] = opened["memory"]
    if memory["pid"] in memory["pids"]:
        assert memory["bytes"] is None or memory["bytes"] > 0
        return
    # Containers and some virtual machines hide process ids, or show the host's: memory that went is the next best.
    listed = f"NVML lists processes {memory['pids']}, not {memory['pid']}"
    if memory["before"] is None or memory["after"] is None:
        pytest.skip(f"{listed}, and no free memory: nothing here can tell")
    taken = memory["before"] - memory["after"]
    assert taken >= 64 * 2**20, f"{listed}, and free memory shrank by {taken} bytes only"


def test_one_copy_of_each_cuda_library(opened: Report) -> None:
    libraries = opened["libraries"]
    assert {"libcudart", "libcublas", "libcublasLt"} <= set(libraries)
    twice = {name: paths for name, paths in libraries.items() if len(paths) > 1}
    assert twice == {}


def test_cuda_libraries_from_one_root(opened: Report) -> None:
    roots = {root_of(path) for name, paths in opened["libraries"].items() if name in TOOLKIT for path in paths}
    assert len(roots) == 1


def root_of(path: str) -> str:
    """The installation a library belongs to: all of NVIDIA's wheels in one site-packages, or else the folder."""
    before, found, _ = path.partition("/site-packages/nvidia/")
    return before + found if found else path.rpartition("/")[0]
