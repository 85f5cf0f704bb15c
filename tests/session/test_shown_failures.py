"""What a failure shows: few lines of this library, and once that a session is on the CPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

import pytest

from tests.lab.models import Models
from tests.support.children import ROOT, Child, child_environment, run_child, run_python

PROGRAM = ROOT / "tests" / "programs" / "library_failures.py"
OUR_FRAME = re.compile(r'^  File "[^"]*/ortgpu/(?!ERRORS)[^"]*\.py", line', re.MULTILINE)


def show(models: Models, way: str, *flags: str) -> Child:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    return run_child([sys.executable, *flags, str(PROGRAM), str(models.relu), way], env=env)


@pytest.mark.parametrize("way", ["guarded", "own", "moved", "running"])
def test_a_traceback_has_at_most_two_frames_of_this_library(models: Models, way: str) -> None:
    done = show(models, way)
    assert done.returncode == 1
    assert "ortgpu.errors." in done.stderr
    assert 1 <= len(OUR_FRAME.findall(done.stderr)) <= 2, done.stderr


WRONG_ARGUMENTS = [
    f"GPUSession({arguments})"
    for arguments in ('"no such file.onnx"', '"m.onnx", devce=0', '"m.onnx", device=-1', '"m.onnx", tuned="later"')
]
USES = [
    "GPUSession(model, allow_cpu=True).run(None, wrong)",
    "list(GPUSession(model, allow_cpu=True).map([wrong]))",
    "GPUSession(model, allow_cpu=True).batched(max_batch=1).run(None, wrong)",
    "GPUSessionPool(model, allow_cpu=True).run(None, wrong)",
    "GPUSessionPool(model, allow_cpu=True).submit(None, wrong).result()",
    "GPUSessionPool('no such file.onnx', allow_cpu=True)",
    "ortgpu.tune('no such file.onnx')",
    "ortgpu.fit('no such file.onnx', device='cpu')",
]


@pytest.fixture(scope="module")
def tracebacks(models: Models) -> Mapping[str, str]:
    """What Python shows of each of these lines, all of them in one process."""
    program, lines = "session.shown_failures.what_python_shows_of_lines", json.dumps([*WRONG_ARGUMENTS, *USES])
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    return run_python(program, str(models.relu), lines, env=env).ok().reports


@pytest.mark.parametrize("line", WRONG_ARGUMENTS)
def test_so_has_the_traceback_of_a_wrong_argument(line: str, tracebacks: Mapping[str, str]) -> None:
    assert 1 <= len(OUR_FRAME.findall(tracebacks[line])) <= 2, tracebacks[line]


@pytest.mark.parametrize("line", USES)
def test_so_has_that_of_a_use(line: str, tracebacks: Mapping[str, str]) -> None:
    assert "Error" in tracebacks[line] or "NoSuchFile" in tracebacks[line]
    assert len(OUR_FRAME.findall(tracebacks[line])) <= 2, tracebacks[line]


def test_the_frames_of_the_users_library_are_all_there(models: Models) -> None:
    assert re.findall(r"in (\w+)$", show(models, "guarded").stderr, re.MULTILINE)[:2] == ["__init__", "load"]


def test_the_log_has_the_frames_for_those_who_debug(models: Models) -> None:
    assert "in find_gpu" in show(models, "debugging").stderr


@pytest.mark.parametrize(
    ("way", "flags", "warned", "logged"),
    [
        ("on the cpu", (), 1, 0),
        ("on the cpu, logging", (), 1, 1),
        ("on the cpu", ("-W", "ignore"), 0, 1),
    ],
)
def test_the_cpu_is_said_once_in_each_place_that_is_set_up(
    models: Models, way: str, flags: tuple[str, ...], warned: int, logged: int
) -> None:
    shown = show(models, way, *flags).ok().stderr
    assert shown.count("CPUExecutionWarning: ") == warned
    assert shown.count("is running on the CPU, as allowed [") == logged
