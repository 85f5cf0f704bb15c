"""Channels-last sessions compute what others do, and are made where they gain and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.provider.settings import THREADS
from tests.support.this_machine import GPUs

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

HOPPER = ("H100", "H200", "GH200")  # of compute capability 9.0
CHOSEN = {"prefer_nhwc": "1", "fuse_conv_bias": "1"}

# Of the largest output, beside the CPU. TF32 keeps 10 bits of a factor's mantissa, and some thirty layers add to one
# another what they lose.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def measured_here(gpus: GPUs) -> None:
    name = gpus.visible[0].name
    if not any(each in name for each in HOPPER):
        pytest.skip(f"another layout is chosen for GPUs of compute capability 9.0 alone; this is a {name}")


@pytest.fixture(scope="module")
def networks(measured_here: None) -> Report:
    del measured_here
    return run_program("layouts", {"networks": 16, "batches": [1, 4, 64]}, deadline=240)


@pytest.mark.parametrize("way", ["ours", "graph", "plain"])
def test_results_are_right(networks: Report, way: str) -> None:
    assert 0 < networks["worst"][way] <= TOLERANCE


def test_all_of_them_had_that_layout(networks: Report) -> None:
    assert networks["not chosen"] == []


def test_it_is_chosen_unless_the_caller_chose(measured_here: None, resnet50: Path) -> None:
    report = run_program("layout_options", {"model": resnet50})
    assert report["alone"]["options"].items() >= CHOSEN.items()
    assert set(report["alone"]["chosen"]) - {THREADS} == {"cudnn_conv_algo_search", *CHOSEN}
    for name in ("refused", "tf32"):
        assert report[name]["options"]["prefer_nhwc"] == report[name]["options"]["fuse_conv_bias"] == "0"


def test_weights_that_are_not_constant(measured_here: None) -> None:
    """Where the second of these passes, ONNX Runtime has mended it, and such models may have this layout, too."""
    report = run_program("computed_weights")
    assert report.returned("ours") <= TOLERANCE
    assert "is not equal to kernel channels" in report.error("forced").text
