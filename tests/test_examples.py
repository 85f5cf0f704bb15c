"""Every example, run as its reader would run it: in a process of its own, with and without a GPU to use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import find_gpus

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEADLINE = 110  # seconds: a process that opens a first session on a slow machine needs a fraction of it

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the state of most machines, and one that any machine can be put into


def run(name: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, **(env or {})},
        check=False,
    )


@pytest.fixture(scope="module")
def gpu_here() -> None:
    found = find_gpus()
    if not found.visible:
        refuse = pytest.fail if os.environ.get("ORTGPU_REQUIRE_GPU") == "1" else pytest.skip
        refuse(f"needs an NVIDIA GPU: {found.reason}")


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"drop_in.py", "application.py", "allow_cpu.py"}


def test_drop_in_ends_with_the_cause() -> None:
    result = run("drop_in.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert "running on" not in result.stdout
    last = result.stderr[result.stderr.rindex("\nortgpu.errors.") :]
    assert "To fix it:" in last


def test_application_logs_cause_and_fix() -> None:
    result = run("application.py", env=NO_GPU)
    assert result.returncode == 69, result
    assert "Traceback" not in result.stderr
    assert "CRITICAL cannot start [" in result.stderr
    assert "to fix it: " in result.stderr


def test_cpu_is_refused_unless_allowed() -> None:
    result = run("allow_cpu.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert "No GPU can be used" in result.stdout


def test_cpu_is_used_loudly_when_allowed() -> None:
    result = run("allow_cpu.py", "--allow-cpu", env=NO_GPU)
    assert result.returncode == 0, result
    assert "This will be slow:" in result.stdout
    assert "running on the CPU, as allowed" in result.stdout
    assert "[[0. 0. 1. 2.]]" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["drop_in.py", "application.py", "allow_cpu.py"])
def test_runs_on_the_gpu(name: str, gpu_here: None) -> None:
    result = run(name)
    assert result.returncode == 0, result
    assert "cuda:0" in result.stdout + result.stderr
    assert "[[0. 0. 1. 2.]]" in result.stdout + result.stderr
