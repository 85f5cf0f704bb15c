"""The benchmarks themselves, so far as they run anywhere: throughput and pools, with tiny models on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import ROOT, Child, child_environment, run_child, run_python
from tests.support.this_machine import commit_of

pytestmark = pytest.mark.lab


def record_of(tmp_path: Path, benchmark: str, *options: str) -> tuple[dict[str, Any], Child]:
    """What a benchmark wrote into its file of results, on the CPU with tiny models, and the child that took it."""
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", "--cpu", "--json", str(results), *options]
    env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models")})
    child = run_child(command, env=env, deadline=110).ok()
    record: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return record, child


@pytest.mark.slow
def test_throughput_takes_every_figure(tmp_path: Path) -> None:
    record, child = record_of(tmp_path, "throughput")
    assert record["failed"] == record["left out"] == {}
    assert len(record["figures"]) == 18
    for name, figure in record["figures"].items():
        assert figure["ratio"] > 0
        assert len(figure["values"]["ours"]) == len(figure["values"]["plain"]) == 3
        assert figure["notes"]["device"] == "cpu"
        assert name in child.stdout


def test_concurrency_names_the_best_number_of_threads(tmp_path: Path) -> None:
    record, _ = record_of(tmp_path, "concurrency", "--only", "resnet50-b8", "--only", "encoder-b1")
    figures = record["figures"]
    assert list(figures) == ["resnet50-b8", "encoder-b1"]
    for figure in figures.values():
        rates = {name: float(rate) for name, rate in figure["notes"]["samples a second"].items()}
        assert len(rates) == 14
        assert rates[figure["notes"]["best"]] == max(rates[f"{count} threads"] for count in (1, 2, 3, 4, 6, 8))


@pytest.mark.slow
def test_joined_requests_are_measured_beside_the_best_number_of_threads(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.batched", "--cpu", "--seconds", "4", "--out", str(results)]
    for more in ([], ["--pool", "--max-batch", "16"]):
        env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models")})
        run_child([*command, *more], env=env, deadline=110).ok()
        record = json.loads(results.read_text(encoding="utf-8"))
        by_bar = [each["by bar"] for each in record["figures"]]
        assert len(by_bar) == 5
        assert by_bar == sorted(by_bar)
        assert record["largest error"] < 1e-5
        assert set(record["images a second"]) == {"plain", "tasks", "threads", "futures"}
        assert all(rate > 0 for taken in record["images a second"].values() for rate in taken)


@pytest.mark.parametrize("benchmark", ["memory", "shapes"])
def test_a_benchmark_for_a_gpu_alone_finds_all_that_it_imports(benchmark: str) -> None:
    run_child([sys.executable, "-m", f"benchmarks.{benchmark}", "--help"], env=child_environment({}), deadline=60).ok()


def test_options_are_compared_with_none(tmp_path: Path) -> None:
    record, _ = record_of(tmp_path, "options", "--only", "heuristic")
    figure = record["figures"]["heuristic"]
    assert len(figure["values"]["ours"]) == 3
    assert figure["notes"]["options"] == {"cudnn_conv_algo_search": "HEURISTIC"}
    for name in ("constructor", "first run", "batches of 1", "batches of 8", "batches of 64"):
        assert figure["notes"][name]["median"] > 0
        assert float(figure["notes"][f"{name} / plain"]) > 0


@pytest.mark.slow
def test_thresholds_of_staging_are_looked_for(tmp_path: Path) -> None:
    record, child = record_of(tmp_path, "thresholds", "--only", "4mib", "--only", "64mib", "--budget", "1.5")
    figures = record["figures"]
    assert list(figures) == ["4mib", "64mib"]
    for figure in figures.values():
        assert figure["ratio"] > 0
        ratios = [figure["notes"][f"{case} / plain, by threads x MiB a piece"] for case in ("both", "in", "kept")]
        assert [len(each) for each in ratios] == [6] * 3
        assert figure["notes"]["best"] in ratios[0]
        assert figure["notes"]["staged"] is False  # on the CPU
    assert child.stdout.endswith("nothing was staged: there is nothing to conclude\n")


def test_thresholds_are_where_all_larger_sizes_gain() -> None:
    code = "benchmarks.thresholds_are_where_all_larger_sizes_gain"
    found = run_python(code).ok().reports
    constants = "COPY_THREADS = 8, PIECE = 8 << 20, STAGED_FROM = 64 << 20"
    assert found["all gain"] == f"{constants} (both from 8 MiB, in from 64 MiB, kept from 64 MiB)"
    assert "STAGED_FROM" not in found["one does not"]
    assert "kept from no MiB" in found["one does not"]


def test_without_a_gpu_it_takes_none_and_says_why(tmp_path: Path) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_TEST_MODELS": str(tmp_path)})
    child = run_child([sys.executable, "-m", "benchmarks.throughput"], env=env, deadline=60).ok()
    assert "left out: graph-small: needs an NVIDIA GPU, or --cpu: " in child.stdout


@pytest.mark.slow
def test_what_a_budget_cuts_short_is_kept_and_the_rest_left_out(tmp_path: Path) -> None:
    """A worker that reports three rounds and hangs, one that reports two and hangs, and one that comes too late."""
    code = """
