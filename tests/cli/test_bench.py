"""``ortgpu bench``: what it measures, what it recommends, what it refuses, what it draws."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from onnx import parser

from ortgpu.__main__ import main
from ortgpu.cli import output
from ortgpu.cli.bench import _show
from ortgpu.cli.figures import measuring
from ortgpu.cli.figures.measuring import WAYS, Figure, Spread, percentiles, recommend
from ortgpu.environment.packages.installer import install_extra
from ortgpu.errors import catalogue
from ortgpu.running import made_inputs
from tests.support.children import child_environment, run_python
from tests.support.command_line import NO_GPU, Described, is_clean, ortgpu
from tests.support.this_machine import GPUs

HEAD = '<ir_version: 8, opset_import: ["": 17]> '
ON_CPU = ["plain", "run", "map", "pool"]  # a CUDA graph needs CUDA


def write_model(path: Path, text: str) -> Path:
    path.write_bytes(parser.parse_model(HEAD + text).SerializeToString())
    return path


@pytest.fixture
def fixed(tmp_path: Path) -> Path:
    return write_model(tmp_path / "fixed.onnx", "g (float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }")


@pytest.mark.lab
def test_plain_is_not_guarded(model: Path) -> None:
    """On a GPU, ORTGPU_ENFORCE would have a GPUSession compared with itself."""
    code = f"""
