"""Sessions that multiprocessing carries to where they do not open: the program hears of it, and nobody waits."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.models import Models
from tests.support.children import ROOT, child_environment, run_child

PROGRAM = ROOT / "tests" / "programs" / "received_sessions.py"
METHODS = multiprocessing.get_all_start_methods()


def travel(way: str, model: Path) -> Any:
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1"})
    return run_child([sys.executable, str(PROGRAM), str(model), way], env=env, deadline=60).ok().json


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["argument", "executor"])
def test_an_argument_of_a_worker(models: Models, way: str, method: str) -> None:
    assert travel(f"{way} {method}", models.relu) == "GPUError"


def test_an_argument_of_the_initializer(models: Models) -> None:
    """By fork the worker has the session of its parent, which works: it is on the CPU."""
    assert travel("initializer spawn", models.relu) == "GPUError"


def test_a_result_that_does_not_open_in_the_parent(models: Models) -> None:
    assert travel("result spawn", models.relu) == "GPUError"


def test_every_use_of_such_a_session_raises_the_error(models: Models) -> None:
    found = travel("uses spawn", models.relu)
    assert found.pop("repr").startswith("returned <ortgpu.session.GPUSession object")
    assert found.pop("sessions") == "returned 0"
    assert found.pop("close") == "returned None"
    assert found == dict.fromkeys(found, "GPUError")
    assert len(found) == 14


def test_such_a_session_can_travel_on(models: Models) -> None:
    assert travel("again", models.relu) == ["GPUError", [1.0] * 4]


def test_an_error_of_onnxruntime_itself(models: Models, tmp_path: Path) -> None:
    model = tmp_path / "gone.onnx"
    shutil.copy(models.relu, model)
    assert travel("file spawn", model) == "NoSuchFile"


def test_who_unpickles_without_multiprocessing_gets_the_error_at_once(models: Models) -> None:
    assert travel("directly", models.relu) == ["GPUError", "GPUError"]