import functools, sys, time
from benchmarks import figures
from tests.support.children import child_environment

def take(_, rounds):
    taken = {"seconds": {name: [0.5] * rounds for name in ("ours", "plain")}}
    env = child_environment({"WORKER": repr(taken)})
    reports = figures.run_worker("hangs", {}, env=env, deadline=8).reports
    return figures.Figure(**reports["seconds"], notes={"cut short": reports["cut short"]})

found = {name: (name, False, functools.partial(take, rounds=rounds)) for name, rounds in (("a", 3), ("b", 2), ("c", 3))}
sys.exit(figures.take_figures("made up", "", found, lambda *_: None, sys.argv[1:]))
"""
    workers = tmp_path / "benchmarks"
    workers.mkdir()
    (workers / "workers.py").write_text(
        "import ast, os, time\n"
        "from tests.support.children import report\n"
        "for name, value in ast.literal_eval(os.environ['WORKER']).items():\n"
        "    report(name, value)\n"
        "time.sleep(100)\n"
    )
    code = f"from pathlib import Path\nfrom benchmarks import figures\nfigures.ROOT = Path({str(tmp_path)!r})\n{code}"
    results = tmp_path / "results.json"
    command = [sys.executable, "-c", code, "--json", str(results), "--budget", "0.2"]
    run_child(command, deadline=60).ok()
    record = json.loads(results.read_text(encoding="utf-8"))
    assert list(record["figures"]) == ["a"]
    assert record["figures"]["a"]["values"]["ours"] == [0.5] * 3
    assert "killed at its deadline" in record["figures"]["a"]["notes"]["cut short"]
    assert record["left out"]["b"].startswith("no time was left for more than ")
    assert record["left out"]["c"] == "no time was left"
    assert record["failed"] == {}


@pytest.mark.slow
def test_pool_takes_every_figure(tmp_path: Path) -> None:
    record, _ = record_of(tmp_path, "pool")
    assert record["failed"] == record["left out"] == {}
    assert list(record["figures"]) == [
        *(f"pool-{kind}resnet50-b256-x{count}" for kind in ("", "reused-") for count in (1, 2, 4, 8)),
        *(f"isolated-{what}-x{count}" for what in ("resnet50-b64", "negate-64mb") for count in (1, 2)),
    ]
    for name, figure in record["figures"].items():
        assert figure["ratio"] > 0
        assert len(figure["values"]["ours"]) == len(figure["values"]["plain"]) == 3
        assert float(figure["notes"]["throughput, times that of threads" if "iso" in name else "times one GPU"]) > 0
        assert float(figure["notes"]["largest relative error of ours"]) < 1e-5


def test_pool_without_so_many_gpus_says_so(tmp_path: Path) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_TEST_MODELS": str(tmp_path)})
    child = run_child([sys.executable, "-m", "benchmarks.pool"], env=env, deadline=60).ok()
    assert child.stdout.count("left out: pool-resnet50-b256-x") == 4
    assert child.stdout.count("left out: pool-reused-resnet50-b256-x") == 4


@pytest.mark.slow
def test_soak_compares_every_result_and_watches_memory(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--cpu", "--minutes", "0.1", "--json", str(results)]
    env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models"), "PYTHONWARNINGS": "ignore"})
    child = run_child(command, env=env, deadline=110).ok()
    assert child.stdout.endswith("OK\n")
    ways = json.loads(results.read_text(encoding="utf-8"))["ways"]
    assert list(ways) == ["map", "pool of 1"]
    for outcome in ways.values():
        assert outcome["results"] > 100
        assert outcome["wrong"] == 0
        assert len(outcome["bytes"]["host"]) > 4


def test_soak_notices_what_is_wrong_and_what_grows() -> None:
    code = "benchmarks.soak_notices_what_is_wrong_and_what_grows"
    outcome = run_python(code).ok().reports["outcome"]
    assert outcome["wrong"] == 1
    assert outcome["growth"]["host"] > 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="a pool has processes on Linux only")
def test_chaos_accounts_for_every_request(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--cpu", "--minutes", "0.25", "--kill", "1.5", "--spoil", "4", "--json", str(results)]
    env = child_environment({"ORTGPU_TEST_MODELS": str(tmp_path / "models"), "PYTHONWARNINGS": "ignore"})
    child = run_child([sys.executable, "-m", "benchmarks.chaos", *options], env=env, deadline=150).ok()
    assert child.stdout.endswith("OK\n")
    record = json.loads(results.read_text(encoding="utf-8"))
    assert record["requests"].keys() <= {"right", "cancelled", "WorkerLostError"}
    assert record["requests"]["right"] > 100
    assert record["killed"] >= 3
    assert record["restarts"] >= record["killed"]
    poisoned, hung = sorted(record["spoilt"])
    assert "PoisonedContextError" in poisoned
    assert hung == "WorkerLostError: its deadline of 2 s has passed"
    assert len(record["seconds from a death to the first result"]) == 5


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on PATH")
@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_the_commit_of_a_checkout_and_of_its_worktrees(tmp_path: Path, packed: bool) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        own = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # nobody's signing, nor hooks
        done = subprocess.run(command, cwd=checkout, env=own, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    checkout, worktree, detached = tmp_path / "checkout", tmp_path / "worktree", tmp_path / "detached"
    checkout.mkdir()
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    first = git("rev-parse", "HEAD")
    git("worktree", "add", "--quiet", "-b", "other", str(worktree))
    git("worktree", "add", "--quiet", "--detach", str(detached))
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    if packed:
        git("pack-refs", "--all")
    found = [commit_of(folder) for folder in (checkout, worktree, detached, tmp_path)]
    assert found == [git("rev-parse", "HEAD"), first, first, None]


RECORDED = ROOT / "benchmarks" / "results"
# Rows of README.md, and the recorded figures that they are
ROWS = {
    "no GPU visible": ("overhead-h200-2026-11-23-1ac2759", "broken-no-device"),
    "`run` of a model with two": ("overhead-h200-2026-11-23-1ac2759", "run-small"),
}


def test_figures_of_the_readme_are_recorded_and_the_worst_is_first() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| [\d.,]+ \S+ \| [\d.,]+(?: \S+)? \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == len(ROWS)
    times = [float(shown) for _, shown in rows]
    assert times == sorted(times)
    for (row, shown), (start, (file, name)) in zip(rows, ROWS.items(), strict=True):
        assert row.startswith(start)
        figure = json.loads((RECORDED / f"{file}.json").read_text(encoding="utf-8"))["figures"][name]
        assert f"{figure['plain']['median'] / figure['ours']['median']:.2f}" == shown, row


def spread_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the worst, the mean and the best speed-up."""
    times = [1 / ratio for ratio in ratios]
    return min(times), statistics.geometric_mean(times), max(times)


