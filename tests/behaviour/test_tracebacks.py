"""What a user reads when nobody catches the error: the lines of the user's program, and few of this library."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import ortgpu
from tests.support.children import run_child
from tests.support.command_line import DEADLINE, NO_GPU

LIBRARY = """
import sys
{prelude}

def load(model):
    return {create}

load(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("prelude", "create"),
    [
        ("from ortgpu import GPUSession", "GPUSession(model)"),
        (
            "import ortgpu; ortgpu.install()\nimport onnxruntime",
            "onnxruntime.InferenceSession(model, providers=['CUDAExecutionProvider'])",
        ),
    ],
    ids=["GPUSession", "a guarded session"],
)
def test_at_most_two_frames_are_ours(prelude: str, create: str, tmp_path: Path) -> None:
    from ortgpu.cli.demo import example_model

    model, program = tmp_path / "model.onnx", tmp_path / "library.py"
    model.write_bytes(example_model())
    program.write_text(LIBRARY.format(prelude=prelude, create=create), encoding="utf-8")
    done = run_child([sys.executable, str(program), str(model)], env={**os.environ, **NO_GPU}, deadline=DEADLINE)
    assert done.returncode == 1
    files = re.findall(r'^  File "(.+?)", line', done.stderr, re.MULTILINE)
    ours = [file for file in files if file.startswith(os.path.dirname(ortgpu.__file__))]
    assert len(ours) in (1, 2), done.stderr
    assert files.count(str(program)) == 2
    assert "\nortgpu.errors." in done.stderr
    assert "During handling" not in done.stderr
