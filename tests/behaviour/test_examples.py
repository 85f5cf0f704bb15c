"""Every example, run as its reader would run it: in a process of its own, with and without a GPU to use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortgpu.cli.doctor import doctor
from ortgpu.distributed.environment.training import read_training_packages
from ortgpu.environment.packages.installed import locate_packages
from ortgpu.errors import catalogue
from tests.lab import launchers
from tests.lab.fixtures import Lab

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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


def test_every_example_is_tested() -> None:
    tested = {
        "drop_in",
        "application",
        "allow_cpu",
        "guard",
        "pool",
        "ranks",
        "throughput",
        "test_with_gpu",
        "train_data_parallel",
    }
    with_ray = {"ray_data", "ray_serve"}  # by test_ray_matrix.py and gpu/test_ray.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | with_ray


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


def test_pool_ends_with_the_cause() -> None:
    result = run("pool.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert "running on" not in result.stdout
    assert "To fix it:" in result.stdout


def test_pool_works_on_the_cpu_when_allowed() -> None:
    result = run("pool.py", "--allow-cpu", env=NO_GPU)
    assert result.returncode == 0, result
    assert "running on\n  cpu\n" in result.stdout
    assert f"sum of all results: {64 * 4 * sum(range(95))}" in result.stdout
    assert "[[0. 0. 1. 2.]]" in result.stdout


def test_throughput_ends_with_the_cause() -> None:
    result = run("throughput.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert result.stdout.startswith("No GPU can be used ("), result


def test_throughput_on_the_cpu_when_allowed() -> None:
    result = run("throughput.py", "--allow-cpu", env=NO_GPU)
    assert result.returncode == 0, result
    assert "20 batches on cpu" in result.stdout
    assert "mean: 2.0" in result.stdout


@pytest.mark.ortgpu
@pytest.mark.usefixtures("gpus")
def test_throughput_on_the_gpu() -> None:
    result = run("throughput.py")
    assert result.returncode == 0, result
    assert "20 batches on cuda:0" in result.stdout
    assert "cudnn_conv_algo_search=HEURISTIC: " in result.stdout
    assert "mean: 2.0" in result.stdout


def test_guard_ends_with_the_cause() -> None:
    result = run("guard.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert result.stdout.startswith("No GPU can be used ("), result
    assert "result:" not in result.stdout


def test_page_on_training_names_only_what_exists() -> None:
    page = (EXAMPLES / "TRAINING.md").read_text(encoding="utf-8")
    files = re.findall(r"`?((?:examples|tests)/[\w./]+\.\w+)`?", page)
    assert files
    assert [name for name in files if not (EXAMPLES.parent / name).exists()] == []
    assert set(re.findall(r"`(\w+Error)`", page)) <= {cls.__name__ for cls in catalogue().values()}
    options = set(re.findall(r"doctor.*?(--[a-z-]+)", page))
    assert options <= {option for parameter in doctor.params for option in parameter.opts}


@pytest.mark.skipif(
    read_training_packages(locate_packages().onnxruntime.folder).api_folder is not None,
    reason="the training API is installed here",
)
def test_training_says_why_there_is_none() -> None:
    """That it trains, and what: tests/training_matrix/test_training.py."""
    result = run("train_data_parallel.py")
    assert result.returncode == 69, result
    assert result.stderr.startswith("cannot train: onnxruntime.training is not available: "), result
    assert "To fix it:" in result.stderr


def test_a_rank_that_fails_after_the_preflight_is_heard_of(lab: Lab) -> None:
    """The lab's CUDA runtime does for NCCL and for no session: the ranks meet, and none has its own."""
    job = launchers.launch_command(lab.machine_with_nccl(), "environment", 2, [str(EXAMPLES / "ranks.py")])
    assert job.status == 1
    assert "all ranks are alike" in job.result.stdout
    assert "To fix it:" in job.result.stdout
    assert "\nrank 1: " in f"\n{job.result.stderr}", job.result.output


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "torchrun"])
def test_ranks_end_with_the_cause_said_once(launcher: str) -> None:
    launchers.need(launcher)
    [(command, _)] = launchers.starts_of(launcher, 2, [sys.executable, str(EXAMPLES / "ranks.py")])
    env = {**os.environ, **launchers.AS_ROOT, **NO_GPU}
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=env, check=False)
    assert result.returncode != 0, result
    assert result.stdout.count("To fix it:") == 1, result
    assert "on ranks 0, 1, on " in result.stdout


@pytest.mark.ortgpu
@pytest.mark.usefixtures("gpus")
def test_guard_lists_both_sessions() -> None:
    result = run("guard.py")
    assert result.returncode == 0, result
    detector, recognizer, *_ = result.stdout.splitlines()
    assert detector.startswith("<bytes> on cpu [cpu], created by "), result
    assert recognizer.startswith("<bytes> on cuda:0"), result
    assert "[guarded]" in recognizer


@pytest.mark.ortgpu
@pytest.mark.parametrize("name", ["drop_in.py", "application.py", "allow_cpu.py", "guard.py", "pool.py"])
@pytest.mark.usefixtures("gpus")
def test_runs_on_the_gpu(name: str) -> None:
    result = run(name)
    assert result.returncode == 0, result
    assert "cuda:0" in result.stdout + result.stderr
    assert "[[0. 0. 1. 2.]]" in result.stdout + result.stderr


def run_pytest(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The example with tests. ``-p``: these tests may run where the library is importable and not installed."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "ortgpu.pytest_plugin", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=EXAMPLES.parent,
        env={**os.environ, "ORTGPU_GPU": "", **(env or {})},
        check=False,
    )


def test_tests_are_skipped_or_fail_without_a_gpu() -> None:
    skipped = run_pytest("examples/test_with_gpu.py", env=NO_GPU)
    assert skipped.returncode == 0, skipped
    assert "3 skipped" in skipped.stdout
    assert "no GPU can be used: " in skipped.stdout
    required = run_pytest("examples/test_with_gpu.py", "--ortgpu=require", env=NO_GPU)
    assert required.returncode == 1, required
    assert "3 errors" in required.stdout
    assert "To fix it:" in required.stdout


@pytest.mark.ortgpu
@pytest.mark.usefixtures("gpus")
def test_tests_run_on_the_gpu() -> None:
    result = run_pytest("examples/test_with_gpu.py", "--ortgpu=require")
    assert result.returncode == 0, result
    assert "3 passed" in result.stdout
