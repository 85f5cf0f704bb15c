"""``ortgpu demo``, and the plain program that it compares with."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.__main__ import main
from ortgpu.cli import demo
from ortgpu.cli.model import BATCH, LAYERS, example_model
from tests.support.children import run_python
from tests.support.command_line import DEADLINE, NO_GPU, example_error, example_report, is_clean, ortgpu
from tests.support.this_machine import GPUs


def test_demo_without_a_gpu() -> None:
    result = ortgpu("demo", env=NO_GPU)
    assert result.returncode == 0, result
    assert is_clean(result)
    assert "no exception says so" in result.stdout
    assert "To fix it:" in result.stdout
    assert "Raised instead of running on the CPU unnoticed." in result.stdout


def test_demo_that_may_use_the_cpu_does_not_claim_the_gpu() -> None:
    result = ortgpu("demo", env={**NO_GPU, "ORTGPU_ALLOW_CPU": "1"})
    assert result.returncode == 0, result
    assert "Opened on the CPU all the same, because ORTGPU_ALLOW_CPU is set." in result.stdout
    assert "On the GPU" not in result.stdout


@pytest.fixture
def plain_gets_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = demo.PlainResult("1.31.1", ("CUDAExecutionProvider", "CPUExecutionProvider"), True, None, None, ())
    monkeypatch.setattr(demo, "observe", lambda *_, **__: seen)


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
    monkeypatch.setattr(demo, "_open_and_compare", lambda _: (found, difference, None))
    assert main(["demo"]) == code
    assert ("On the GPU, verified." in capsys.readouterr().out) is (code == 0)


def test_the_plain_program_is_not_guarded() -> None:
    """ORTGPU_ENFORCE is set for good in many an image."""
    alone, _, ours = ortgpu("demo", env={**NO_GPU, "ORTGPU_ENFORCE": "1"}).stdout.partition("2. GPUSession")
    assert "no exception says so" in alone
    assert "Raised instead of running on the CPU unnoticed." in ours


def test_no_room_for_the_model() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from ortgpu.__main__ import main
raise SystemExit(main(["demo"]))
"""
    done = run_python(code, deadline=DEADLINE)
    assert done.returncode == 1, done
    assert "a folder for the model is needed, such as TMPDIR can name: " in done.stderr
    assert "Traceback" not in done.stderr


def observe(**options: Any) -> demo.PlainResult:
    return demo.observe(example_model(), BATCH, LAYERS[0], **{"timeout": DEADLINE, **options})


def test_plain_program_is_the_usual_one() -> None:
    seen = observe()
    assert seen.version
    assert seen.bound
    assert seen.ran
    assert (seen.raised, seen.ended) == (None, None)


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
    seen = observe(timeout=3)
    assert (seen.ended, seen.written) == expected
    assert not seen.got_gpu


@pytest.mark.ortgpu
def test_demo_on_the_gpu(gpus: GPUs) -> None:
    result = ortgpu("demo")
    assert result.returncode == 0, result
    assert is_clean(result)
    assert gpus.visible[0].uuid in result.stdout
    assert result.stdout.endswith("On the GPU, verified.\n")
