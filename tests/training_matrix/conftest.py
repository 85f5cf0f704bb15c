"""Environments of the training matrix, installed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.advice import own
from tests.lab import Machine, Overlay
from tests.lab.environments import install
from tests.lab.fixtures import Lab
from tests.training_matrix.environments import NEEDED_BY_ORTGPU, REQUIREMENTS


@pytest.fixture(scope="session")
def training() -> Path:
    """The site-packages of the environment that trains."""
    return install("training-1.19.2", REQUIREMENTS)


@pytest.fixture(scope="session")
def mpich() -> Path:
    return install("mpich-5.0.2", ["mpich==5.0.2"])


@pytest.fixture(scope="session")
def nccl() -> Path:
    return install("nccl-cu13", ["nvidia-nccl-cu13", "nccl4py>=0.6,<0.7", *NEEDED_BY_ORTGPU])


@pytest.fixture
def whole(lab: Lab, training: Path) -> Machine:
    """The environment that trains, to be broken and mended."""
    overlay = Overlay(lab.folder / "environment", training)
    for name in ("onnxruntime*", "onnx", "onnx-*"):
        for entry in overlay.site.glob(name):
            own(overlay, entry)
    return Machine(overlay, lab.stubs)
