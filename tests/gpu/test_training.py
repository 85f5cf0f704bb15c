"""Ranks that train on the CPU, as ONNX Runtime's published packages can, and average by NCCL on their GPUs.

In an environment with the extra `training`, torch with CUDA, Open MPI, and nccl4py with NCCL's library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import launchers
from tests.lab.launchers import AS_ROOT, starts_of
from tests.support.children import child_environment, run_child
from tests.support.this_machine import GPUs

pytestmark = pytest.mark.ortgpu(count=2)

PROGRAM = Path(__file__).with_name("trained_ranks.py")
TRAINING = "onnxruntime-training-cpu"

Train = Callable[..., list[str]]


@pytest.fixture
def train(gpus: GPUs) -> Train:
    """The lines that so many ranks print in so many steps."""
    if not any(importlib.metadata.distributions(name=TRAINING)):
        pytest.skip(f"needs {TRAINING}: pip install 'ortgpu[training]', in an environment without onnxruntime-gpu")
    if importlib.util.find_spec("nccl") is None:
        pytest.skip("needs nccl4py: pip install 'ortgpu[distributed]', or its wheel on PYTHONPATH")
    launchers.need("openmpi")

    def run(ranks: int, steps: int, *folder: Path) -> list[str]:
        if len(gpus.visible) < ranks:
            pytest.skip(f"needs {ranks} GPUs, and CUDA shows {len(gpus.visible)}")
        [(command, _)] = starts_of("openmpi", ranks, [sys.executable, str(PROGRAM), str(steps), *map(str, folder)])
        child = run_child(command, env=child_environment({**AS_ROOT, "NCCL_NVLS_ENABLE": "0"}), deadline=120).ok()
        lines = child.stdout.splitlines()
        for number, gpu in enumerate(gpus.visible[:ranks]):
            (line,) = [line for line in lines if line.startswith(f"rank {number} averages by ")]
            assert "libnccl.so.2" in line
            assert line.endswith(str(gpu.uuid))
        return lines

    return run


def losses_in(lines: list[str]) -> list[float]:
    return [float(line.rpartition("loss ")[2]) for line in lines if "loss" in line]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_what_one_process_trains(train: Train, ranks: int) -> None:
    words = train(ranks, 20)[-1].split()
    moved, apart = float(words[words.index("moved") + 1].rstrip(",")), float(words[words.index("from") - 1])
    assert moved > 0.1, "it trains"
    assert apart < 2e-6, "float32: a few units in the last place of parameters near 1"


def test_four_ranks_go_on_from_the_checkpoint_of_two(train: Train, tmp_path: Path) -> None:
    alone = losses_in(train(2, 10))
    found = losses_in([*train(2, 5, tmp_path), *train(4, 5, tmp_path)])
    assert len(found) == 10
    assert found == pytest.approx(alone, rel=1e-5)
