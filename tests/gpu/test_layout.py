"""Sessions whose record of ``tune`` asks for channels-last images compute what others do; no others have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.provider.settings import THREADS

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

LAYOUT = {"prefer_nhwc": "1", "fuse_conv_bias": "1"}

# Of the largest output, beside the CPU. TF32 keeps 10 bits of a factor's mantissa, and some thirty layers add to one
# another what they lose.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def networks() -> Report:
    return run_program("layouts", {"networks": 16, "batches": [1, 4, 64]}, deadline=240)


@pytest.mark.parametrize("way", ["ours", "graph", "plain"])
def test_results_are_right(networks: Report, way: str) -> None:
    assert 0 < networks["worst"][way] <= TOLERANCE


def test_all_of_them_had_that_layout(networks: Report) -> None:
    assert networks["without"] == []


def test_a_record_chooses_it_unless_the_caller_chose(resnet50: Path) -> None:
    report = run_program("layout_options", {"model": resnet50})
    assert report["recorded"]["options"].items() >= LAYOUT.items()
    assert set(report["recorded"]["chosen"]) - {THREADS} == {"cudnn_conv_algo_search", *LAYOUT}
    for name in ("untuned", "refused", "tf32"):
        assert report[name]["options"]["prefer_nhwc"] == report[name]["options"]["fuse_conv_bias"] == "0"


def test_a_session_that_does_not_open_with_it_opens_without() -> None:
    report = run_program("layout_of_doubles")
    assert set(report["chosen"]).isdisjoint(LAYOUT)
    assert report["error"] <= 1e-9


def test_it_is_not_chosen_where_results_are_wrong() -> None:
    """Where this fails, ONNX Runtime may have mended it: then the layout is right for weights that are not constant."""
    report = run_program("computed_weights", deadline=200)
    assert report["layouts"]
    assert all(verdict.startswith("rejected") for verdict in report["layouts"])
    assert all("layout" not in settings for settings in report["chosen"])
