"""``ortgpu bench``: what it measures, what it recommends, what it refuses, what it draws."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from onnx import parser

from ortgpu.__main__ import main
from ortgpu.cli.bench import check_plot
from ortgpu.cli.figures import measuring
from ortgpu.cli.figures.measuring import WAYS
from ortgpu.environment.packages.installer import install_extra
from ortgpu.errors import catalogue
from ortgpu.running import made_inputs
from tests.support.children import run_python
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


# What is recommended


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


@pytest.mark.parametrize("name", ["a.svg", "a.SVG", "a.Png"])
def test_the_ending_of_a_plot_in_any_case(name: str) -> None:
    pytest.importorskip("matplotlib")
    assert check_plot(None, None, Path(name)) == Path(name)  # type: ignore[arg-type]  # it asks neither
