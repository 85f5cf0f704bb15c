"""Models that made-up inputs do not suit, and files that are no models, on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
from onnx import parser

from ortgpu.cli import inputs
from ortgpu.running import made_inputs
from tests.support.command_line import NO_GPU, Described, is_clean, ortgpu

pytestmark = pytest.mark.lab

RESHAPE = "g (float[n, 4] x) => (float[8, 4] y) <int64[2] shape = {8, 4}> { y = Reshape(x, shape) }"  # n has to be 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    head = '<ir_version: 8, opset_import: ["": 17]>'
    path.write_bytes(parser.parse_model(head + RESHAPE).SerializeToString())
    return path


@pytest.fixture
def fitting(tmp_path: Path) -> Path:
    path = tmp_path / "inputs.npz"
    np.savez(path, x=np.ones((8, 4), np.float32))
    return path


def checked(*arguments: object, returncode: int = 0) -> dict[str, object]:
    result = ortgpu("check", *map(str, arguments), "--allow-cpu", "--json", "--runs", "2", env=NO_GPU)
    assert result.returncode == returncode, result
    document: dict[str, object] = json.loads(result.stdout)
    assert document["ok"] is (returncode == 0)
    return document


def test_check_says_how_to_give_inputs(model: Path) -> None:
    document = checked(model)
    assert document["latency_ms"] is None
    assert str(document["latency_error"]).startswith("the model does not run on made-up inputs (--inputs FILE")


def test_check_runs_on_given_inputs(model: Path, fitting: Path) -> None:
    document = checked(model, "--inputs", fitting)
    assert document["latency_error"] is None
    assert document["latency_ms"] is not None


def test_results_that_nothing_could_be_compared_with(model: Path, fitting: Path) -> None:
    """Who asks for a comparison is not told that all is well without one."""
    document = checked(model, "--compare", "cpu", returncode=1)
    assert document["compared"] is None
    assert str(document["latency_error"]).startswith("the model does not run on made-up inputs (--inputs FILE")
    shown = ortgpu("check", str(model), "--compare", "cpu", "--allow-cpu", env=NO_GPU)
    assert "OK:" not in shown.stdout
    assert any(text.startswith("the model does not run on made-up inputs") for text in shown.stdout.splitlines())
    assert checked(model, "--compare", "cpu", "--inputs", fitting)["compared"] == {"error": 0.0, "wrong": None}


@pytest.mark.parametrize("dtype", [np.float64, np.complex64], ids=str)
def test_given_inputs_that_do_not_fit(model: Path, tmp_path: Path, dtype: type) -> None:
    """ONNX Runtime has exceptions of its own for some, and plain ones for others."""
    np.savez(tmp_path / "other.npz", x=np.ones((8, 4), dtype))
    document = checked(model, "--inputs", tmp_path / "other.npz", returncode=1)
    reason = f"the model does not run on the inputs of {tmp_path / 'other.npz'}: "
    assert str(document["latency_error"]).startswith(reason)
    assert document.keys() == checked(model).keys()
    shown = ortgpu("check", str(model), "--inputs", str(tmp_path / "other.npz"), "--allow-cpu", env=NO_GPU)
    assert shown.returncode == 1, shown
    assert is_clean(shown)
    assert any(text.startswith(reason) for text in shown.stdout.splitlines())
    assert "OK:" not in shown.stdout


def test_bench_says_how_to_give_inputs(model: Path) -> None:
    result = ortgpu("bench", str(model), "--allow-cpu", "--batch", "2", "--json", env=NO_GPU)
    assert result.returncode == 1, result
    error = json.loads(result.stdout)["error"]
    assert error["type"] in ("Fail", "RuntimeException")  # by release
    assert "Reshape" in error["summary"]
    assert "--inputs FILE" in error["others"][0]["summary"]


def test_bench_runs_on_given_inputs(model: Path, fitting: Path) -> None:
    result = ortgpu("bench", str(model), "--allow-cpu", "--inputs", str(fitting), "--rounds", "5", "--json", env=NO_GPU)
    assert result.returncode == 0, result
    assert {each["batch"] for each in json.loads(result.stdout)["figures"]} == {None}
    both = ortgpu("bench", str(model), "--allow-cpu", "--inputs", str(fitting), "--batch", "8", env=NO_GPU)
    assert both.returncode == 2, both
    assert "--inputs is one batch" in both.stderr


def save_other_names(path: Path) -> None:
    np.savez(path, z=np.ones(1), w=np.ones(1))


def save_one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def save_objects(path: Path) -> None:
    np.savez(path, x=np.array([{}], dtype=object))


def _make_pipe(path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (save_other_names, "has arrays of the names 'w', 'z', and the model takes 'x'"),
        (save_one_array, "it has one array, without a name"),
        (save_objects, "is no file that numpy.savez wrote (it holds something else than arrays of numbers or text)"),
        (lambda path: path.write_text("{}"), "(it holds something else than arrays of numbers or text)"),
        (lambda path: path.write_bytes(b"PK\x03\x04junk"), "is no file that numpy.savez wrote"),
        (Path.touch, "is no file that numpy.savez wrote"),
        (_make_pipe, "is no file that numpy.savez wrote (not a regular file)"),
    ],
    ids=["other names", "one array", "objects", "text", "broken", "empty", "pipe"],
)
def test_files_without_the_inputs(tmp_path: Path, write: Callable[[Path], object], says: str) -> None:
    path = tmp_path / "inputs.npz"
    write(path)
    with pytest.raises(click.UsageError) as raised:
        inputs.read_inputs(path, [Described("x", "tensor(float)", ["n", 4])])
    assert says in raised.value.message
    assert "allow_pickle" not in raised.value.message  # an argument of NumPy's, which no option here hands on


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_file_without_the_inputs_is_wrong_usage(model: Path, tmp_path: Path, command: str) -> None:
    save_objects(tmp_path / "inputs.npz")
    result = ortgpu(command, str(model), "--allow-cpu", "--inputs", str(tmp_path / "inputs.npz"), env=NO_GPU)
    assert result.returncode == 2, result
    assert is_clean(result)
    assert "is no file that numpy.savez wrote" in " ".join(result.stderr.split())


def test_inputs_larger_than_memory_are_not_made_up() -> None:
    wide = Described("x", "tensor(float)", ["n", 1 << 20, 1 << 20])
    with pytest.raises(made_inputs.UnknownInputError, match=r"'x' of 2 x 1048576 x 1048576 would take 8192.0 GiB"):
        made_inputs.make_inputs([Described("id", "tensor(int64)", ["n"]), wide], 2)


def test_a_file_that_is_no_model_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    shown = ortgpu("check", str(path), "--allow-cpu", env=NO_GPU)
    assert shown.returncode == 1
    assert is_clean(shown)
    assert shown.stdout.startswith("InvalidProtobuf: ")
    assert "a pointer of Git LFS" in shown.stdout
    for command in ("check", "bench"):
        error = json.loads(ortgpu(command, str(path), "--allow-cpu", "--json", env=NO_GPU).stdout)["error"]
        assert (error["type"], error["code"]) == ("InvalidProtobuf", None)
        assert any("git lfs pull" in fix["text"] for other in error["others"] for fix in other["fixes"])