def test_what_the_readme_says_of_untuned_sessions_is_recorded() -> None:
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    zoo = json.loads((RECORDED / "zoo-h200-2026-11-23-4fba0b2.json").read_text(encoding="utf-8"))
    parts = [part for part in zoo["parts"].values() if part["options"] and "prefer_nhwc" not in part["options"]]
    assert len(parts) == 10
    for batch in (1, 32):
        worst, mean, best = spread_of([part["figures"][f"map b{batch}"]["ratio"] for part in parts])
        assert f"{mean:.2f} in batches of {batch} ({worst:.2f} to {best:.2f})" in page


def test_every_table_of_the_figures_is_that_of_its_file(tmp_path: Path) -> None:
    page = ROOT / "benchmarks" / "FIGURES.md"
    command = [sys.executable, "-m", "benchmarks.publish", "--check", "--page"]
    run_child([*command, str(page)], deadline=60).ok()
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r"^\| [^|]+ \|.*\|\n\|(?:---\|)+$", text.partition("## Other files")[0], re.MULTILINE)
    assert len(tables) == text.count("<!-- table of ") > 10, "a table without a file"
    (tmp_path / "results").symlink_to(RECORDED)
    for old, new in (("0.55 [", "0.65 ["), ("commit 1ac2759", "commit 2ac2759")):
        assert old in text
        typed = tmp_path / "FIGURES.md"
        typed.write_text(text.replace(old, new, 1), encoding="utf-8")
        assert run_child([*command, str(typed)], deadline=60).returncode == 1


