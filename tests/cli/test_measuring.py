"""How figures are measured and compared: what is left out, percentiles, and which way is recommended."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.cli import output
from ortgpu.cli.bench import _show
from ortgpu.cli.figures import measuring as measuring_module
from ortgpu.cli.figures.measuring import WAYS, Bench, Figure, Spread, _Way, percentiles, recommend
from ortgpu.provider.devices import CPU
from tests.support.children import child_environment, run_python

measuring: Any = measuring_module


@pytest.mark.lab
def test_what_cannot_be_opened_or_run_is_left_out(model: Path) -> None:
    child = run_python("cli.bench.partly_failing", str(model), env=child_environment({"CUDA_VISIBLE_DEVICES": ""})).ok()
    assert child.reports["left out"] == [
        ["pool", None, "DeviceBusyError"],
        ["run", 64, "GPUOutOfMemoryError"],
        ["map", 64, "GPUOutOfMemoryError"],
    ]
    assert child.reports["ways"] == [["plain"], ["plain", "run", "map"]]


def with_memory_for(model: Path, *arguments: str) -> tuple[int | None, str]:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    child = run_python("cli.bench.out_of_memory", str(model), *arguments, env=env)
    assert not child.stderr, child.output
    return child.returncode, child.stdout


@pytest.mark.lab
def test_where_no_batch_fits_into_the_memory_that_is_the_problem(model: Path) -> None:
    code, text = with_memory_for(model, "0", "0", "0", "--json")
    assert code == 1
    document = json.loads(text)
    assert (document["ok"], document["error"]["type"]) == (False, "GPUOutOfMemoryError")
    assert "figures" not in document
    code, text = with_memory_for(model, "0", "0", "0")
    assert code == 1
    assert text.startswith("GPUOutOfMemoryError: ")
    assert "items/s" not in text


@pytest.mark.lab
@pytest.mark.parametrize("calls", [("0", "0"), ("9", "9"), ("9", "100000")], ids=["at once", "later", "only ours"])
def test_a_batch_that_does_not_fit_into_the_memory_takes_no_other_with_it(model: Path, calls: tuple[str, str]) -> None:
    code, text = with_memory_for(model, "1", *calls, "--json")
    assert code == 0
    document = json.loads(text)
    ways = {"plain", "run", "map"}
    assert {(each["batch"], each["way"]) for each in document["figures"]} == {(1, way) for way in ways}
    left_out = document["left_out"]
    assert {(each["batch"], each["way"]) for each in left_out} == {(8, way) for way in ways}
    assert all("Failed to allocate" in each["why"] or "OutOfMemory" in each["why"] for each in left_out)


def test_percentiles_are_those_of_the_calls() -> None:
    seconds = [number / 1000 for number in range(1, 202)]
    assert percentiles(seconds) == pytest.approx({"p50": 101, "p90": 181, "p99": 199, "calls": 201})
    assert percentiles(seconds[:99])["p99"] is None


def figure(way: str, batch: int | None, rate: float, ratio: float | None, spread: float = 0.01) -> Figure:
    around = Spread(rate * (1 - spread), rate, rate * (1 + spread))
    ratios = None if ratio is None else Spread(ratio * (1 - spread), ratio, ratio * (1 + spread))
    latency = (
        {"p50": 1e3 / rate, "p90": 1e3 / rate, "p99": None, "calls": 10} if way in ("plain", "run", "graph") else None
    )
    return Figure(way, batch, around, ratios, latency)


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.043, "0.043"), (0.4, "0.4"), (1.66, "1.66"), (38.46, "38.5"), (99.96, "100"), (1234.5, "1,234")],
)
def test_items_a_second_of_a_slow_model_are_told_apart_from_none(
    rate: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(output.stdout(), [figure("plain", 1, rate, None)], [], [])
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["1", "plain", shown]


def test_nothing_is_said_of_a_difference_within_the_spread() -> None:
    assert recommend([]) == []
    assert recommend([figure("plain", 1, 100, None), figure("run", 1, 101, 1.01)]) == []
    assert recommend([figure("plain", 1, 100, None, 0.2), figure("map", 1, 130, 1.3, 0.01)]) == []
    assert recommend([figure("plain", 1, 100, None), figure("map", 1, 130, 1.3, 0.4)]) == []
    assert recommend([figure("plain", 1, 100, None), figure("map", 1, 70, 0.7)]) == []
    assert recommend([figure("run", 1, 100, None), figure("map", 1, 200, None)]) == []  # plain was not measured
    assert recommend([figure("plain", 1, 100, None), figure("plain", 8, 101, None)]) == []


def test_the_best_way_is_recommended_for_time_and_for_items() -> None:
    figures = [
        figure("plain", 1, 100, None),
        figure("graph", 1, 140, 1.4),
        figure("map", 1, 180, 1.8),
        figure("plain", 64, 1000, None),
        figure("map", 64, 1300, 1.3),
        figure("pool", 64, 2600, 2.6),
    ]
    assert recommend(figures) == [
        f"Batch 1, shortest time for a request: {WAYS['graph']}, speed-up 1.40.",
        f"Batch 1, most items per second: {WAYS['map']}, speed-up 1.80.",
        f"Batch 64, most items per second: {WAYS['pool']}, speed-up 2.60.",
    ]
    assert recommend([figure("plain", None, 100, None), figure("map", None, 180, 1.8)]) == [
        f"This model, most items per second: {WAYS['map']}, speed-up 1.80."
    ]


def test_of_ways_that_do_not_differ_the_plainest_is_recommended() -> None:
    """A pool over one GPU does what map does: by how much is a matter of luck."""
    plain = figure("plain", 8, 100, None)
    assert recommend([plain, figure("map", 8, 240, 2.40), figure("pool", 8, 241, 2.41)]) == [
        f"Batch 8, most items per second: {WAYS['map']}, speed-up 2.40."
    ]
    assert recommend(
        [plain, figure("run", 8, 139, 1.39), figure("graph", 8, 140, 1.4), figure("pool", 8, 260, 2.6)]
    ) == [
        f"Batch 8, shortest time for a request: {WAYS['run']}, speed-up 1.39.",
        f"Batch 8, most items per second: {WAYS['pool']}, speed-up 2.60.",
    ]
    # One that scatters does not stand for the best because it came near that now and then
    assert recommend([plain, figure("map", 8, 180, 1.8, 0.4), figure("pool", 8, 240, 2.4)]) == [
        f"Batch 8, most items per second: {WAYS['pool']}, speed-up 2.40."
    ]


@pytest.mark.parametrize(("batch", "items"), [(None, 1), (1, 1), (8, 8)])
def test_the_rate_of_a_way_counts_the_items_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, batch: int | None, items: int
) -> None:
    """Plain ONNX Runtime takes half a second for each call here, and the other way a quarter."""
    bench: Any = Bench.__new__(Bench)
    bench.left_out, bench.error = [], None
    bench._ways = [_Way(name, run=lambda names, feed: None) for name in ("plain", "run")]

    def alternate(calls: Any, rounds: int) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {"plain": [0.5] * rounds, "run": [0.25] * rounds}

    monkeypatch.setattr(measuring, "_BLOCK", 1e-9)
    monkeypatch.setattr(measuring, "alternate", alternate)
    plain, run = bench.measure(batch, {}, 5)
    assert (plain.batch, plain.rate.median, plain.ratio) == (batch, 2 * items, None)
    assert (run.rate.median, run.ratio.median) == (4 * items, 2)


def test_the_plain_session_of_a_bench_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ORTGPU_ENFORCE=1 it would be a GPUSession, and its speed-up 1."""
    opened: list[str] = []

    class Session(contextlib.nullcontext[None]):
        device = CPU
        run = map = None

        def __init__(self, model: str, **_: Any) -> None:
            opened.append("GPUSession")

        def __enter__(self) -> Any:
            return self

    monkeypatch.setattr(measuring, "gpu_session", SimpleNamespace(GPUSession=Session))
    monkeypatch.setattr(measuring, "uninstall", lambda: opened.append("uninstall"))
    monkeypatch.setattr(measuring, "trial", SimpleNamespace(open_session=lambda *_: opened.append("plain")))
    monkeypatch.setattr(measuring, "GPUSessionPool", Session)
    with contextlib.ExitStack() as stack:
        Bench("model.onnx", stack)
    assert opened[:3] == ["GPUSession", "uninstall", "plain"]
