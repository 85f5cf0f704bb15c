"""The command line: exit codes, what is printed where, and that nobody sees a traceback."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import GPUs
from ortgpu.__main__ import main
from ortgpu.cli import COMMANDS, demo, inputs, output, plain
from ortgpu.cli.model import BATCH, LAYERS, example_model
from ortgpu.cli.report import Latency, SessionReport
from ortgpu.devices import Device
from ortgpu.errors import DriverNotFoundError, LibraryNotFoundError, catalogue, manual, shell
from ortgpu.placement import UNKNOWN, PlacedNode, Placement
from tests.lab.fixtures import Lab

DEADLINE = 110
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the state of most machines, and one that any machine can be put into
ESCAPE = "\x1b"


def ortgpu(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m ortgpu`` in a process of its own, with its output in pipes."""
    return subprocess.run(
        [sys.executable, "-m", "ortgpu", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE,
        env={**os.environ, **(env or {})},
        check=False,
    )


def is_clean(result: subprocess.CompletedProcess[str]) -> bool:
    return "Traceback" not in result.stdout + result.stderr and ESCAPE not in result.stdout


def example_error() -> LibraryNotFoundError:
    return LibraryNotFoundError(
        "2 libraries that the provider needs were not found",
        missing=("libcublas.so.13", "libcurand.so.10"),
        evidence=["libcublas.so.13: in no folder", "libcurand.so.10: [in] no folder"],
        fixes=[shell("pip install 'ortgpu[cuda]'"), manual("Or load [bold]them[/bold] yourself.")],
        others=[DriverNotFoundError("there is no driver")],
    )


def example_report() -> SessionReport:
    return SessionReport(
        device=Device("cuda", 1, "GPU-0", "NVIDIA H200", (9, 0), 140 << 30, "580.65.06"),
        placement=Placement(
            (
                PlacedNode("gemm", "Gemm", "", "CUDAExecutionProvider", "compute"),
                PlacedNode("unique", "Unique", "", "CPUExecutionProvider", "compute"),
                PlacedNode("shape", "Shape", "", "CPUExecutionProvider", "shape"),
            )
        ),
        providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
        options={"use_tf32": "1", "device_id": "1"},
        gpu_memory=500 << 20,
        latency=Latency(0.075, (0.0003, 0.0002, 0.0004)),
        latency_error=None,
    )


# Usage


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"] if command else ["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: ortgpu")
    if command:  # the list of commands says what the command says of itself
        assert COMMANDS[command] in " ".join(shown.split())
    else:
        assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["--no-such-option"],
        ["check", "/no/such/model.onnx"],
        ["check", os.curdir],  # a folder
        ["check", "--cpu-nodes", "maybe"],
        ["check", "--runs", "-1"],
        ["check", "--runs", "many"],
        ["check", "a.onnx", "b.onnx"],
        ["demo", "--timeout", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: ortgpu" in captured.err


def test_module_and_exit_code() -> None:
    result = ortgpu("check", "/no/such/model.onnx")
    assert result.returncode == 2
    assert "/no/such/model.onnx" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="pipes break in another way on Windows")
def test_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-m", "ortgpu", "--help"], stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE, check=False
    )
    os.close(writer)
    assert (child.returncode, child.stderr) == (1, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither the signals nor named pipes")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_takes_what_was_started_with_it(tmp_path: Path, name: str) -> None:
    """`timeout 10 ortgpu doctor`, where a driver hangs: the child that hangs in it must not stay."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    hangs = f"import time; pipe = open({str(pipe)!r}, 'w'); pipe.write('ready\\n'); pipe.flush(); time.sleep(100)"
    code = f"""
import signal, sys
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # under nohup they would be ignored, and stay so
signal.signal(signal.SIGINT, signal.default_int_handler)
import click
from ortgpu import cli
from ortgpu.environment.child import run
hang = click.Command("hang", callback=lambda: run([sys.executable, "-c", {hangs!r}], timeout=100))
cli._Commands.get_command = lambda *_: hang
sys.exit(cli.run(["hang"]))
"""
    number = getattr(signal, name)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> bytes:
        assert select.select([reader], [], [], 30)[0], "nothing was written, and what holds the pipe is alive"
        return os.read(reader, 100)

    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            assert read() == b"ready\n"
            process.send_signal(number)
            assert process.wait(30) == 128 + number
            assert read() == b""
        finally:
            process.kill()
            os.close(reader)


def test_error_that_a_command_lets_through(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise example_error()

    monkeypatch.setattr(plain, "observe", fail)
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert "LibraryNotFoundError: 2 libraries" in captured.err
    assert "LibraryNotFoundError" not in captured.out


# How it looks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_text_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    output.show_error(output.stdout(), example_error())
    assert file.getvalue() == (
        "LibraryNotFoundError: 2 libraries that the provider needs were not found\n"
        "  - libcublas.so.13: in no folder\n"
        "  - libcurand.so.10: [in] no folder\n"
        "To fix it:\n"
        "    pip install 'ortgpu[cuda]'\n"
        "    Or load [bold]them[/bold] yourself.\n"
        "Also found:\n"
        "  - driver-not-found: there is no driver\n"
        "code: library-not-found\n"
    )


def test_colours_on_a_terminal_and_commands_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    output.show_error(output.stdout(), example_error())
    assert ESCAPE in file.getvalue()
    assert "    pip install 'ortgpu[cuda]'" in re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()


def test_table_is_as_wide_as_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    output.table(output.stdout(), ["name", "op"], [["a" * 200, "Relu"], ["b", "Gemm"]])
    assert file.getvalue().splitlines() == [
        "  name" + " " * 198 + "op",
        "  " + "a" * 200 + "  Relu",
        "  b" + " " * 201 + "Gemm",
    ]


def test_control_characters_of_a_model_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in a model file are anything at all: a sequence that clears the screen, or sets the title of the window."""
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("NO_COLOR", "1")
    evil = "\x1b]0;owned\x07\r\x9b2J"
    console = output.stdout()
    output.line(console, evil)
    output.table(console, ["name"], [[evil]])
    output.facts(console, {"name": evil})
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())  # rich's own: bold, though without colours
    assert not set(plain) & {ESCAPE, "\x07", "\r", "\x9b"}
    assert plain.count(r"\x1b]0;owned\x07\x0d\x9b2J") == 3