from ortgpu.session.guard import guard
from ortgpu.__main__ import main
main(["bench", {str(model)!r}, "--allow-cpu", "--rounds", "5", "--batch", "1"])
print(guard.is_enforced())
"""
    environment = {**os.environ, **NO_GPU, "ORTGPU_ENFORCE": "1"}
    done = run_python(code, env=environment, deadline=110)
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


# What is refused


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "0"],
        ["--batch", "-1"],
        ["--batch", "1,,8"],
        ["--batch", "many"],
        ["--batch", "1.5"],
        ["--batch", ""],
        ["--rounds", "4"],
        ["--plot", "figures.gif"],
        ["--plot", "figures"],
        ["--plot", "/no/such/folder/figures.svg"],
        ["--plot", os.curdir],
        ["--no-such-option"],
        ["another.onnx"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_before_anything_is_opened(
    arguments: list[str], model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "Bench", None)
    before = set(Path.cwd().iterdir())
    assert main(["bench", str(model), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: ortgpu bench" in captured.err
    assert set(Path.cwd().iterdir()) == before


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "/no/such/model.onnx"]) == 2
    assert "/no/such/model.onnx" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from ortgpu.__main__ import main\n"
        f"sys.exit(main(['bench', {str(model)!r}, '--plot', {str(tmp_path / 'a.svg')!r}]))"
    )
    done = run_python(program)
    assert done.returncode == 2, done
    assert install_extra("bench") in " ".join(done.stderr.split())
    assert not (tmp_path / "a.svg").exists()


def test_a_batch_for_a_model_that_has_one_already(fixed: Path) -> None:
    result = ortgpu("bench", str(fixed), "--allow-cpu", "--batch", "8", env=NO_GPU)
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert "no free batch dimension (x [3, 4]): leave --batch out" in " ".join(result.stderr.split())


def test_inputs_that_cannot_be_made_up(tmp_path: Path) -> None:
    text = "g (seq(float[n]) x) => (int64 y) { y = SequenceLength(x) }"
    path = write_model(tmp_path / "sequence.onnx", text)
    result = ortgpu("bench", str(path), "--allow-cpu", env=NO_GPU)
    assert result.returncode == 1, result
    assert result.stdout.startswith("UnknownInputError: input 'x' is a seq(tensor(float))")
    assert "--inputs FILE" in result.stdout


def test_without_a_gpu_the_cause_is_shown(model: Path) -> None:
    result = ortgpu("bench", str(model), env=NO_GPU)
    assert result.returncode == 1
    assert is_clean(result)
    assert "To fix it:" in result.stdout
    assert "items/s" not in result.stdout
    document = json.loads(ortgpu("bench", str(model), "--json", env=NO_GPU).stdout)
    assert document["ok"] is False
    assert document["error"]["code"] in catalogue()


@pytest.mark.lab
@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "InvalidProtobuf"), ("g (float[a, 4] x, float[b, 3] y) => (float[c, d] z) { z = MatMul(x, y) }", "MatMul")],
)
def test_a_model_that_does_not_run(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model") if text is None else write_model(path, text)
    result = ortgpu("bench", str(path), "--allow-cpu", "--batch", "2", env=NO_GPU)
    assert result.returncode == 1, result
    assert is_clean(result)
    assert expected in result.stdout


# What is measured


@pytest.mark.lab
def test_every_way_is_measured_with_every_batch(model: Path) -> None:
    result = ortgpu("bench", str(model), "--allow-cpu", "--batch", "2,1,2", "--rounds", "5", "--json", env=NO_GPU)
    assert result.returncode == 0, result
    assert result.stderr.count("\r") == 0  # no progress where nobody looks
    document = json.loads(result.stdout)
    assert (document["ok"], document["device"]["is_gpu"], document["rounds"]) == (True, False, 5)
    assert document["on_cpu_because"]["code"] in catalogue()
    figures = document["figures"]
    assert [(each["batch"], each["way"]) for each in figures] == [(batch, way) for batch in (2, 1) for way in ON_CPU]
    for each in figures:
        rate, ratio, latency = each["items_per_second"], each["ratio_to_plain"], each["latency_ms"]
        assert 0 < rate["quartiles"][0] <= rate["median"] <= rate["quartiles"][1]
        assert (ratio is None) == (each["way"] == "plain")
        assert (latency is None) == (each["way"] in ("map", "pool"))
        if latency:
            percentiles = [latency[name] for name in ("p50", "p90", "p99") if latency[name] is not None]
            assert len(percentiles) == (3 if latency["calls"] >= 100 else 2)  # as many as the machine does
            assert percentiles[0] > 0
            assert percentiles == sorted(percentiles)
            assert latency["calls"] >= 5
    assert document["left_out"] == []
    assert all(sentence.endswith(".") for sentence in document["recommended"])
    assert [each["batch"] for each in document["shapes"]] == [2, 1]
    assert all(each["repeated"] > 0 and each["changed"] > 0 for each in document["shapes"])


def test_figures_for_people(fixed: Path) -> None:
    result = ortgpu("bench", str(fixed), "--allow-cpu", "--rounds", "5", env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    assert "was measured on the CPU because of --allow-cpu" in result.stdout
    assert f"{fixed} on the CPU\n" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("  fixed")]
    assert [row[1] for row in rows] == ON_CPU
    assert "after another" not in result.stdout  # the model has one batch
    assert max(map(len, result.stdout.partition("on the CPU\n")[2].splitlines()[:5])) < 80


def test_what_a_change_of_shape_costs_is_shown(model: Path) -> None:
    result = ortgpu("bench", str(model), "--allow-cpu", "--batch", "1,2", "--rounds", "5", env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    table = result.stdout.partition("Milliseconds a run, by batch\n")[2]
    assert "after another" in table
    assert [line.split()[0] for line in table.splitlines()[1:] if line.strip()[:1] in ("1", "2")] == ["1", "2"]


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


ONE_ONLY = "g (float[n, 4] x) => (float[n, 4] y) <int64[2] shape = {1, 4}> { y = Reshape(x, shape) }"


@pytest.mark.lab
@pytest.mark.parametrize("batches", [(), ("--batch", "8,1")], ids=["default", "largest first"])
def test_a_batch_that_the_model_does_not_run_takes_no_other_with_it(tmp_path: Path, batches: tuple[str, ...]) -> None:
    """Exported with a free batch dimension, and with the length of the example's batch written into a Reshape."""
    path = write_model(tmp_path / "one.onnx", ONE_ONLY)
    command = ("bench", str(path), "--allow-cpu", "--rounds", "5", *batches)
    result = ortgpu(*command, "--json", env=NO_GPU)
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert [(each["batch"], each["way"]) for each in document["figures"]] == [(1, way) for way in ON_CPU]
    failing = [8] if batches else [8, 64]
    left_out = document["left_out"]
    assert [(each["batch"], each["way"]) for each in left_out] == [(batch, way) for batch in failing for way in ON_CPU]
    assert all("Reshape" in each["why"] for each in left_out)
    assert all(sentence.startswith("Batch 1,") for sentence in document["recommended"])


