"""``ortgpu tune`` and ``ortgpu check --compare``: what they print, and their exit codes."""

from __future__ import annotations

import functools
import importlib
import json
import os
import xml.etree.ElementTree as ET
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from onnx import parser

from ortgpu.cli.tune import tune
from ortgpu.provider.records import Choice
from ortgpu.provider.settings import SETTINGS
from ortgpu.session import tune as tune_of_session
from ortgpu.session.tuning import tuning
from ortgpu.session.tuning.children import Place, Trial, Tuning
from tests.support.children import run_python
from tests.support.command_line import NO_GPU, Terminal, is_clean, ortgpu

command = importlib.import_module("ortgpu.cli.tune")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU takes the place of a GPU, and two settings are all that is tried."""
    monkeypatch.setattr(tune_of_session, "Place", functools.partial(Place, None))
    monkeypatch.setattr(tuning, "SETTINGS", {name: SETTINGS[name] for name in ("graph", "shapes")})
    monkeypatch.setattr(tuning, "AUTOMATIC", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(tune, [str(each) for each in arguments], standalone_mode=False)


def document(result: Result) -> Any:
    assert result.exception is None, result.output
    return json.loads(result.stdout)


@pytest.mark.usefixtures("on_cpu")
def test_a_table_and_a_record(model: Path, tmp_path: Path) -> None:
    result = run(model, "--batch", "4")
    assert result.exception is None
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == f"{model} on CPU"
    assert any(line.startswith("graph captured") for line in lines)
    assert "Results were compared with the CPU's float32." in lines
    (record,) = (tmp_path / "cache" / "ortgpu" / "tuned").iterdir()
    assert lines[-1] == f"Record: {record}"


@pytest.mark.usefixtures("on_cpu")
def test_a_terminal_gets_a_bar(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (Terminal(), StringIO()):
        monkeypatch.setattr("sys.stderr", terminal)
        assert tune.main([str(model), "--budget", "2"], standalone_mode=False) == 0
        assert ("Opening the model" in terminal.getvalue()) is isinstance(terminal, Terminal)


@pytest.mark.usefixtures("on_cpu")
def test_json_inputs_and_a_plot(model: Path, tmp_path: Path) -> None:
    inputs, plot, record = tmp_path / "inputs.npz", tmp_path / "plot.svg", tmp_path / "record.json"
    np.savez(inputs, input=np.ones((3, 256), np.float32))
    found = document(run(model, "--inputs", inputs, "--json", "--plot", plot, "--record", record))
    assert (found["schema"], found["ok"], found["record"]) == (1, True, str(record))
    assert found["shapes"] == [{"input": [3, 256]}]
    assert {"settings", "ratio", "seconds", "error", "verdict", "divergence"} == set(found["trials"][0])
    assert ET.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("on_cpu")
def test_inputs_that_the_model_does_not_take(model: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, other=np.ones((3, 256), np.float32))
    result = run(model, "--inputs", inputs)
    assert result.return_value == 1
    assert "input" in result.stdout


def test_without_a_gpu_it_says_what_a_session_says(model: Path) -> None:
    said = {
        command: json.loads(ortgpu(command, str(model), "--json", env=NO_GPU).stdout) for command in ("check", "tune")
    }
    assert said["tune"]["ok"] is False
    assert said["tune"]["error"]["code"] == said["check"]["error"]["code"]
    result = ortgpu("tune", str(model), env=NO_GPU)
    assert result.returncode == 1
    assert is_clean(result)


@pytest.mark.parametrize("arguments", [["--budget", "0"], ["--batch", "a"], ["--precision", "int8"], []])
def test_wrong_usage(model: Path, arguments: list[str]) -> None:
    names = [str(model)] if arguments else []
    assert ortgpu("tune", *names, *arguments, env=NO_GPU).returncode == 2


@pytest.mark.parametrize(("name", "why"), [("absent/record", "No such file"), ("a" * 300, "File name too long")])
def test_a_record_that_cannot_be_written_is_wrong_usage(model: Path, tmp_path: Path, name: str, why: str) -> None:
    """Said before a model is opened, not afterwards."""
    result = ortgpu("tune", str(model), "--record", str(tmp_path / name), env=NO_GPU)
    assert result.returncode == 2, result
    assert is_clean(result)
    assert f"cannot be written: {why}" in result.stderr
    assert result.stdout == ""


def test_a_link_to_a_record_that_is_not_there_yet_stays(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to("record")
    assert ortgpu("tune", str(model), "--record", str(link), env=NO_GPU).returncode == 1
    assert link.is_symlink()
    assert not link.exists()


def test_check_compares_with_the_cpu(model: Path) -> None:
    result = ortgpu("check", str(model), "--allow-cpu", "--compare", "cpu", "--json", env=NO_GPU)
    found = json.loads(result.stdout)
    assert result.returncode == 0
    assert found["compared"] == {"error": 0.0, "wrong": None}
    assert found["compared_with"] == "the CPU's float32"
    result = ortgpu("check", str(model), "--allow-cpu", "--compare", "cpu", "--runs", "0", env=NO_GPU)
    assert "from the CPU's float32" in result.stdout


def test_check_says_where_results_go_wrong(tmp_path: Path) -> None:
    """As `tune` does; a random number is as good as a fault."""
    model = tmp_path / "random.onnx"
    text = "g (float[n, 4] x) => (float[n, 4] y) { a = Relu(x) b = RandomUniformLike(a) c = Abs(b) y = Add(a, c) }"
    model.write_bytes(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}').SerializeToString())
    result = ortgpu("check", str(model), "--allow-cpu", "--compare", "cpu", "--json", env=NO_GPU)
    assert result.returncode == 1
    wrong = json.loads(result.stdout)["compared"]["wrong"]
    assert wrong.startswith("output 'y' is")
    assert wrong.endswith("; tensor 'b' is the first that differs")


def test_check_compares_with_plain_where_the_cpu_gives_no_results(model: Path) -> None:
    """It said that the model does not run."""
    code = f"""
