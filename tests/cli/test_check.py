"""``ortgpu check``: the inputs that it makes up, its exit codes, and what it says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import click
import numpy as np
import onnx.parser
import pytest

import ortgpu as ortgpu_module
from ortgpu.__main__ import main
from ortgpu.cli import divergence, report
from ortgpu.cli.inputs import read_inputs
from ortgpu.errors import catalogue
from ortgpu.running import made_inputs
from tests.lab.fixtures import Lab
from tests.support.command_line import NO_GPU, Described, is_clean, ortgpu
from tests.support.known_placements import MODELS
from tests.support.made_sessions import H200, L4, NEG, made_session
from tests.support.this_machine import GPUs

# Inputs


@pytest.mark.parametrize("kind", ["float16", "float", "double", "int8", "int32", "int64", "uint8", "bool", "string"])
def test_input_of_each_type(kind: str) -> None:
    array = made_inputs.make_inputs([Described("x", f"tensor({kind})", ["batch", 3, None])])["x"]
    assert array.shape == (1, 3, 1)
    assert array.dtype == {"float": "float32", "double": "float64", "string": "O"}.get(kind, kind)


def test_input_values() -> None:
    made = made_inputs.make_inputs(
        [
            Described("input_ids", "tensor(int64)", ["batch", 4]),
            Described("attention_mask", "tensor(int64)", ["batch", 4]),
            Described("audio_length", "tensor(int64)", ["batch"]),
            Described("sequence_lens", "tensor(int32)", ["batch"]),
            Described("silent", "tensor(int32)", ["batch"]),
            Described("scale", "tensor(float)", []),
            Described("text", "tensor(string)", [2]),
            Described("none", "tensor(float)", [0, 4]),
        ]
    )
    assert made["input_ids"].tolist() == [[0, 0, 0, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert [made[name].tolist() for name in ("audio_length", "sequence_lens", "silent")] == [[1], [1], [0]]
    assert 0 <= made["scale"].item() < 1
    assert made["text"].tolist() == ["", ""]
    assert made["none"].shape == (0, 4)


@pytest.mark.parametrize("kind", ["tensor(bfloat16)", "seq(tensor(float))", "map(int64,tensor(float))"])
def test_input_that_cannot_be_made_up(kind: str) -> None:
    with pytest.raises(made_inputs.UnknownInputError, match=re.escape(kind)):
        made_inputs.make_inputs([Described("x", kind, [])])


# Without a GPU


def test_check_without_a_gpu() -> None:
    result = ortgpu("check", env={**NO_GPU, "COLUMNS": "40"})
    assert result.returncode == 1
    assert is_clean(result)
    lines = result.stdout.splitlines()
    assert lines[0].partition(": ")[0] in {cls.__name__ for cls in catalogue().values()}
    assert "To fix it:" in lines
    assert lines[-1].removeprefix("More: ortgpu explain ") in catalogue()


def test_check_json_without_a_gpu() -> None:
    result = ortgpu("check", "--json", env=NO_GPU)
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert document["model"] is None
    error = document["error"]
    assert error["code"] in catalogue()
    assert error["type"] == catalogue()[error["code"]].__name__
    assert error["summary"]
    assert error["evidence"]
    assert error["fixes"]


def test_check_allows_the_cpu_loudly() -> None:
    result = ortgpu("check", "--allow-cpu", "--runs", "2", env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    assert not result.stderr, "what the report says is said once"
    assert "To fix it:" in result.stdout
    last = "NOT on the GPU: the built-in model is open on the CPU because of --allow-cpu"
    assert result.stdout.splitlines()[-1] == last
    assert "runs on the GPU" not in result.stdout


def test_check_says_who_allowed_the_cpu() -> None:
    given = ortgpu("check", "--allow-cpu", "--runs", "0", env=NO_GPU)
    assert "on the CPU because of --allow-cpu" in given.stdout
    variable = ortgpu("check", "--runs", "0", env={**NO_GPU, "ORTGPU_ALLOW_CPU": "1"})
    assert variable.returncode == 0
    assert "on the CPU because of ORTGPU_ALLOW_CPU" in variable.stdout


def test_check_json_on_the_cpu() -> None:
    result = ortgpu("check", "--allow-cpu", "--runs", "2", "--json", env=NO_GPU)
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["device"]["is_gpu"] is False
    assert document["providers"] == ["CPUExecutionProvider"]
    assert document["on_cpu_because"]["code"] in catalogue()
    assert document["gpu_memory"] is None
    assert document["latency_ms"]["runs"] == 2
    assert document["latency_ms"]["min"] <= document["latency_ms"]["median"]


def test_check_does_not_run_when_told_so() -> None:
    document = json.loads(ortgpu("check", "--allow-cpu", "--runs", "0", "--json", env=NO_GPU).stdout)
    assert document["ok"] is True
    assert document["latency_ms"] is None


@pytest.mark.parametrize("as_json", [False, True])
def test_check_of_what_is_no_model(tmp_path: Path, as_json: bool) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    result = ortgpu("check", str(path), "--allow-cpu", *(["--json"] if as_json else []), env=NO_GPU)
    assert result.returncode == 1
    assert is_clean(result)
    if as_json:
        document = json.loads(result.stdout)
        assert document["model"] == str(path)
        assert document["error"]["type"] == "InvalidProtobuf"
        assert document["error"]["code"] is None
    else:
        assert "InvalidProtobuf" in result.stdout


def test_check_of_a_model_that_its_inputs_do_not_fit(tmp_path: Path) -> None:
    from onnx import parser

    head = '<ir_version: 8, opset_import: ["": 17]>'
    text = head + "g (float[a, 4] x, float[b, 3] y) => (float[c, d] z) { z = MatMul(x, y) }"
    path = tmp_path / "model.onnx"
    path.write_bytes(parser.parse_model(text).SerializeToString())
    result = ortgpu("check", str(path), "--allow-cpu", "--json", env=NO_GPU)
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert document["latency_ms"] is None
    assert "made-up inputs" in document["latency_error"]


def test_check_names_every_missing_library(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10")
    result = machine.run(argv=["-m", "ortgpu", "check", "--json"])
    assert result.returncode == 1, result.output
    error = json.loads(result.stdout)["error"]
    named = [error, *error["others"]]
    assert "library-not-found" in {each["code"] for each in named}, named
    assert "libcurand.so.10" in result.stdout


# With a GPU


@pytest.mark.ortgpu
def test_check_on_the_gpu(gpus: GPUs) -> None:
    gpu_uuid = gpus.visible[0].uuid
    result = ortgpu("check", "--device", "0", "--cpu-nodes", "forbid", "--json")
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["device"]["uuid"] == gpu_uuid
    assert document["providers"][0] == "CUDAExecutionProvider"
    assert document["provider_options"]["device_id"] == "0"
    assert document["placement"]["cpu_compute_nodes"] == []
    assert document["placement"]["by_provider"]["CUDAExecutionProvider"] > 0
    assert document["gpu_memory"] is None or document["gpu_memory"] > 1 << 20
    assert document["on_cpu_because"] is None
    shown = ortgpu("check")
    assert shown.returncode == 0
    assert is_clean(shown)
    assert shown.stdout.endswith("\nOK: the built-in model runs on the GPU\n")
    assert gpu_uuid in shown.stdout


@pytest.mark.ortgpu
@pytest.mark.usefixtures("gpus")
def test_check_of_a_device_that_is_not_there() -> None:
    result = ortgpu("check", "--device", "99", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["code"] == "device-not-found"


# What it says of where the nodes are, where ONNX Runtime places them and computes nothing


@pytest.mark.parametrize(
    ("name", "headline"),
    [
        ("all_on_cuda", "OK: all_on_cuda.onnx runs on the GPU"),
        ("island", "OK: island.onnx runs on the GPU"),
        ("strings", "strings.onnx is open on the GPU, and none of its nodes runs there"),
    ],
)
def test_the_last_line_says_whether_anything_runs_there(
    lab: Lab, provider_library: str, tmp_path: Path, name: str, headline: str
) -> None:
    (tmp_path / f"{name}.onnx").write_bytes(MODELS[name]())
    machine = lab.machine_that_places(provider_library)
    result = machine.run(argv=["-m", "ortgpu", "check", f"{name}.onnx", "--runs", "0"], cwd=tmp_path).ok()
    said = result.stdout.splitlines()
    assert said[-1] == headline
    assert said[0].startswith("warning: ") == (name != "all_on_cuda")
    assert any(line.endswith(f"not tuned: `ortgpu tune {tmp_path / name}.onnx`") for line in said)


def test_doctor_says_why_a_record_is_not_used(lab: Lab, provider_library: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(MODELS["all_on_cuda"]())
    machine = lab.machine_that_places(provider_library)
    machine = machine.but(env={**machine.env, "XDG_CACHE_HOME": str(tmp_path)})
    code = """
