"""Layouts of images in ``ortgpu bench``: what is measured, what is left out, what is recommended.

What they gain is for a GPU to show (gpu/test_bench_layouts.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ortgpu.cli import output
from ortgpu.cli.bench import _Results
from ortgpu.cli.bench.measuring import WAYS, Figure, Latency, LeftOut, Spread, recommend
from ortgpu.provider import requests as providers
from ortgpu.provider.devices import Device
from ortgpu.session.chosen import layouts
from ortgpu.session.chosen.layouts import LAYOUTS
from tests.cli.test_layout_trials import computed_weights, saved
from tests.lab.fixtures import Lab
from tests.session.test_layout import asked
from tests.support.children import child_environment, run_child
from tests.support.command_line import NO_GPU, ortgpu
from tests.support.networks import Network

CUDA = "CUDAExecutionProvider"
FIRST, LAST, FUSED = LAYOUTS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The second is like the first, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    paths = []
    for number in (0, 1):
        network = Network(number)
        network.conv()
        paths.append(saved(network, folder / f"{number}.onnx"))
    return paths[0], paths[1]


# What is measured


CHOICES = """
import sys, warnings
from tests.support.children import report
from ortgpu.cli.bench import measuring
from ortgpu.provider.placement import PlacedNode, Placement

warnings.simplefilter("ignore")
right, computed, no_model = sys.argv[1:]
with measuring.Bench(right, allow_cpu=True) as bench:
    bench.session.placement = Placement((PlacedNode("n", "Conv", "", "CUDAExecutionProvider", "compute"),))
    plain = bench._plain
    for name, model, compared in (
        ("right", right, plain), ("computed", computed, plain), ("no model", no_model, plain), ("no plain", right, None)
    ):
        bench._model, bench._plain, bench.left_out = model, compared, []
        report(name, [bench._choose_layouts(), [(each.way, each.batch, each.why) for each in bench.left_out]])
"""


def test_why_none_is_tried(models: tuple[str, str], tmp_path: Path) -> None:
    network = Network(0)
    computed_weights(network)
    computed, no_model = saved(network, tmp_path / "computed.onnx"), tmp_path / "model.ort"
    no_model.write_bytes(b"\xff" * 40)
    command = [sys.executable, "-c", CHOICES, models[0], computed, str(no_model)]
    child = run_child(command, env=child_environment({"CUDA_VISIBLE_DEVICES": ""}), deadline=60).ok()
    assert child.reports["right"] == [[LAST, FUSED], []]
    for name, why in (
        ("computed", "weights of a convolution are not constant"),
        ("no model", "its weights cannot be read: ValueError: the model is in ONNX Runtime's own format"),
        ("no plain", "there are no results of plain run"),
    ):
        tried, left_out = child.reports[name]
        assert tried == []
        assert [(way, batch) for way, batch, _ in left_out] == [(LAST, None), (FUSED, None)]
        assert all(each.startswith(why) for _, _, each in left_out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_asked_for_also_where_a_session_would_choose(layout: str, lab: Lab, tmp_path: Path) -> None:
    (options,) = asked(lab, (9, 0), f"report(ask([({CUDA!r}, {LAYOUTS[layout]!r})])[0])", tmp_path)
    assert options == {"cudnn_conv_algo_search": "HEURISTIC", **LAYOUTS[layout]}


TRIED = """
import sys, warnings
from tests.support.children import report
from ortgpu import GPUSession
from ortgpu.cli.bench import measuring
from ortgpu.cli.inputs import make_inputs
from ortgpu.errors import GPUOutOfMemoryError

warnings.simplefilter("ignore")
model, wrong, kind = sys.argv[1:]
opened = []

def on_cpu(providers):  # as another session would be on the GPU
    (_, options), = providers
    if kind == "refused":
        raise RuntimeError("This build does not support NHWC layout\\nmore")
    session = GPUSession(wrong if kind == "wrong" else model, allow_cpu=True)
    opened.append(session)
    run, calls = session.run, []
    def failing(names, feed):
        calls.append(len(feed["x"]))
        if (kind == "late" and calls.count(2) > 4) or (kind == "early" and len(calls) == 1):
            return [each + 1 for each in run(names, feed)]
        if kind == "full" and len(feed["x"]) == 2:
            raise GPUOutOfMemoryError("the memory is full")
        if kind == "broken" and len(feed["x"]) == 2:
            raise ValueError("no such kernel")
        return run(names, feed)
    session.run = failing
    return session

measuring._BLOCK = 0.001  # so few calls make a block
with measuring.Bench(model, allow_cpu=True) as bench:
    report("on the CPU", list(bench.layouts))
    bench._open, bench.layouts = on_cpu, ("channels-last",)
    declared = bench.session.get_inputs()
    feeds = {batch: make_inputs(declared, batch) for batch in (1, 2)}
    if kind == "plain full":
        bench.left_out.append(measuring.LeftOut("plain", 1, "full"))
    found = bench.measure_layouts(feeds, 5)
