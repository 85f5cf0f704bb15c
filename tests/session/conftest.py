"""What the tests of tuning share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.networks import Network


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four convolutions, whose tensors are v0 to v7; the third one makes v4."""
    made = Network(0)
    for _ in range(4):
        made.add("Relu", made.conv())
    path = tmp_path_factory.mktemp("tuning") / "network.onnx"
    path.write_bytes(made.model())
    return path
