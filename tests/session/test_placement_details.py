"""Reasons and copies, from what ONNX Runtime 1.31.1 wrote on an H200 about the models of known_placements.py."""

# ruff: noqa: E501 - the texts of ONNX Runtime are as long as they are

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.environment.child_process import ChildFailedError
from ortgpu.errors import GPUError, NoDeviceError
from ortgpu.provider.placement import NO_KERNEL, PREFERRED, PlacedNode
from ortgpu.session.placement_details import PlacementDetails, details_from, explain_placement
from tests.support.cpu_session import child

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

ISLAND_LOG = (
    "\x1b[0;92m2026-11-20 06:12:01.1 [I:onnxruntime:, cuda_execution_provider.cc:3505 GetCapability] CUDA kernel not found in "
    "registries for Op type: GlobalLpPool node name: island\x1b[m\n"
    "2026-11-20 06:12:01.2 [I:onnxruntime:, transformer_memcpy.cc:393 AddCopyNode] Add MemcpyFromHost after b for "
    "CUDAExecutionProvider\n"
)
SHAPES_LOG = "".join(
    "2026-11-20 06:12:02.1 [I:onnxruntime:, fallback_cpu_capability.cc:167 GetCpuPreferredNodes] ORT optimization- Force "
    f"fallback to CPU execution for node: {name} because the CPU execution path is deemed faster than overhead involved "
    "with execution on other EPs capable of executing this node\n"
    for name in ("rows", "twice", "unsqueeze", "target")
)


def entry(name: str, op_type: str, inputs: list[str], outputs: list[str]) -> Any:
    """A node of the optimised graph, as the outline of a model has it."""
    given, made = ([each.encode() for each in names] for names in (inputs, outputs))
    return SimpleNamespace(name=name.encode(), operator=op_type.encode(), domain=b"", inputs=given, outputs=made)


@pytest.fixture
def island() -> PlacementDetails:
    placed = [
        PlacedNode("before", "Neg", "", CUDA, "compute"),
        PlacedNode("after", "Neg", "", CUDA, "compute"),
        PlacedNode("island", "GlobalLpPool", "", CPU, "compute"),
    ]
    graph = [
        entry("before", "Neg", ["x"], ["a_CUDAExecutionProvider"]),
        entry("Memcpy_token_0", "MemcpyToHost", ["a_CUDAExecutionProvider"], ["a"]),
        entry("island", "GlobalLpPool", ["a"], ["b"]),
        entry("Memcpy", "MemcpyFromHost", ["b"], ["b_CUDAExecutionProvider"]),
        entry("after", "Neg", ["b_CUDAExecutionProvider"], ["y"]),
    ]
    return details_from("island <1>.onnx", ISLAND_LOG, placed, graph)


@pytest.fixture
def shapes() -> PlacementDetails:
    on_cpu = [("rows", "Gather"), ("twice", "Mul"), ("unsqueeze", "Unsqueeze"), ("target", "Concat")]
    placed = [PlacedNode(name, op, "", CPU, "shape") for name, op in on_cpu]
    placed += [PlacedNode("reshape", "Reshape", "", CUDA, "compute"), PlacedNode("relu", "Relu", "", CUDA, "compute")]
    graph = [entry(node.name, node.op_type, ["i"], ["o"]) for node in placed]
    return details_from("shapes.onnx", SHAPES_LOG, placed, graph)


def test_an_island_has_its_reason_and_its_copies(island: PlacementDetails) -> None:
    assert [(node.name, reason) for node, reason in island.off_gpu] == [("island", NO_KERNEL)]
    assert island.copies == 2
    assert [node.copy for node in island.nodes] == [None, "to CPU", None, "to GPU", None]
    assert "3 nodes, 2 on the GPU, 2 copies between devices" in str(island)
    assert re.search(r"GlobalLpPool 'island' +compute +no CUDA kernel", str(island))


def test_shape_nodes_are_there_by_preference(shapes: PlacementDetails) -> None:
    assert {reason for _, reason in shapes.off_gpu} == {PREFERRED}
    assert shapes.copies == 0


def test_without_a_log_the_reason_follows_from_the_kind() -> None:
    placed = [PlacedNode("", "ConvInteger", "", CPU, "compute"), PlacedNode("", "Concat", "", CPU, "shape")]
    found = details_from("m", "", placed, [])
    assert [reason for _, reason in found.off_gpu] == [NO_KERNEL, PREFERRED]


def test_nodes_without_names_are_found_by_an_operator_that_is_in_one_place_only() -> None:
    placed = [PlacedNode("", "Relu", "", CUDA, "compute"), PlacedNode("", "Cast", "", CPU, "shape")]
    placed.append(PlacedNode("", "Cast", "", CUDA, "compute"))
    found = details_from("m", "", placed, [entry("fused", "Relu", [], []), entry("c", "Cast", [], [])])
    assert [node.provider for node in found.nodes] == [CUDA, None]


def test_plain_data(island: PlacementDetails) -> None:
    data = island.as_dict()
    assert data["copies"] == 2
    assert data["on_cpu"][0]["reason"] == NO_KERNEL
    assert [node["op_type"] for node in data["graph"]][1] == "MemcpyToHost"


def test_a_machine_without_a_gpu_gives_the_error_of_a_session(tmp_path: Path) -> None:
    from ortgpu.diagnosis.probe.probing import RELU
    from ortgpu.errors import GPUError
    from ortgpu.session import gpu_session  # noqa: F401 - the child opens a GPUSession

    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU here: /dev/nvidia*")
    with pytest.raises(GPUError) as raised:
        explain_placement(RELU)
    assert raised.value.code == "driver-not-found"


def test_in_a_process_that_is_not_told_how_its_children_end() -> None:
    found = child("session.placement_details.in_a_process_that_is_not_told_how_its_children_end")
    assert found["type"] in ("DriverNotFoundError", "NoDeviceError")


def not_found(operator: str, name: str) -> str:
    return f"[I:onnxruntime:, x.cc:1 GetCapability] CUDA kernel not found in registries for Op type: {operator} node name: {name}\n"


def test_the_reason_is_what_onnxruntime_logged_about_this_very_node() -> None:
    """A node that handles shapes may lack a kernel, too; and an unnamed twin on the GPU has none of the reasons."""
    nodes = [
        PlacedNode("s", "ReduceProd", "", CPU, "shape"),
        PlacedNode("t", "ReduceProd", "", CPU, "shape"),
        PlacedNode("", "Less", "", CPU, "compute"),
        PlacedNode("", "Less", "", CUDA, "compute"),
    ]
    details = details_from("m.onnx", not_found("ReduceProd", "s") + not_found("Less", ""), nodes, [])
    assert [reason for _, reason in details.placed] == [NO_KERNEL, PREFERRED, NO_KERNEL, None]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (ChildFailedError("it was killed", timed_out=True), TimeoutError, "opening the model took more than 300 s"),
        (ChildFailedError("it ended"), GPUError, "the model could not be opened in the child process"),
        (KeyError("x"), GPUError, "the model could not be opened in the child process"),
        (NoDeviceError("none"), NoDeviceError, "none"),
    ],
)
def test_a_child_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], words: str
) -> None:
    class Child:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, *_: Any, timeout: float) -> Any:
            raise error

    monkeypatch.setattr("ortgpu.session.placement_details.ChildProcess", Child)
    monkeypatch.setattr("ortgpu.running.onnxruntimes.gpu_session_class", lambda: None)
    with pytest.raises(raised, match=words):
        explain_placement(b"model")