@pytest.mark.lab
def test_batches_that_the_model_does_not_run_are_told_in_a_line_each(tmp_path: Path) -> None:
    path = write_model(tmp_path / "one.onnx", ONE_ONLY)
    result = ortgpu("bench", str(path), "--allow-cpu", "--rounds", "5", env=NO_GPU)
    assert result.returncode == 0, result
    told = [line.partition(": Fail: ")[0] for line in result.stdout.splitlines() if line.startswith("not measured")]
    assert told == [f"not measured: plain, run, map, pool, batch {batch}" for batch in (8, 64)]


@pytest.mark.lab
def test_a_batch_whose_inputs_cannot_be_made_up_takes_no_other_with_it(tmp_path: Path) -> None:
    """The default batches of large images are more than it makes up."""
    path = write_model(tmp_path / "model.onnx", "g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")
    command = ("bench", str(path), "--allow-cpu", "--rounds", "5", "--json", "--batch")
    result = ortgpu(*command, "1000000000,2", env=NO_GPU)
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert [(each["batch"], each["way"]) for each in document["figures"]] == [(2, way) for way in ON_CPU]
    left_out = document["left_out"]
    assert [(each["batch"], each["way"]) for each in left_out] == [(1000000000, way) for way in ON_CPU]
    assert all("'x' of 1000000000 x 4 would take 14.9 GiB" in each["why"] for each in left_out)
    result = ortgpu(*command, "1000000000", env=NO_GPU)
    assert result.returncode == 1, "it was measured with no batch size"
    assert "would take 14.9 GiB, and cannot be made up" in json.loads(result.stdout)["error"]["summary"]


def test_where_no_batch_runs_it_is_the_inputs_or_the_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "one.onnx", ONE_ONLY)
    result = ortgpu("bench", str(path), "--allow-cpu", "--batch", "2,3", env=NO_GPU)
    assert result.returncode == 1, result
    assert "requested shape:{1,4}" in result.stdout
    assert "the model does not run on made-up inputs" in result.stdout


def test_percentiles_are_those_of_the_calls() -> None:
    seconds = [number / 1000 for number in range(1, 202)]
    assert percentiles(seconds) == pytest.approx({"p50": 101, "p90": 181, "p99": 199, "calls": 201})
    assert percentiles(seconds[:99])["p99"] is None


# What is recommended


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


# Inputs with a batch


@pytest.mark.parametrize(
    ("shapes", "name", "expected"),
    [
        ([["n", 3]], "n", [(5, 3)]),
        ([[None, 3, None]], "", [(5, 3, 1)]),
        ([[-1, 3]], "-1", [(5, 3)]),
        ([["n", "length"], [2, "n", 4]], "n", [(5, 1), (2, 5, 4)]),
        ([[4], ["n", 3]], "n", [(4,), (5, 3)]),
        ([["n"], ["m"]], "n", [(5,), (1,)]),
        ([[4, "n"], []], None, [(4, 1), ()]),
    ],
)
def test_the_batch_dimension(shapes: list[list[int | str | None]], name: str | None, expected: list[Any]) -> None:
    declared = [Described(f"x{number}", "tensor(float)", shape) for number, shape in enumerate(shapes)]
    assert made_inputs.batch_dimension(declared) == name
    assert [array.shape for array in made_inputs.make_inputs(declared, 5).values()] == expected


# How it looks


@pytest.fixture
def needs_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib, which the extras bench and test bring")


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("suffix", [".png", ".svg", ".SVG"])
def test_plots(tmp_path: Path, suffix: str) -> None:
    from ortgpu.cli.figures.plot import draw

    path = tmp_path / f"figures{suffix}"
    draw(
        [figure("plain", 1, 100, None), figure("graph", 1, 140, 1.4), figure("pool", 8, 900, 2.0)], "<m> on a GPU", path
    )
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
        return
    text = path.read_text(encoding="utf-8")
    words = {(element.text or "").strip() for element in ElementTree.fromstring(text).iter()}
    assert {"graph", "pool", "batch 1", "batch 8", "1.40", "2.00", "<m> on a GPU"} <= words
    assert not {"run", "map", "plain"} & words


