"""The command line: usage, exit codes, and that nobody sees a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ortgpu.__main__ import main
from ortgpu.cli import COMMANDS, demo
from tests.support.command_line import DEADLINE, example_error, ortgpu


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"] if command else ["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: ortgpu")
    if command is None:
        assert all(re.search(rf"^  {name} +\w", shown, re.MULTILINE) for name in COMMANDS)
    else:  # `ortgpu --help` says it without importing the command
        assert " ".join(shown.split("\n\n")[1].split()) == COMMANDS[command]


def test_help_imports_no_command() -> None:
    child = ortgpu("--help", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})
    imported = set(re.findall(r"\| +ortgpu\.cli\.(\w+)$", child.stderr, re.MULTILINE))
    assert child.returncode == 0
    assert "output" in imported
    assert not imported & {*COMMANDS}


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


def test_error_that_a_command_lets_through(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise example_error()

    monkeypatch.setattr(demo, "observe", fail)
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert "LibraryNotFoundError: 2 libraries" in captured.err
    assert "LibraryNotFoundError" not in captured.out
