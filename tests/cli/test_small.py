"""What the first users of the command line ran into, each a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx.parser
import pytest

from ortgpu.__main__ import main
from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep
from ortgpu.session.request import refuse_misspelt
from tests.lab.fixtures import Lab
from tests.support.command_line import NO_GPU, ortgpu

HEAD = '<ir_version: 8, opset_import: ["": 17]>'
IN_C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def write_model(path: Path, text: str) -> Path:
    path.write_bytes(onnx.parser.parse_model(f"{HEAD} {text}").SerializeToString())
    return path


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.onnx", "relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")


@pytest.mark.parametrize("command", [["check", "--runs", "0"], ["bench", "--rounds", "5", "--batch", "1"]])
def test_nodes_on_the_cpu_are_said_once(lab: Lab, provider_library: str, tmp_path: Path, command: list[str]) -> None:
    """ONNX Runtime warns of its copies at every session, and calls a graph that it refuses an error."""
    text = "mixed (float[n] x) => (float[m] y) { a = Relu(x) b = Unique(a) c = Relu(b) d = Unique(c) y = Relu(d) }"
    machine = lab.machine_that_places(provider_library)
    done = machine.run(argv=["-m", "ortgpu", *command, str(write_model(tmp_path / "mixed.onnx", text))]).ok()
    assert done.stderr == ""
    assert done.stdout.count("warning: 2 of 5 nodes compute on the CPU: Unique (2)") == 1
    if command[0] == "bench":
        assert done.stdout.count("not measured: graph: PlacementError: ") == 1


def test_argument_in_capitals_is_caught() -> None:
    with pytest.raises(TypeError, match="did you mean 'allow_cpu'"):
        refuse_misspelt("GPUSession", ["allow_CPU"])
    with pytest.raises(TypeError, match="did you mean 'device'"):
        refuse_misspelt("GPUSession", ["Device"])


def test_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import sys\n", encoding="utf-8")
    result = ortgpu("check", "--allow-cpu", str(path))
    assert result.returncode == 1
    assert "not an ONNX model: it is damaged, or a file of another kind" in result.stdout
    assert "wire type" not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["check", "missing.onnx", "--json"], ["bench", "--json", "missing.onnx"], ["doctor", "--model", "x", "--json"]],
    ids=" ".join,
)
def test_wrong_usage_is_a_document_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["schema"], found["ok"], found["model"], found["error"]["code"]) == (1, False, None, None)
    assert "does not exist" in found["error"]["summary"]
    assert "Usage: ortgpu" in captured.err


def test_json_of_another_program_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_placement_on_the_cpu_says_that_it_does_nothing(relu: Path) -> None:
    result = ortgpu("check", "--allow-cpu", "--placement", "--runs", "0", str(relu), env=NO_GPU)
    assert result.returncode == 0
    assert "--placement shows nothing more: nothing is on a GPU." in result.stdout


def test_doctor_says_why_the_import_failed_and_what_the_package_is(lab: Lab) -> None:
    """The CPU package over the GPU one, whose provider is left; then no NumPy, without which nothing is imported."""
    machine = lab.machine()
    information = next(machine.overlay.site.glob("onnxruntime/capi/build_and_package_info.py"))
    name = information.relative_to(machine.overlay.site).as_posix()
    machine.overlay.replace(name, b"package_name = 'onnxruntime'\n__version__ = '1.31.1'\n")
    looked = machine.run(argv=["-m", "ortgpu", "doctor", "--no-probe"])
    assert "onnxruntime 1.31.1, built without CUDA, in " in looked.stdout
    assert "for CUDA 1" not in looked.stdout.partition("What was found")[2].partition("packages")[0]
    machine.overlay.remove("numpy")
    tried = machine.run(argv=["-m", "ortgpu", "doctor"])
    assert "import FAILED" in tried.stdout
    assert "import: " in tried.stdout.partition("import FAILED")[2]
    assert "numpy" in tried.stdout.partition("import: ")[2]


def test_doctor_names_the_providers_of_a_package_without_cuda() -> None:
    from ortgpu.cli.findings import _probe

    step = ProbeStep("import", False, "onnxruntime 1.31.1", {"providers": ["CPUExecutionProvider"]})
    shown = list(_probe(ProbeResult((step,), True, 0, None, False, None, 1.0, ""), verbose=False))
    assert shown[1] == "import: its providers are CPUExecutionProvider"


def test_recommendation_is_no_failure() -> None:
    shown = ortgpu("doctor", "--no-probe", "--verbose", env=NO_GPU).stdout
    assert "recommended 3.12: fail" not in shown
    assert "minimum 3.10: pass" in shown


@pytest.mark.parametrize("command", [["check"], ["check", "--allow-cpu"], ["bench", "--allow-cpu"]])
def test_name_that_the_c_locale_does_not_have(relu: Path, command: list[str]) -> None:
    renamed = relu.rename(relu.with_name("gr\u00f6\u00dfe.onnx"))
    result = ortgpu(*command, str(renamed), env={**NO_GPU, **IN_C_LOCALE})
    assert result.returncode == 1
    assert "start Python with PYTHONUTF8=1, or with LC_ALL=C.UTF-8" in result.stdout, result
    assert "incompatible constructor arguments" not in result.stdout


def test_name_that_the_advised_locale_has(relu: Path) -> None:
    renamed = relu.rename(relu.with_name("gr\u00f6\u00dfe.onnx"))
    advised = ortgpu("check", "--allow-cpu", str(renamed), env={**NO_GPU, "LC_ALL": "C.UTF-8"})
    assert advised.returncode == 0, advised


def test_name_that_is_no_utf_8(relu: Path) -> None:
    os.rename(os.fsencode(relu), other := os.fsencode(relu.parent) + b"/gr\xf6\xdfe.onnx")
    result = ortgpu("check", "--allow-cpu", os.fsdecode(other), env={**NO_GPU, "LC_ALL": "C.UTF-8"})
    assert "is not in utf-8, the encoding of names: rename it" in result.stdout, result