@pytest.mark.usefixtures("needs_matplotlib")
def test_plot_has_the_worst_on_top(tmp_path: Path) -> None:
    from ortgpu.cli.figures.plot import draw

    path = tmp_path / "figures.svg"
    draw([figure("map", 8, 250, 2.5), figure("run", 8, 200, 2.0), figure("pool", 8, 50, 0.5)], "m", path)
    words = [(element.text or "").strip() for element in ElementTree.parse(path).iter()]
    assert [word for word in words if word in ("map", "run", "pool")] == ["pool", "run", "map"]


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("page", ["#ffffff", "#000000", "#0d1117"])
def test_plot_reads_on_any_page(tmp_path: Path, page: str) -> None:
    """WCAG asks for a contrast of 3 between graphics and what is behind them."""
    from ortgpu.cli.figures.plot import FASTER, INK, SLOWER, draw

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in (INK, FASTER, SLOWER):
        darker, lighter = sorted((luminance(colour), luminance(page)))
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour
    path = tmp_path / "figures.svg"
    draw([figure("map", 8, 250, 2.5), figure("pool", 8, 50, 0.5)], "m", path)
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})(?!; opacity: 0)", path.read_text(encoding="utf-8")))
    assert drawn == {INK, FASTER, SLOWER}, "nothing else is drawn, and no background"


def test_times_plain_never_contradict_items_a_second(fixed: Path) -> None:
    result = ortgpu("bench", str(fixed), "--allow-cpu", "--rounds", "5", "--json", env=NO_GPU)
    figures = json.loads(result.stdout)["figures"]
    plain = next(each["items_per_second"]["median"] for each in figures if each["way"] == "plain")
    for each in figures:
        if each["way"] != "plain":
            assert each["ratio_to_plain"]["median"] == pytest.approx(each["items_per_second"]["median"] / plain)


@pytest.mark.usefixtures("needs_matplotlib")
def test_plot_of_a_measurement(fixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.svg"
    result = ortgpu("bench", str(fixed), "--allow-cpu", "--rounds", "5", "--plot", str(path), env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    assert result.stdout.endswith(f"Written: {path}\n")
    assert "fixed.onnx on the CPU" in path.read_text(encoding="utf-8")


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("name", ["$\\frac$ 模型", "two\nlines\x1b[31m"], ids=["formula", "control"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_of_a_model_with_any_name(tmp_path: Path, name: str, suffix: str) -> None:
    from ortgpu.cli.figures.plot import draw

    path = tmp_path / f"figures{suffix}"
    draw([figure("plain", 1, 100, None)], name, path)  # warnings are errors here
    if suffix == ".svg":
        words = {element.text for element in ElementTree.parse(path).iter()}
        assert name.replace("\n", "\ufffd").replace("\x1b", "\ufffd") in words


@pytest.mark.lab
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is full")
@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_figures_are_shown_where_the_plot_cannot_be_written(fixed: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    path = tmp_path / "figures.svg"
    path.symlink_to("/dev/full")
    result = ortgpu("bench", str(fixed), "--allow-cpu", "--rounds", "5", "--plot", str(path), *form, env=NO_GPU)
    assert result.returncode == 1
    assert "cannot be written: No space left on device" in result.stderr
    if form:
        assert json.loads(result.stdout)["figures"]
    else:
        assert "items/s" in result.stdout
        assert "Written" not in result.stdout


# With a GPU


@pytest.mark.ortgpu
def test_every_way_on_the_gpu(model: Path, gpus: GPUs) -> None:
    result = ortgpu("bench", str(model), "--batch", "1,64", "--rounds", "5", "--json")
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert document["device"]["uuid"] == gpus.visible[0].uuid
    assert document["on_cpu_because"] is None
    assert document["left_out"] == []
    assert [(each["batch"], each["way"]) for each in document["figures"]] == [
        (batch, way) for batch in (1, 64) for way in WAYS
    ]
