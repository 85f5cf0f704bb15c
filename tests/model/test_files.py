"""How a model's file is opened and read, whatever lies under its path."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from ortgpu.model.contents import read_model
from ortgpu.model.files import FileContent, open_model, stamp_of
from ortgpu.model.outline import Graph, GraphOutline
from tests.model.test_contents import small_model
from tests.support.command_line import NO_GPU, ortgpu
from tests.support.cpu_session import child


@pytest.mark.skipif(sys.platform == "win32", reason="Windows writes what is left out of a file")
def test_a_file_too_large_for_a_message_is_not_read(tmp_path: Path) -> None:
    """More than this machine has memory for."""
    path = tmp_path / "model.onnx"
    path.touch()
    os.truncate(path, 1 << 40)
    assert "an ONNX file can have 2147483647" in (read_model(path).problem or "")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no /dev/zero")
def test_a_device_is_never_opened() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        open_model("/dev/zero")


def test_a_file_that_was_written_anew_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"one")
    before = stamp_of(path)
    assert before is not None
    assert stamp_of(path) == before
    os.utime(path, ns=(1, 1))  # of the same size
    assert stamp_of(path) != before
    path.unlink()
    assert stamp_of(path) is None
    assert stamp_of(b"one") is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("allow_cpu", [False, True])
def test_a_pipe_or_a_device_is_refused_before_it_is_opened(tmp_path: Path, allow_cpu: bool) -> None:
    """ONNX Runtime waits for ever for somebody who writes into the pipe."""
    os.mkfifo(tmp_path / "model.onnx")
    code = f"""
        def opened(path):
            try:
                GPUSession(path, allow_cpu={allow_cpu})
            except ortgpu.GPUError as error:
                return [type(error).__name__, error.summary, list(error.evidence)]
        report(list(map(opened, sys.argv[1:])))
    """
    paths = [str(tmp_path / "model.onnx"), "/dev/zero"]
    expected = [["GPUError", f"the model {path} cannot be read", ["not a regular file"]] for path in paths]
    assert child(code, *paths) == expected


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_probe_does_not_open_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    found = ortgpu("doctor", "--json", "--model", str(tmp_path / "model.onnx"), env=NO_GPU)
    document = json.loads(found.stdout)
    assert document["probe"]["completed"] is True
    assert "not a regular file" in [fact for problem in document["problems"] for fact in problem["evidence"]]


def test_a_file_is_read_as_its_bytes_are(tmp_path: Path) -> None:
    """Whatever lies across the pieces in which it is read."""
    model = onnx.load_from_string(small_model())
    for size in (10, 1000, 1025, 16_383, 16_384, 50_000, 1 << 20):
        model.graph.node.add(op_type="Neg", input=["x"], output=[f"y{size}"], doc_string="d" * size)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(size, np.uint8), f"w{size}"))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())

    def told(graph: Graph) -> object:
        nodes = [(node.operator, node.inputs, node.outputs) for node in graph.nodes]
        return nodes, [(tensor.name, tensor.data_type, tensor.shape) for tensor in graph.initializers]

    whole = told(GraphOutline(path).graph)
    assert whole == told(GraphOutline(path.read_bytes()).graph)
    assert whole == (
        [(b"Neg", [each.encode() for each in node.input], [node.output[0].encode()]) for node in model.graph.node],
        [(tensor.name.encode(), TensorProto.UINT8, list(tensor.dims)) for tensor in model.graph.initializer],
    )


def test_a_file_that_becomes_shorter_while_it_is_read_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        content = FileContent(file)
        os.truncate(path, 100)
        assert content[99] == 0
        for beyond in (slice(50, 200), 1 << 19):
            with pytest.raises(IndexError):
                content[beyond]
