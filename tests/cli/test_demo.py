"""``ortgpu demo``, and the plain program that it compares with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ortgpu.__main__ import main
from ortgpu.cli import demo
from ortgpu.cli.check import check
from tests.support.command_line import DEADLINE, NO_GPU, is_clean, ortgpu
from tests.support.this_machine import GPUs


def test_demo_without_a_gpu() -> None:
    result = ortgpu("demo", env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    assert "no exception says so" in result.stdout
    assert "To fix it:" in result.stdout
    assert "Raised instead of running on the CPU unnoticed." in result.stdout


def test_the_model_that_it_saves_is_that_of_the_guide(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    assert ortgpu("demo", "--save", str(model), env=NO_GPU).returncode == 0
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (value,) = session.get_inputs()
    assert (value.name, value.type, value.shape) == ("x", "tensor(float)", ["n", 4])
    assert session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})[0].tolist() == [[0, 0, 1, 2]]
    refused = ortgpu("demo", "--save", str(tmp_path / "no" / "model.onnx"), env=NO_GPU)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_demo_that_may_use_the_cpu_does_not_claim_the_gpu() -> None:
    result = ortgpu("demo", env={**NO_GPU, "ORTGPU_ALLOW_CPU": "1"})
    assert result.returncode == 0, result
    assert "the built-in model is open on the CPU because of ORTGPU_ALLOW_CPU" in result.stdout
    assert "On the GPU" not in result.stdout


def test_demo_admits_a_wrong_refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = demo.PlainResult({"bound": "CUDAExecutionProvider, CPUExecutionProvider", "run()": "returned a result"}, ())
    monkeypatch.setattr(demo, "observe", lambda **_: seen)
    monkeypatch.setattr(check, "callback", lambda **_: 1)
    assert main(["demo"]) == 1
    assert "this refusal is wrong" in capsys.readouterr().out


def test_a_provider_that_is_bound_and_runs_nothing() -> None:
    """On a GPU for which the provider has no kernels, a session opens and its first run raises."""
    seen = demo.PlainResult({"bound": "CUDAExecutionProvider, CPUExecutionProvider", "raised": "no kernel image"}, ())
    assert (seen.got_gpu, seen.verdict) == (False, "no result")


def test_the_plain_program_is_not_guarded() -> None:
    """ORTGPU_ENFORCE is set for good in many an image."""
    alone, _, ours = ortgpu("demo", env={**NO_GPU, "ORTGPU_ENFORCE": "1"}).stdout.partition("2. GPUSession")
    assert "no exception says so" in alone
    assert "Raised instead of running on the CPU unnoticed." in ours


def test_plain_program_is_the_usual_one() -> None:
    seen = demo.observe(timeout=DEADLINE)
    assert seen.observed.keys() == {"version", "bound", "run()"}


@pytest.mark.lab
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
    monkeypatch.setattr(demo, "_PROGRAM", program.replace("')", "', flush=True)", 1))
    seen = demo.observe(timeout=3)
    assert (seen.observed, seen.written) == ({"process": expected[0]}, expected[1])
    assert not seen.got_gpu


@pytest.mark.ortgpu
def test_demo_on_the_gpu(gpus: GPUs) -> None:
    result = ortgpu("demo")
    assert result.returncode == 0, result
    assert is_clean(result)
    assert gpus.visible[0].uuid in result.stdout
    assert "OK: the built-in model runs on the GPU" in result.stdout