from ortgpu.environment.gpu.cuda import initialise
from ortgpu.provider.records import default_path
report(str(default_path("model.onnx", initialise().devices[0].name)))
"""
    record = Path(machine.run(code, cwd=tmp_path).ok().json)
    record.parent.mkdir(parents=True)
    unfit = f"not tuned, because the record does not fit: {record}: it is no record"
    for content, why in ((None, "not tuned: `"), ("{}", unfit)):
        if content is not None:
            record.write_text(content, encoding="utf-8")
        done = machine.run(argv=["-m", "ortgpu", "doctor", "--model", "model.onnx"], cwd=tmp_path)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("  settings"))
        assert line.split(maxsplit=1)[1].startswith(why)
        assert line.endswith(f"`ortgpu tune {tmp_path / 'model.onnx'}`")


def test_shapes_of_check(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 2] x) => (float[n, 2] y) { y = Neg(x) }'
    model = tmp_path / "model.onnx"
    model.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    env = {**NO_GPU, "ORTGPU_ALLOW_CPU": "1"}
    document = json.loads(ortgpu("check", str(model), "--shapes", "1,2", "--json", env=env).stdout)
    assert [(each["batch"], each["planned"]) for each in document["shapes"]] == [(1, None), (2, None)]
    assert all(each["repeated"] > 0 and each["changed"] > 0 for each in document["shapes"])
    assert "after another" in ortgpu("check", str(model), "--shapes", "1,2", env=env).stdout
    assert ortgpu("check", str(model), "--shapes", "0", env=env).returncode == 2
    fixed = ortgpu("check", "--shapes", "1,2", env=env)
    assert (fixed.returncode, "no free batch dimension" in fixed.stderr) == (2, True)


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "model.onnx"
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


FIT = {**NO_GPU, "ORTGPU_ALLOW_CPU": "1"}


def test_fit_tells_the_memory_of_each_batch(relu: Path) -> None:
    """On the CPU it is that of the host, and the first line says so."""
    shown = [ortgpu("check", str(relu), "--fit", *further, env=FIT) for further in ((), ("1", "--json"))]
    assert [each.returncode for each in shown] == [0, 0], shown[0]
    assert "of host memory (no GPU is used) free" in shown[0].stdout
    assert re.search(r"MiB when it is open, after \d+\.\d\d seconds", shown[0].stdout)
    assert re.findall(r"^(\d+) .* MiB", shown[0].stdout, re.MULTILINE) == ["1", "8", "32"]
    document = json.loads(shown[1].stdout)
    (row,) = document["fit"]["models"][0]["rows"]
    assert (document["model"], row["batch"], document["fit"]["fit_together"]) == (str(relu), 1, None)
    assert row["first_run_seconds"] > 0


def test_fit_of_several_models_tells_whether_they_fit_together(relu: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extras bench and test bring it")
    plot = tmp_path / "fit.svg"
    result = ortgpu("check", str(relu), str(relu), "--fit", "1,4", "--json", "--plot", str(plot), env=FIT)
    document = json.loads(result.stdout)
    assert (result.returncode, document["ok"], document["fit"]["fit_together"]) == (0, True, True)
    assert document["model"] == [each["model"] for each in document["fit"]["models"]] == [str(relu)] * 2
    words = {(each.text or "").strip() for each in ElementTree.parse(plot).iter()}
    assert {"1. model.onnx", "2. model.onnx", "batch 1", "batch 4"} <= words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{}", "{}"), "more than one MODEL needs --fit"),
        (("{}", "--plot", "{}.svg"), "--plot needs --fit"),
        (("--fit", "1"), "--fit needs a MODEL"),
    ],
)
def test_wrong_usage_of_fit(relu: Path, arguments: tuple[str, ...], words: str) -> None:
    pytest.importorskip("matplotlib", reason="the extras bench and test bring it")
    result = ortgpu("check", *(each.format(relu) for each in arguments), env=FIT)
    assert (result.returncode, words in result.stderr) == (2, True), result


# What is wrong is in the exit code and in the document


@pytest.mark.parametrize("wrong", [None, "output 'y' is off"], ids=["right", "wrong"])
@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "json"])
def test_wrong_results_end_a_check_with_1(
    wrong: str | None,
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "neg.onnx"
    path.write_bytes(NEG)
    compared = SimpleNamespace(wrong=wrong, error=0.25)
    monkeypatch.setattr(ortgpu_module, "GPUSession", lambda model, **_: made_session(device=L4))
    monkeypatch.setattr(divergence, "compare_with_cpu", lambda *_: (compared, "the CPU"))
    code = main(["check", str(path), "--runs", "1", "--compare", "cpu", *(["--json"] if as_json else [])])
    assert code == (wrong is not None)
    shown = capsys.readouterr().out
    if as_json:
        document = json.loads(shown)
        assert document["ok"] is (wrong is None)
        assert document["compared"] == {"error": 0.25, "wrong": wrong}
        assert (document["compared_with"], document["model"]) == ("the CPU", str(path))
    else:
        assert shown.splitlines()[-1].startswith("OK: " if wrong is None else "WRONG: ")


GIVEN = {
    "all": (["x", "w"], None),
    "another name": (["x", "z"], "has arrays of the names 'x', 'z', and the model takes 'w', 'x'"),
    "one less": (["x"], "has arrays of the names 'x', and the model takes 'w', 'x'"),
    "one more": (["x", "w", "z"], "has arrays of the names 'w', 'x', 'z', and the model takes 'w', 'x'"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_file_has_the_inputs_of_the_model_and_no_others(tmp_path: Path, case: str) -> None:
    names, says = GIVEN[case]
    path = tmp_path / "inputs.npz"
    arrays: dict[str, Any] = {name: np.ones(2) for name in names}
    np.savez(path, **arrays)
    declared = [Described(name, "tensor(double)", [2]) for name in ("x", "w")]
    if says is None:
        assert set(read_inputs(path, declared)) == {*names}
    else:
        with pytest.raises(click.UsageError, match=re.escape(says)):
            read_inputs(path, declared)
    assert set(read_inputs(path)) == {*names}, "another command does not know the model"


def test_the_memory_of_a_report_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use the same GPU, and this one uses another GPU."""
    used = {H200.uuid: {os.getpid(): 11}, L4.uuid: {1: 5, os.getpid(): 7, os.getpid() + 1: None}}
    monkeypatch.setattr("ortgpu.environment.gpu.driver.processes_on", lambda uuid: used[uuid])
    found = report.read(made_session(device=L4), None, 0, "not asked for", "refused")
    assert (found.gpu_memory, found.device, found.latency, found.latency_error) == (7, L4, None, "not asked for")
    feeds = {"x": np.ones(4, np.float32)}
    found = report.read(made_session(device=H200), feeds, 3, None, "refused")
    assert (found.gpu_memory, found.device, found.latency_error) == (11, H200, None)
    assert found.latency is not None
    assert found.latency["runs"] == 3