def test_name_that_the_encoding_lacks(tmp_path: Path) -> None:
    model = tmp_path / "gr\u00f6\u00dfe.onnx"
    model.write_bytes(b"not a model")
    result = ortgpu("check", str(model), "--allow-cpu", env={**NO_GPU, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.returncode == 1
    assert is_clean(result)


def test_report_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    example_report().show(output.stdout())
    assert (
        file.getvalue()
        == """\
  device                cuda:1
  name                  NVIDIA H200
  uuid                  GPU-0
  compute capability    9.0
  memory                143,360 MiB
  driver                580.65.06
  used by this process  500 MiB
  providers             CUDAExecutionProvider, CPUExecutionProvider
  time                  first run 75.00 ms; of 3 more, median 0.300 ms, fastest 0.200 ms
Placement of the nodes
  provider               kind     operator  nodes
  CUDAExecutionProvider  compute  Gemm      1
  CPUExecutionProvider   compute  Unique    1
  CPUExecutionProvider   shape    Shape     1
Options bound to CUDAExecutionProvider
  device_id  1
  use_tf32   1
"""
    )


def test_report_of_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    unknown = replace(
        example_report(),
        device=Device("cuda", 0, None, None, None, None, None),
        placement=UNKNOWN,
        gpu_memory=None,
        latency=None,
        latency_error="it was not run",
    )
    unknown.show(output.stdout())
    assert "name                  unknown" in file.getvalue()
    assert "used by this process  unknown" in file.getvalue()
    assert "time                  not measured: it was not run" in file.getvalue()
    document = unknown.as_dict()
    assert json.loads(json.dumps(document)) == document


def test_report_as_data() -> None:
    document = example_report().as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["latency_ms"] == {"first": 75.0, "median": 0.3, "min": 0.2, "runs": 3}
    assert document["placement"] == {
        "known": True,
        "by_provider": {"CUDAExecutionProvider": 1, "CPUExecutionProvider": 2},
        "cpu_compute_nodes": [{"name": "unique", "op_type": "Unique", "domain": ""}],
    }


# Inputs


@dataclass
class Described:
    name: str
    type: str
    shape: list[int | str | None]


@pytest.mark.parametrize("kind", ["float16", "float", "double", "int8", "int32", "int64", "uint8", "bool", "string"])
def test_input_of_each_type(kind: str) -> None:
    array = inputs.make_inputs([Described("x", f"tensor({kind})", ["batch", 3, None])])["x"]
    assert array.shape == (1, 3, 1)
    assert array.dtype == {"float": "float32", "double": "float64", "string": "O"}.get(kind, kind)


def test_input_values() -> None:
    made = inputs.make_inputs(
        [
            Described("input_ids", "tensor(int64)", ["batch", 4]),
            Described("attention_mask", "tensor(int64)", ["batch", 4]),
            Described("scale", "tensor(float)", []),
            Described("text", "tensor(string)", [2]),
            Described("none", "tensor(float)", [0, 4]),
        ]
    )
    assert made["input_ids"].tolist() == [[0, 0, 0, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert 0 <= made["scale"].item() < 1
    assert made["text"].tolist() == ["", ""]
    assert made["none"].shape == (0, 4)


@pytest.mark.parametrize("kind", ["tensor(bfloat16)", "seq(tensor(float))", "map(int64,tensor(float))"])
def test_input_that_cannot_be_made_up(kind: str) -> None:
    with pytest.raises(inputs.UnknownInputError, match=re.escape(kind)):
        inputs.make_inputs([Described("x", kind, [])])


def test_example_model_is_valid_and_always_the_same() -> None:
    import onnx

    model = onnx.load_model_from_string(example_model())
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, [o.version for o in model.opset_import]) == (8, [17])
    assert example_model() == example_model()


# check


def test_check_without_a_gpu() -> None:
    result = ortgpu("check", env={**NO_GPU, "FORCE_COLOR": "1", "COLUMNS": "40"})
    assert result.returncode == 1
    assert is_clean(result)
    lines = result.stdout.splitlines()
    assert lines[0].partition(": ")[0] in {cls.__name__ for cls in catalogue().values()}
    assert "To fix it:" in lines
    assert lines[-1].removeprefix("code: ") in catalogue()


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
    assert "To fix it:" in result.stdout
    assert "Opened on the CPU all the same" in result.stdout
    assert "runs on the GPU" not in result.stdout


def test_check_says_who_allowed_the_cpu_and_that_no_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ortgpu("check", "--allow-cpu", "--runs", "0", env=NO_GPU)
    assert "because --allow-cpu was given" in given.stdout
    variable = ortgpu("check", "--runs", "0", "--html", str(page), env={**NO_GPU, "ORTGPU_ALLOW_CPU": "1"})
    assert variable.returncode == 0
    assert "because ORTGPU_ALLOW_CPU is set" in variable.stdout
    assert f"{page} is not written: nothing is on a GPU" in variable.stdout
    assert not page.exists()


def test_a_page_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    """Said before a model is opened, not afterwards."""
    result = ortgpu("check", "--html", str(tmp_path / "absent" / "page.html"), "--allow-cpu", env=NO_GPU)
    assert result.returncode == 2, result
    assert is_clean(result)
    assert "cannot be written: No such file or directory" in result.stderr
    assert result.stdout == ""


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


# demo


def test_demo_without_a_gpu() -> None:
    result = ortgpu("demo", env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    assert "no exception says so" in result.stdout
    assert "To fix it:" in result.stdout
    assert "Raised instead of running on the CPU unnoticed." in result.stdout


@pytest.fixture
def plain_gets_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = plain.PlainResult("1.31.1", ("CUDAExecutionProvider", "CPUExecutionProvider"), True, None, None, ())
    monkeypatch.setattr(plain, "observe", lambda *_, **__: seen)


@pytest.mark.usefixtures("plain_gets_gpu")
def test_demo_admits_a_wrong_refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: bytes) -> None:
        raise example_error()

    monkeypatch.setattr(demo, "_open_and_compare", refuse)
    assert main(["demo"]) == 1
    assert "this refusal is wrong" in capsys.readouterr().out


@pytest.mark.usefixtures("plain_gets_gpu")
@pytest.mark.parametrize(("difference", "code"), [(1e-4, 0), (0.5, 1), (float("nan"), 1)])
def test_demo_compares_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], difference: float, code: int
) -> None:
    found = example_report()
    monkeypatch.setattr(demo, "_open_and_compare", lambda _: (found, difference))
    assert main(["demo"]) == code
    assert ("On the GPU, verified." in capsys.readouterr().out) is (code == 0)


def observe(**options: Any) -> plain.PlainResult:
    return plain.observe(example_model(), BATCH, LAYERS[0], **{"timeout": DEADLINE, **options})


def test_plain_program_is_the_usual_one() -> None:
    seen = observe()
    assert seen.version
    assert seen.bound
    assert seen.ran
    assert (seen.raised, seen.ended) == (None, None)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('\\x1b[1;31mred\\x1b[m'); import time; time.sleep(60)", ("did not end within 3 s", ("red",))),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ("died of SIGSEGV", ())),
    ],
)
def test_plain_program_that_does_not_end_well(
    monkeypatch: pytest.MonkeyPatch, program: str, expected: tuple[str, tuple[str, ...]]
) -> None:
    monkeypatch.setattr(plain, "_PROGRAM", program.replace("')", "', flush=True)", 1))
    seen = observe(timeout=3)
    assert (seen.ended, seen.written) == expected
    assert not seen.got_gpu


# With a GPU


@pytest.fixture(scope="module")
def gpu_uuid(gpus: GPUs) -> str:
    return gpus.visible[0].uuid


@pytest.mark.gpu
def test_check_on_the_gpu(gpu_uuid: str) -> None:
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
    assert shown.stdout.startswith("OK: the built-in model runs on the GPU\n")
    assert gpu_uuid in shown.stdout


@pytest.mark.gpu
def test_check_of_a_device_that_is_not_there(gpu_uuid: str) -> None:
    result = ortgpu("check", "--device", "99", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["code"] == "device-not-found"


@pytest.mark.gpu
def test_demo_on_the_gpu(gpu_uuid: str) -> None:
    result = ortgpu("demo")
    assert result.returncode == 0, result
    assert is_clean(result)
    assert gpu_uuid in result.stdout
    assert result.stdout.endswith("On the GPU, verified.\n")
