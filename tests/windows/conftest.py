"""The fixture of a Windows, for the tests that run in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.windows import Windows, why_not


@pytest.fixture
def windows(tmp_path: Path) -> Iterator[Windows]:
    """A Windows with ONNX Runtime for CUDA, and neither a driver nor CUDA."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "windows"
    folder.mkdir()
    machine = Windows(folder)
    try:
        yield machine
    finally:
        machine.end()