@pytest.mark.parametrize(
    ("page", "published", "names", "worst"),
    [
        ("benchmarks/FIGURES.md", "times-plain-h200-2026-11-23-1ac2759",
            ("throughput-map-h200", "throughput-run-and-graph-h200", "pool-h200-x2"), "first-run-resnet50"),
        ("README.md", "map-untuned-h200-2026-11-23-4fba0b2", ("zoo-h200",), "perceptron"),
    ],
)  # fmt: skip
def test_plot_of_a_page_is_that_of_the_recorded_figures(
    page: str, published: str, names: Sequence[str], worst: str, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.svg"
    when = published.partition("-h200")[2]
    results = [str(RECORDED / f"{name}{when}.json") for name in names]
    run_child([sys.executable, "-m", "benchmarks.publish", *results, "--plot", str(plot)], deadline=60).ok()
    shown = RECORDED / f"{published}.svg"
    texts = [re.findall(r">([^<>]+)</text>", each.read_text(encoding="utf-8")) for each in (plot, shown)]
    assert texts[0] == texts[1]
    assert worst in texts[0]
    assert f"results/{published}.svg)" in (ROOT / page).read_text(encoding="utf-8")


def test_results_are_published_as_a_table_and_a_plot(tmp_path: Path) -> None:
    results, plot = tmp_path / "results.json", tmp_path / "plot.svg"
    figure = {
        "ours": {"median": 0.002},
        "plain": {"median": 0.004},
        "values": {"ours": [0.001, 0.002, 0.003], "plain": [0.004, 0.004, 0.004]},
    }
    record = {"benchmark": "throughput", "machine": {"gpus": ["a GPU"]}, "figures": {"map-b8": figure}}
    results.write_text(json.dumps(record), encoding="utf-8")
    child = run_child([sys.executable, "-m", "benchmarks.publish", str(results), "--plot", str(plot)], deadline=60).ok()
    assert "| `map-b8` | 2.00 ms | 4.00 ms | 2.00 [1.60, 2.67] |" in child.stdout
    text = plot.read_text(encoding="utf-8")
    assert ">map<" in text
    assert ">batch 8<" in text
    assert "throughput, a GPU" in text


@pytest.mark.slow
def test_the_zoo_goes_on_after_a_part_that_fails_and_names_the_worst_kind_first(tmp_path: Path) -> None:
    results, models = tmp_path / "results.json", tmp_path / "models"
    models.mkdir()
    (models / "zoo-recurrent-v1.onnx").write_bytes(b"no model")
    options = ["--device", "cpu", "--kinds", "recurrent", "perceptron", "--parts", "kinds", "--seconds", "40"]
    command = [sys.executable, "-m", "benchmarks.zoo", "--out", str(results), "--folder", str(models), *options]
    child = run_child(command, deadline=110)
    record = json.loads(results.read_text(encoding="utf-8"))
    assert child.returncode == 1, child.output
    assert list(record["parts"]["recurrent"]["failed"]) == ["the process of recurrent"]
    figures = record["parts"]["perceptron"]["figures"]
    assert set(figures) == {"run b1", "map b1", "run b32", "map b32", "cuda_graph b1", "constructor"}
    assert record["parts"]["perceptron"]["failed"] == {}
    assert all(len(each["ours"]) == len(each["plain"]) >= 3 for each in figures.values())
    assert record["summary"]["map b1"]["worst"][0] == "perceptron"
    assert "map b1: worst perceptron" in child.stdout
    assert "failed: recurrent" in child.stdout


def test_the_worst_of_the_zoo_is_named_first() -> None:
    code = "benchmarks.the_worst_of_the_zoo_is_named_first"
    found = run_python(code).ok().reports["found"]
    assert found["worst"] == ["two", 2.0]
    assert found["best"] == ["one", 0.5]
    assert found["geometric mean"] == pytest.approx(1.0)
    assert list(found["all"]) == ["two", "three", "one"]


@pytest.mark.slow
def test_a_kind_of_the_zoo_is_tuned_and_the_rest_named_when_the_time_is_up(tmp_path: Path) -> None:
    results, models = tmp_path / "results.json", tmp_path / "models"
    options = ["--device", "cpu", "--parts", "tuned", "--kinds", "dense", "perceptron", "--seconds", "0.001"]
    command = [sys.executable, "-m", "benchmarks.zoo", "--out", str(results), "--folder", str(models), *options]
    env = child_environment({"XDG_RUNTIME_DIR": str(tmp_path)})
    child = run_child(command, env=env, deadline=110).ok()
    record = json.loads(results.read_text(encoding="utf-8"))
    classes = ("TF32", "TF32 without graphs", "float16", "float16 without graphs")
    device_times = {f"tuned {name} b32" for name in classes} | {f"tuned {name} b1" for name in classes[:2]}
    assert record["left out"] == ["dense, tuned"]
    (part,) = record["parts"].values()
    assert part["failed"] == {}
    assert set(part["figures"]) == {*device_times, "map b1, tuned", "map b32, tuned", "constructor"}
    assert part["notes"]["trials b32"]["compared with"] == "the CPU's float32"
    for batch in (1, 32):
        assert json.loads((models / f"tuned-perceptron-b{batch}.json").read_text(encoding="utf-8"))["named"]
    assert list(record["summary"]["tuned TF32 b32"]["all"]) == ["perceptron"]
    assert "map b32, tuned: worst perceptron" in child.stdout
    assert "left out for want of time: dense, tuned" in child.stdout


def test_the_zoo_names_who_misses_a_bar_and_the_mean_without_the_odd_one() -> None:
    code = "benchmarks.the_zoo_names_who_misses_a_bar_and_the_mean_without_the_odd_one"
    found = run_python(code).ok().reports["found"]
    assert found["constructor"]["missed by"] == []
    assert found["map b1, tuned"]["missed by"] == ["unet"]
    assert found["map b1, tuned"]["geometric mean without recurrent"] == pytest.approx((0.9 * 1.4) ** 0.5)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed here")
def test_networks_of_pytorch_compute_what_those_of_the_zoo_do(tmp_path: Path) -> None:
    code = "benchmarks.networks_of_pytorch_compute_what_those_of_the_zoo_do"
    reports = run_python(code, str(tmp_path), deadline=110).ok().reports
    assert len(reports) == 6
    assert max(reports.values()) < 1e-5, reports


@pytest.mark.slow
def test_every_kind_of_the_zoo_runs_with_any_batch(tmp_path: Path) -> None:
    code = "benchmarks.every_kind_of_the_zoo_runs_with_any_batch"
    reports = run_python(code, str(tmp_path), deadline=110).ok().reports
    assert len(reports) == 26
    assert all(reports.values()), reports


def test_what_tune_chose_is_compared_with_the_best_of_the_full_grid(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--cpu", "--budget", "20", "--grid", "20", "--batch", "2", "--json", str(results)]
    env = child_environment({"XDG_RUNTIME_DIR": str(tmp_path), "ORTGPU_TEST_MODELS": str(tmp_path)})
    child = run_child([sys.executable, "-m", "benchmarks.tuning", *options, "perceptron"], env=env, deadline=110).ok()
    (row,) = json.loads(results.read_text(encoding="utf-8"))["rows"]
    count = row["grid"]["of"]
    assert row["grid"]["timed"] == count in (8, 16)  # graph, shapes, cuDNN; threads, where there are many
    measured = [each["ratio"] for each in row["trials"]]
    assert len(measured) == count - 1  # one is plain ONNX Runtime
    best = min(1.0, *measured)
    assert row["best"]["TF32"]["ratio"] == best
    assert row["grid"]["chosen over best"] == pytest.approx(row["named"]["ratio"] / best)
    assert f"of the best of {count} of {count} settings" in child.stdout


@pytest.mark.slow
def test_planted_faults_are_rejected_in_random_networks(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--faults", "--networks", "1", "--cpu", "--budget", "60", "--json", str(results)]
    child = run_child([sys.executable, "-m", "benchmarks.tuning", *options], deadline=170).ok()
    (row,) = json.loads(results.read_text(encoding="utf-8"))["rows"]
    assert set(row["faults"]) == {"one wrong channel", "fuse_conv_bias without prefer_nhwc", "a race"}
    assert all(verdict.startswith("rejected: output") for verdict in row["faults"].values()), row["faults"]
    assert child.stdout.count("accepted 0 of 1 (bar 0)") == 3


def test_a_planted_fault_that_was_accepted_or_not_tried_is_named() -> None:
    code = "benchmarks.a_planted_fault_that_was_accepted_or_not_tried_is_named"
    assert run_python(code).ok().reports["faults"] == {
        "one wrong channel": "accepted",
        "fuse_conv_bias without prefer_nhwc": "not tried",
        "a race": "rejected: output 'y' is wrong",
    }


BATCHED_KINDS = "benchmarks.batched_kinds"


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_each_kind_of_the_zoo_may_be_batched(tmp_path: Path) -> None:
    """Their items are independent. tests/session/test_joinable.py has the models whose items are not."""
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    *kinds, last = run_python(BATCHED_KINDS, str(tmp_path), env=env, deadline=1900).ok().stdout.splitlines()
    assert last == f"all {len(kinds)}"
    assert len(kinds) >= 13
