"""Sessions that the guard leaves alone, because install() or the variable names their module or model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ortgpu.session.guard import exemptions
from tests.lab.models import Models
from tests.support.children import ROOT, child_environment, run_child

PROGRAM = ROOT / "tests" / "programs" / "guard_exemptions.py"
ON_CPU = "CPUExecutionProvider"
BY_LIBRARY = {"library", "library, bytes", "library, cuda", "library's class", "library moves"}
OF_MODEL = {"program, model", "program, path"}


def start(models: Models, *exceptions: str, **variables: str) -> tuple[set[str], Any]:
    """Return the sessions that were left alone, and the records of those that live."""
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ENFORCE": None, **variables})
    found = run_child([sys.executable, str(PROGRAM), str(models.relu), *exceptions], env=env).ok().json
    records = found.pop("sessions")
    return {name for name, came in found.items() if came == ON_CPU}, records


def test_without_exceptions_every_session_is_guarded(models: Models) -> None:
    assert start(models) == (set(), [])


def test_the_sessions_of_a_module_pass_and_are_listed(models: Models) -> None:
    assert start(models, "nudging") == (BY_LIBRARY, [["unguarded", True]])


def test_a_model_passes_whoever_opens_it(models: Models) -> None:
    assert start(models, "models/vad.onnx") == (OF_MODEL, [["unguarded", True]])


def test_the_variable_adds_to_the_exceptions_of_the_program(models: Models) -> None:
    passed, _ = start(models, "vad.onnx", ORTGPU_ENFORCE_EXCEPT=" nudging ,")
    assert passed == BY_LIBRARY | OF_MODEL


def test_the_variable_alone_for_a_program_that_knows_nothing_of_it(models: Models) -> None:
    code = "import nudging, sys; print(nudging.detect(sys.argv[1]).get_providers())"
    variables = {"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ENFORCE": "1", "ORTGPU_ENFORCE_EXCEPT": "nudging"}
    env = child_environment(variables, python_path=[PROGRAM.parent])
    assert run_child([sys.executable, "-c", code, str(models.relu)], env=env).ok().stdout.strip() == f"['{ON_CPU}']"


def test_a_variable_with_a_mistake_keeps_onnxruntime_out() -> None:
    env = child_environment({"ORTGPU_ENFORCE": "1", "ORTGPU_ENFORCE_EXCEPT": "nude net"})
    done = run_child([sys.executable, "-c", "import onnxruntime"], env=env)
    assert done.returncode == 1
    assert "ORTGPU_ENFORCE_EXCEPT: 'nude net' is no exemption" in done.stderr, done.output


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ((), set()),
        ("nudenet", {"nudenet"}),
        (["pipecat.audio.vad", "nudenet"], {"pipecat.audio.vad", "nudenet"}),
        ("__main__", {"__main__"}),
        ("vad.onnx", {"./vad.onnx"}),
        ("VAD.ONNX", {"./VAD.ONNX"}),
        ("models/*.onnx", {"models/*.onnx"}),
        (Path("weights"), {"./weights"}),
        ("./weights.bin", {"./weights.bin"}),
        (Path("/opt/vad.ort"), {"/opt/vad.ort"}),
    ],
)
def test_forms(given: Any, parsed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exemptions.parse(given) == parsed
    monkeypatch.setenv(exemptions.VARIABLE, exemptions.variable_text(parsed))
    assert exemptions.read_variable() == parsed, "a child process has the same"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (5, TypeError, "names of modules and paths of models, not 5"),
        ([None], TypeError, "not None"),
        ("", ValueError, "'' is no exemption"),
        ("nude net", ValueError, "the name of a module, as 'nudenet', or the path of a model"),
        ("a,b", ValueError, r"write 'a\?b'"),
        ("onnxruntime.backend", ValueError, "name the module that calls it"),
        ("ortgpu", ValueError, "name the module that calls it"),
    ],
)
def test_what_names_neither_a_module_nor_a_model(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        exemptions.parse(given)


@pytest.mark.parametrize(
    ("exemption", "model", "modules", "covered"),
    [
        ("nudenet", "/m/a.onnx", ["nudenet"], True),
        ("nudenet", "/m/a.onnx", ["nudenet.detector"], True),
        ("nudenet", "/m/a.onnx", ["nudenet2", "app.nudenet"], False),
        ("nudenet.detector", b"model", ["nudenet"], False),
        ("nudenet.detector", b"model", ["nudenet.base", "nudenet.detector"], True),
        ("./vad.onnx", "/m/vad.onnx", ["app"], True),
        ("./vad.onnx", Path("vad.onnx"), ["app"], True),
        ("./vad.onnx", "/m/vad.onnx.bak", ["app"], False),
        ("m/*.onnx", "/opt/m/vad.onnx", ["app"], True),
        ("m/*.onnx", "/opt/n/vad.onnx", ["app"], False),
        ("/m/vad.onnx", "/m/vad.onnx", ["app"], True),
        ("/m/vad.onnx", "/o/m/vad.onnx", ["app"], False),
        ("./vad.onnx", b"vad.onnx", ["app"], False),
        ("./vad.onnx", None, ["app"], False),
    ],
)
def test_what_an_exemption_covers(exemption: str, model: Any, modules: list[str], covered: bool) -> None:
    assert exemptions.is_covered({exemption}, model, modules) is covered
