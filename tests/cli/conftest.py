from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.cli.model import example_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(example_model())
    return path
