"""The fixture of a Windows, for the tests that run in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.models import Models
from tests.lab.stubs import NVML, Cuda
from tests.lab.windows import Windows, why_not
from tests.windows.inside import MODEL, RTX_4090


@pytest.fixture
def windows(tmp_path: Path) -> Iterator[Windows]:
    """A Windows with ONNX Runtime for CUDA, and neither a driver nor CUDA."""
    yield from _machine(tmp_path)


@pytest.fixture(scope="module")
def module_windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    """Such a Windows for all tests of a module, which ask it one question together."""
    yield from _machine(tmp_path_factory.mktemp("module"))


@pytest.fixture
def machine(windows: Windows, models: Models) -> Windows:
    """A Windows with a driver, a GPU and a model, and without CUDA."""
    windows.install_driver(Cuda(devices=(RTX_4090,)), NVML(gpus=(RTX_4090,)))
    windows.write(MODEL, models.relu.read_bytes())
    return windows


def _machine(folder: Path) -> Iterator[Windows]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    (folder / "windows").mkdir()
    machine = Windows(folder / "windows")
    try:
        yield machine
    finally:
        machine.end()
