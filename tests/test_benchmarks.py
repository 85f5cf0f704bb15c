"""The benchmark of the pool, as far as it goes without a GPU: that it measures both, and reckons right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.common import child_environment, run_child
from benchmarks.pool import counts_of, figures, table


def test_pool_is_measured_beside_plain_sessions(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    arguments = ["--on-cpu", "2", "--model", "mlp", "--batch", "16", "--quick", "--json", str(path)]
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_TEST_MODELS": str(tmp_path)})
    child = run_child([sys.executable, "-m", "benchmarks.pool", *arguments], env=env, deadline=100)
    assert child.returncode == 0, child.explain()
    record = json.loads(path.read_text())
    assert record["devices"] == ["cpu", "cpu"]
    assert list(record["figures"]) == ["1", "2"]
    for figure in record["figures"].values():
        assert all(figure[name]["median"] > 0 and figure[name]["n"] == 3 for name in ("ours", "plain", "ratio"))
    assert child.stdout.splitlines()[-1].startswith("2 ")


def test_without_a_gpu_it_says_why() -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    child = run_child([sys.executable, "-m", "benchmarks.pool"], env=env, deadline=100)
    assert child.returncode == 1
    assert child.stderr.startswith("needs an NVIDIA GPU: ")
    assert child.stdout == ""


def test_figures_are_items_a_second_and_ratios_of_rounds() -> None:
    seconds = {"ours 1": [1.0, 2.0], "plain 1": [2.0, 4.0], "ours 2": [1.0, 2.0], "plain 2": [4.0, 8.0]}
    found = figures(seconds, [1, 2], 100)
    assert found["1"]["ours"]["median"] == pytest.approx(75)  # of 100 and 50
    assert found["2"]["ours"]["median"] == pytest.approx(150)
    assert [found[count]["ratio"]["median"] for count in ("1", "2")] == pytest.approx([2, 4])
    assert (found["2"]["ours to one GPU"]["median"], found["2"]["plain to one GPU"]["median"]) == pytest.approx((2, 1))
    assert len({line.count("[") for line in table(found).splitlines()[2:]}) == 1


@pytest.mark.parametrize(
    ("gpus", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])]
)
def test_numbers_of_gpus(gpus: int, counts: list[int]) -> None:
    assert counts_of(gpus) == counts
