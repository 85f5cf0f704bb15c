"""Weights that go past ONNX Runtime's parser: the same session, and neither the file nor the memory is read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu


def weights_of_the_cpu() -> bytes:
    """With an operator that has no CUDA kernel."""
    side = 2048
    weight = numpy_helper.from_array(np.arange(side * side, dtype=np.int32).reshape(side, side), "w")
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["v"], to=TensorProto.INT32),
            helper.make_node("BitwiseXor", ["v", "w"], ["y"]),
            helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
        ],
        "exclusive",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", side, side])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", side, side])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


@pytest.fixture(scope="module", params=["resnet50", "encoder", "on the CPU"])
def opened(
    request: pytest.FixtureRequest,
    make_model: Callable[[str], tuple[Path, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    folder = tmp_path_factory.mktemp("weights")
    if request.param == "on the CPU":
        model = folder / "model.onnx"
        model.write_bytes(weights_of_the_cpu())
    else:
        model, _ = make_model(request.param)
    return run_program("weights_in_place", {"model": model, "folder": str(folder)}, deadline=120)


def test_the_memory_is_given_back(opened: Report) -> None:
    assert opened["given back"]
    assert opened["memory after close"] is False


def test_results_are_the_same_bit_for_bit_when_file_and_memory_are_written_over(opened: Report) -> None:
    assert opened["equal"] == {"path": True, "bytes": True}


def test_a_node_on_the_cpu_reads_a_large_weight(request: pytest.FixtureRequest, opened: Report) -> None:
    if request.node.callspec.params["opened"] == "on the CPU":
        assert opened["on the CPU"] == {"BitwiseXor": 1}


def test_the_session_is_otherwise_the_same(opened: Report) -> None:
    assert opened["chosen alike"]
    assert opened["nodes alike"]
    assert opened["kept"] == [True, None, True]


def test_what_onnxruntime_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    report = run_program("weights_that_do_not_fit", {"folder": str(tmp_path)})
    assert report.error("ours").type == report.error("plain").type
    assert report.error("ours").text == report.error("plain").text
