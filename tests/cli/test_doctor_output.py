"""What the doctor shows of a diagnosis, in which order, and with which exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ortgpu
from ortgpu.__main__ import main
from ortgpu.diagnosis.diagnosing import Diagnosis
from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep
from ortgpu.environment.inspection import inspect_environment
from ortgpu.errors import DriverNotFoundError, GPUError, LibraryNotFoundError, NoDeviceError, manual, shell
from tests.support.command_line import Terminal
from tests.support.doctor_runs import LOOK

# How it is called


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--model", "/no/such/model.onnx"],
        ["doctor", "--model", os.curdir],
        ["doctor", "model.onnx"],
        ["doctor", "--timeout", "0"],
        ["doctor", "--timeout", "nan"],
        ["doctor", "--jsn"],
        ["doctor", "--profile", "nothing"],
        ["doctor", "--ssh", "host"],
        ["doctor", "--shared-folder", "."],
        ["doctor", "--profile", "training", "--model", __file__],
        ["doctor", "--profile", "training", "--shared-folder", ""],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: ortgpu doctor" in captured.err


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    give_diagnosis(monkeypatch)
    assert main([*LOOK]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["doctor"]) == 0
    assert "Looking at this machine" in terminal.getvalue()
    assert terminal.getvalue().isascii()
    assert "Looking at" not in capsys.readouterr().out


# What is shown of a diagnosis


def probe(*steps: ProbeStep, **changes: Any) -> ProbeResult:
    ended = ProbeResult(steps, True, 0, None, False, None, 1.25, "")
    return dataclasses.replace(ended, **changes)


def give_diagnosis(monkeypatch: pytest.MonkeyPatch, *problems: GPUError, probed: ProbeResult | None = None) -> None:
    made = Diagnosis(problems, inspect_environment(), probed)
    monkeypatch.setattr(ortgpu, "diagnose", lambda *_, **__: made, raising=False)


def example_problems() -> list[GPUError]:
    return [
        DriverNotFoundError(
            "there is no driver", evidence=[f"fact {n}" for n in range(9)], fixes=[manual("get one", needs="driver")]
        ),
        NoDeviceError("no GPU", evidence=["nothing"], fixes=[shell("never shown")], consequence_of="driver-not-found"),
        LibraryNotFoundError(
            "cuDNN is not there", evidence=["found nowhere"], fixes=[shell("pip install it")], severity="warning"
        ),
    ]


def test_root_first_then_consequences_then_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_diagnosis(monkeypatch, *example_problems())
    assert main([*LOOK]) == 1
    assert capsys.readouterr().out.partition("\nWhat was found")[0] == (
        "DriverNotFoundError: there is no driver\n"
        "  - fact 0\n  - fact 1\n  - fact 2\n  - fact 3\n  - fact 4\n  - fact 5\n"
        "  - ... 3 more with --verbose\n"
        "To fix it:\n"
        "    get one\n"
        "More: ortgpu explain driver-not-found\n"
        "\nConsequences of it:\n"
        "  - no-device: no GPU\n"
        "\nwarning: cuDNN is not there (library-not-found)\n"
        "    pip install it\n"
    )


def test_two_causes_are_told_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, follows, _ = example_problems()
    causes = LibraryNotFoundError("cuBLAS is not there"), DriverNotFoundError("there is no driver")
    give_diagnosis(monkeypatch, *causes, follows)
    assert main([*LOOK]) == 1
    assert capsys.readouterr().out.partition("\nWhat was found")[0] == (
        "LibraryNotFoundError: cuBLAS is not there\nMore: ortgpu explain library-not-found\n"
        "\nDriverNotFoundError: there is no driver\nMore: ortgpu explain driver-not-found\n"
        "\nConsequences of these:\n"
        "  - no-device: no GPU (because of driver-not-found)\n"
    )


def test_all_evidence_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    give_diagnosis(monkeypatch, *example_problems())
    assert main([*LOOK, "--verbose"]) == 1
    shown = capsys.readouterr().out
    assert "fact 8" in shown
    assert "found nowhere" in shown
    assert "more with --verbose" not in shown
    assert "compute capability: " in shown
    assert re.search(r"minimum .*: (pass|fail|unknown)$", shown, re.MULTILINE)


def test_warnings_alone_are_healthy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = probe(ProbeStep("driver", True), ProbeStep("session", True, "ran"))
    give_diagnosis(monkeypatch, example_problems()[2], probed=done)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "warning: cuDNN is not there (library-not-found)"
    assert lines[-2:] == ["  probe         driver ok, session ok; 1.2 s", "OK: a session opens on the GPU"]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (probe(ProbeStep("session", False, "no")), "the probe failed: session"),
        (probe(completed=False, died_in="start", returncode=1), "the probe failed: start"),
        (probe(completed=False, died_in="import", signal="SIGSEGV", returncode=-11), "ended with SIGSEGV in: import"),
        (probe(completed=False, died_in="driver", timed_out=True, returncode=None), "ran out of time in: driver"),
    ],
)
def test_a_probe_that_fails_is_a_problem_whatever_the_checks_know(
    result: ProbeResult, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_diagnosis(monkeypatch, probed=result)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert says in shown
    assert "OK" not in shown
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_arguments_reach_the_diagnosis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    model = tmp_path / "model.onnx"
    model.touch()

    def diagnose(path: Path | None = None, **settings: Any) -> Diagnosis:
        seen.append((path, settings))
        return Diagnosis((), inspect_environment(), None)

    monkeypatch.setattr(ortgpu, "diagnose", diagnose, raising=False)
    main(["doctor", "--model", str(model), "--timeout", "7"])
    main([*LOOK])
    others = {"profile": "inference", "ssh": (), "shared_folder": None}
    assert seen == [
        (model, {"probe": True, "timeout": 7, **others}),
        (None, {"probe": False, "timeout": 30, **others}),
    ]