report("figures", [(each.way, each.batch, each.ratio.median > 0, each.latency is not None) for each in found])
report("left out", [(each.way, each.batch, each.why) for each in bench.left_out if each.way != "plain"])
report("closed", [type(each._sess).__name__ for each in opened])
"""


@pytest.mark.lab
@pytest.mark.parametrize(
    ("kind", "measured", "left_out"),
    [
        ("right", [1, 2], []),
        ("refused", [], [(None, "RuntimeError: This build does not support NHWC layout")]),
        ("wrong", [], [(None, "DifferentResultsError: output ")]),
        ("early", [], [(None, "DifferentResultsError: output ")]),
        ("late", [], [(None, "DifferentResultsError: output ")]),
        ("full", [1], [(2, "GPUOutOfMemoryError: the memory is full")]),
        ("broken", [], [(None, "ValueError: no such kernel")]),
        ("plain full", [2], []),
    ],
)
def test_a_layout_is_measured_or_left_out(
    kind: str, measured: list[int], left_out: list[tuple[int | None, str]], models: tuple[str, str]
) -> None:
    child = run_child(
        [sys.executable, "-c", TRIED, *models, kind], env=child_environment({"CUDA_VISIBLE_DEVICES": ""}), deadline=60
    ).ok()
    assert child.reports["on the CPU"] == []
    assert child.reports["figures"] == [[LAST, batch, True, True] for batch in measured]
    found = child.reports["left out"]
    assert [(way, batch) for way, batch, _ in found] == [(LAST, batch) for batch, _ in left_out]
    for (_, _, why), (_, expected) in zip(found, left_out, strict=True):
        assert why.startswith(expected)
    assert set(child.reports["closed"]) <= {"UnusableSession"}
    assert bool(child.reports["closed"]) == (kind != "refused")


def test_on_the_cpu_nothing_of_it_is_tried(models: tuple[str, str]) -> None:
    arguments = ("bench", models[0], "--allow-cpu", "--batch", "1", "--rounds", "5", "--json")
    document = json.loads(ortgpu(*arguments, env=NO_GPU).stdout)
    assert (document["layouts"], document["left_out"]) == ([], [])


# What is recommended, and how it looks


def figure(way: str, batch: int | None, rate: float, ratio: float | None, spread: float = 0.01) -> Figure:
    around = Spread(rate * (1 - spread), rate, rate * (1 + spread))
    ratios = None if ratio is None else Spread(ratio * (1 - spread), ratio, ratio * (1 + spread))
    return Figure(way, batch, around, ratios, Latency(1 / rate, 1 / rate, None, 10))


def test_the_fastest_layout_is_recommended_beside_the_best_way() -> None:
    ways = [figure("plain", 64, 1000, None), figure("run", 64, 1000, 1.0), figure("graph", 64, 1300, 1.3)]
    layouts = [figure(LAST, 64, 1200, 1.2), figure(FUSED, 64, 1700, 1.7)]
    assert recommend(ways, layouts) == [
        f"Batch 64, shortest time for a request: {WAYS['graph']}, 1.30 times plain run.",
        f"Batch 64, most items a second: {WAYS['graph']}, 1.30 times plain run.",
        f'Batch 64, {FUSED}: GPUSession(model, providers=[("{CUDA}", {{"prefer_nhwc": "1", "fuse_conv_bias": "1"}})]), '
        "whose run is 1.70 times GPUSession(model).run.",
    ]


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        (figure("run", 1, 100, 1.0), figure(LAST, 1, 101, 1.01)),
        (figure("run", 1, 100, 1.0), figure(LAST, 1, 70, 0.7)),
        (figure("run", 1, 100, 1.0, spread=0.2), figure(LAST, 1, 130, 1.3)),
        (figure("run", 1, 100, 1.0), figure(LAST, 1, 130, 1.3, spread=0.4)),
        (figure("run", 8, 100, 1.0), figure(LAST, 1, 130, 1.3)),
    ],
    ids=["within the spread", "slower", "run varies", "the layout varies", "run was not measured"],
)
def test_no_layout_is_recommended(run: Figure, layout: Figure) -> None:
    assert recommend([figure("plain", 1, 100, None), run], [layout]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_asks_for_that_layout(layout: str) -> None:
    written = layouts.in_a_program(layout)
    asked = eval(written, {"model": "m", "GPUSession": lambda _, providers: providers})
    assert providers.parse(asked, None).options_of(CUDA) == LAYOUTS[layout]


def test_figures_of_layouts_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ways = [figure("plain", 64, 10234, None), figure("run", 64, 10234, 1.0)]
    layouts = [figure(LAST, 64, 12000, 1.2), figure(FUSED, 64, 17000, 1.7)]
    results = _Results(
        Device("cuda", 0, *[None] * 5), ways, layouts, [LeftOut(FIRST, None, "it failed")], recommend(ways, layouts)
    )
    results.show(output.stdout(), "model.onnx")
    shown = capsys.readouterr().out
    table = shown.partition("run with other layouts of images\n")[2].partition("not measured: channels-first")[0]
    lines = table.splitlines()
    assert [line.split()[1] for line in lines] == ["layout", "channels-last", "channels-last,"]
    assert max(map(len, lines)) <= 80
    assert "1.70       1.68 - 1.72" in lines[2]
    assert "channels" not in shown.partition("run with")[0]
    assert results.as_dict()["layouts"] == [
        {
            "layout": way,
            "provider_options": LAYOUTS[way],
            "batch": 64,
            "items_per_second": {"median": rate, "quartiles": [rate * 0.99, rate * 1.01]},
            "ratio_to_run": {"median": ratio, "quartiles": [ratio * 0.99, ratio * 1.01]},
            "latency_ms": {"p50": round(1e3 / rate, 4), "p90": round(1e3 / rate, 4), "p99": None, "calls": 10},
        }
        for way, rate, ratio in ((LAST, 12000, 1.2), (FUSED, 17000, 1.7))
    ]
