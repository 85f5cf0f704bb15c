"""Placement of models with known answers, and the reasons and copies that ONNX Runtime gives for them."""

from __future__ import annotations

import json
import re
import signal
import zipfile
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from ortgpu.provider.requests import CPU, CUDA
from tests.support.known_placements import RENEWED_IN_22
from tests.support.shape_operators import misjudged, models_beside_shapes

from .children import Report, run_program
from .plugin import built_in_only

pytestmark = pytest.mark.ortgpu

TOLERANCE = 1e-2  # TF32

# Nodes that compute on the CPU; those that handle shapes there; copies of the main graph
KNOWN: dict[str, tuple[list[str], list[str], int]] = {
    "all_on_cuda": ([], [], 0),
    "island": (["island"], [], 2),
    "strings": (["join", "label"], [], 0),
    "shapes": ([], ["rows", "target", "twice", "unsqueeze"], 0),
    "control_flow": (["in branch"], [], 1),
    "int8": (["convolution"], [], 1),
    "mask": (["compare"], [], 1),
}


each_known = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[built_in_only] * (name == "control_flow")) for name in KNOWN]
)


@pytest.fixture(scope="module")
def placements() -> Report:
    return run_program("place")


@each_known
def test_known_placements(placements: Report, name: str) -> None:
    found: Any = placements.returned(name)
    compute, shape, _ = KNOWN[name]
    assert found["compute on CPU"] == compute
    assert found["shape on CPU"] == shape
    assert found["shapes"], "the model was not run"


@each_known
def test_warnings_are_about_computing_nodes_only(placements: Report, name: str) -> None:
    warnings = placements.returned(name)["warnings"]
    if not KNOWN[name][0]:
        assert warnings == []
    else:
        (text,) = warnings
        first = "1 of [0-9]+ nodes computes" if len(KNOWN[name][0]) == 1 else "[0-9]+ of [0-9]+ nodes compute"
        assert re.match(rf"{first} on the CPU: ", text)


@each_known
def test_forbidding_refuses_computing_nodes_only(placements: Report, name: str) -> None:
    if not KNOWN[name][0]:
        assert placements.returned(f"{name}: forbid") == "opened"
        return
    error = placements.error(f"{name}: forbid")
    assert error.type == "PlacementError"
    assert all(node in error.text for node in KNOWN[name][0])
    assert "no CUDA kernel" in error.text


@each_known
def test_reasons_and_copies(placements: Report, name: str) -> None:
    compute, shape, copies = KNOWN[name]
    found = placements.returned(f"{name}: explained")
    assert found["copies"] == copies
    reasons = {node["name"]: node["reason"] for node in found["on_cpu"]}
    assert set(reasons) == {*compute, *shape}
    assert all("no CUDA kernel" in reasons[node] for node in compute)
    assert all("only handles shapes" in reasons[node] for node in shape)


def test_a_version_newer_than_its_kernel() -> None:
    """The lower opset that the error advises puts the operator onto the GPU again."""
    report = run_program("place_versions")
    placed = {name: [report.returned(f"{name} {opset}") for opset in (21, 22)] for name in RENEWED_IN_22}
    newer = [name for name, (before, after) in placed.items() if (before, after) == (CUDA, CPU)]
    assert newer, f"every operator of this test has kernels in its newest version now; it needs others: {placed}"
    for name in newer:
        error = report.error(f"{name} 22: forbid")
        assert error.type == "PlacementError"
        assert f"{name} 'alone': no CUDA kernel" in error.text
        assert "a lower opset" in error.text
        assert report.returned(f"{name} 21: forbid") == "opened"


@built_in_only
def test_every_type_of_every_operator_beside_shapes(tmp_path: Path) -> None:
    """Some eighteen hundred small models, of which those that compute on the CPU are refused, and no others."""
    with zipfile.ZipFile(tmp_path / "models.zip", "w") as archive:
        for name, content in models_beside_shapes():
            archive.writestr(name, content)
    report = run_program("place_beside_shapes", {"folder": tmp_path}, deadline=240)
    assert report["differing"] == []
    assert misjudged(json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))) == []


@pytest.fixture(scope="module")
def own_format(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run_program("place_own_format", {"folder": tmp_path_factory.mktemp("own_format")})


def test_a_model_in_the_own_format_opens_with_a_warning(own_format: Report) -> None:
    """ONNX Runtime records nothing for it: its node on the CPU must not pass for one on the GPU."""
    found = own_format.returned("island")
    assert (found["known"], found["is_gpu"]) == (False, True)
    ((kind, text),) = found["warned"]
    assert kind == "CPUNodesWarning"
    assert "ONNX Runtime's own format (.ort)" in text
    error = own_format.error("island: forbid")
    assert error.type == "PlacementError"
    assert "its own format (.ort)" in error.text


def test_what_that_warning_says_is_so(own_format: Report) -> None:
    if onnxruntime.get_device().startswith("GPU"):  # a plugin copies
        assert own_format["plain run"] == -signal.SIGSEGV, "it may copy now: the warning is out of date"
    assert own_format.returned("run: all on CUDA") <= TOLERANCE
    assert own_format.returned("run: written on CUDA") <= TOLERANCE


def test_check_writes_the_table(tmp_path: Path) -> None:
    report = run_program("check_placement", {"folder": tmp_path})
    done = report["check"]
    if done["returncode"] != 0 and "No module named 'click'" in done["stderr"]:
        pytest.skip("click is not installed here")
    assert done["returncode"] == 0, done
    assert "GlobalLpPool 'island'" in done["stdout"]
    assert "2 copies between devices" in done["stdout"]