import sys
from ortgpu.__main__ import main
from ortgpu.session.tuning.children import Child, ChildFailedError
ask, asked = Child.ask, []
def once_late(self, *arguments, timeout):
    asked.append(arguments[0])
    if len(asked) == 1:
        raise ChildFailedError("it did not end in time", timed_out=True)
    return ask(self, *arguments, timeout=timeout)
Child.ask = once_late
sys.exit(main(["check", {str(model)!r}, "--allow-cpu", "--compare", "cpu"]))
"""
    result = run_python(code, env={**os.environ, **NO_GPU})
    assert result.returncode == 0, result
    assert "from plain ONNX Runtime on the GPU, since the CPU gave no results: it did not end in time" in result.stdout


@pytest.mark.usefixtures("on_cpu")
def test_tune_says_how_to_give_inputs(tmp_path: Path) -> None:
    model = tmp_path / "sequence.onnx"
    text = '<ir_version: 8, opset_import: ["": 17]> g (seq(float[n]) x) => (int64 y) { y = SequenceLength(x) }'
    model.write_bytes(parser.parse_model(text).SerializeToString())
    result = run(model)
    assert result.return_value == 1
    assert result.stdout.startswith("UnknownInputError: input 'x' is a seq(tensor(float))")
    assert "pass real ones with --inputs FILE" in result.stdout


def found(**changes: Any) -> Tuning:
    """A result of a search."""
    slower, faster = Trial({"graph": "none"}, 2.0, (0.002,)), Trial({"layout": "channels-last"}, 0.5, (0.0005,))
    rejected = Trial({"cudnn": "off"}, verdict="rejected: output 'y'")
    choice = Choice(faster.settings, 0.5)
    plain: dict[str, Any] = {
        "device": "cuda:1", "automatic": choice, "named": choice, "record": None, "no_record": "no home",
        "compared_with": "the CPU's float32", "trials": (slower, faster, rejected), "left_out": (), "shapes": (),
        "seconds": 1.0,
    }  # fmt: skip
    return Tuning(**{**plain, **changes})


OPTIONS: list[tuple[list[str], str, Any, Any]] = [
    (["--device", "cuda:1"], "device", None, "cuda:1"),
    (["--batch", "2,4"], "batches", None, (2, 4)),
    (["--objective", "throughput"], "objective", "latency", "throughput"),
    (["--precision", "fp16"], "precision", "float32", "float16"),
    (["--precision", "fp32"], "precision", "float32", "float32"),
    (["--budget", "7"], "budget", 60, 7),
]


@pytest.mark.parametrize(("words", "name", "usual", "given"), OPTIONS, ids=[" ".join(each[0]) for each in OPTIONS])
def test_each_option_reaches_the_search(
    model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str, usual: Any, given: Any
) -> None:
    asked: list[dict[str, Any]] = []

    def search(model: Any, **named: Any) -> Tuning:
        asked.append({"model": model, **named})
        return found()

    monkeypatch.setattr(command, "search", search)
    for arguments in ([], words):
        document(run(model, "--json", *arguments))
    assert [each[name] for each in asked] == [usual, given]
    del asked[0]["on_trial"], asked[1]["on_trial"], asked[0][name], asked[1][name]
    assert asked[0] == asked[1]
    assert asked[0]["model"] == model


def test_a_speed_up_is_above_one_where_ortgpu_is_faster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "search", lambda model, **named: found())
    rows = [line.split() for line in run(model).stdout.splitlines()]
    assert ["graph", "none", "2.000", "0.50", "not", "the", "fastest"] in rows
    assert ["layout", "channels-last", "0.500", "2.00", "not", "the", "fastest"] in rows
    assert ["cudnn", "off", "rejected:", "output", "'y'"] in rows
    assert ["Sessions", "will", "use", "layout", "channels-last", "(speed-up", "2.00)"] in rows
    assert ["Record:", "none", "was", "written:", "no", "home"] in rows
    assert [each["ratio"] for each in document(run(model, "--json"))["trials"]] == [2.0, 0.5, None]
