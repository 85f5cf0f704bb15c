"""Reading a model for a diagnosis: what is no file is not waited for, and has no end that would be reached."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ortgpu.model.contents import read_collective_operators, read_model
from ortgpu.model.outline import GraphOutline
from tests.support.cpu_session import child

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither named pipes nor devices as files")


def test_a_pipe_that_nobody_writes_to_is_diagnosed(tmp_path: Path) -> None:
    pipe = tmp_path / "model.onnx"
    os.mkfifo(pipe)
    found = child("report([str(each) for each in ortgpu.diagnose(sys.argv[1]).problems])", str(pipe))
    assert any("not a regular file" in text for text in found), found


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_a_device_is_not_read(path: str) -> None:
    assert read_model(path).problem == "not a regular file"
    assert read_collective_operators(GraphOutline(path)) == ()


def test_a_folder_is_named_as_such(tmp_path: Path) -> None:
    assert read_model(tmp_path).problem == "is a directory"
