"""The benchmarks themselves, so far as they run anywhere: throughput and pools, with tiny models on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.common import child_environment, run_child


def test_throughput_takes_every_figure(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.throughput", "--quick", "--cpu", "--json", str(results)]
    env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models")})
    child = run_child(command, env=env, deadline=110)
    assert child.returncode == 0, child.explain()
    record = json.loads(results.read_text(encoding="utf-8"))
    assert record["failed"] == record["left out"] == {}
    assert len(record["figures"]) == 18
    for name, figure in record["figures"].items():
        assert figure["ratio"] > 0
        assert len(figure["values"]["ours"]) == len(figure["values"]["plain"]) == 3
        assert figure["notes"]["device"] == "cpu"
        assert name in child.stdout


def test_without_a_gpu_it_takes_none_and_says_why(tmp_path: Path) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_TEST_MODELS": str(tmp_path)})
    child = run_child([sys.executable, "-m", "benchmarks.throughput"], env=env, deadline=60)
    assert child.returncode == 0, child.explain()
    assert "left out: graph-small: needs an NVIDIA GPU, or --cpu: " in child.stdout


def test_thresholds_of_staging_are_looked_for(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.thresholds", "--quick", "--cpu", "--json", str(results)]
    env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models")})
    child = run_child(command, env=env, deadline=110)
    assert child.returncode == 0, child.explain()
    cases = json.loads(results.read_text(encoding="utf-8"))["cases"]
    assert list(cases) == ["both", "in", "kept"]
    for case in cases.values():
        assert [len(each["ratios"]) for each in case.values()] == [2, 2, 2]
        assert all(ratio > 0 for each in case.values() for ratio in each["ratios"].values())
    assert child.stdout.count("nothing was staged: there is nothing to conclude") == 3  # on the CPU


def test_pool_takes_every_figure(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.pool", "--quick", "--cpu", "--json", str(results)]
    env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models")})
    child = run_child(command, env=env, deadline=110)
    assert child.returncode == 0, child.explain()
    record = json.loads(results.read_text(encoding="utf-8"))
    assert record["failed"] == record["left out"] == {}
    assert list(record["figures"]) == [f"pool-resnet50-b256-x{count}" for count in (1, 2, 4, 8)]
    for figure in record["figures"].values():
        assert figure["ratio"] > 0
        assert len(figure["values"]["ours"]) == len(figure["values"]["plain"]) == 3
        assert float(figure["notes"]["times one GPU"]) > 0
        assert float(figure["notes"]["largest relative error of ours"]) < 1e-5


def test_pool_without_so_many_gpus_says_so(tmp_path: Path) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_TEST_MODELS": str(tmp_path)})
    child = run_child([sys.executable, "-m", "benchmarks.pool"], env=env, deadline=60)
    assert child.returncode == 0, child.explain()
    assert child.stdout.count("left out: pool-resnet50-b256-x") == 4
