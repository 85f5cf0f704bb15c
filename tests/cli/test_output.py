"""What the command line prints: for people, for pipes, and as data."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ortgpu.cli import output
from ortgpu.provider.devices import Device
from ortgpu.provider.placement import UNKNOWN
from tests.support.command_line import ESCAPE, NO_GPU, Terminal, example_error, example_report, is_clean, ortgpu


def test_plain_text_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
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
        "More: ortgpu explain library-not-found\n"
    )


def test_what_is_no_number_in_json_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """The error of results with other infinities, as `check --compare` and `tune` report it. jq would read nothing."""
    output.write_json({"compared": {"error": float("inf")}, "errors": [(float("nan"), 0.5)]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"compared": {"error": None}, "errors": [[None, 0.5]]}


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


def test_a_table_with_wide_characters_empty_cells_and_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    console = output.stdout()
    console.width = 24
    output.table(console, ["", "what", "name"], [["", "\u4e2d\u6587 " * 4, "a\nb"]])
    text = "\u4e2d\u6587 \u4e2d\u6587"
    assert file.getvalue().splitlines() == [
        "     what           name",
        f"     {text}      a",
        f"     {text}      b",
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
    assert plain.count(r"\x1b]0;owned\x07\r\x9b2J") == 3


def test_name_that_the_encoding_lacks(tmp_path: Path) -> None:
    model = tmp_path / "gr\u00f6\u00dfe.onnx"
    model.write_bytes(b"not a model")
    result = ortgpu("check", str(model), "--allow-cpu", env={**NO_GPU, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.returncode == 1
    assert is_clean(result)


def test_report_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    example_report().show(output.stdout(), verbose=True)
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
    document = unknown.document()
    assert json.loads(json.dumps(document)) == document


def test_report_as_data() -> None:
    document = example_report().document()
    assert json.loads(json.dumps(document)) == document
    assert document["latency_ms"] == {"first": 75.0, "median": 0.3, "min": 0.2, "runs": 3}
    assert document["placement"] == {
        "known": True,
        "by_provider": {"CUDAExecutionProvider": 1, "CPUExecutionProvider": 2},
        "cpu_compute_nodes": [{"name": "unique", "op_type": "Unique", "domain": ""}],
    }


@pytest.mark.parametrize("before", [None, b"", b"an earlier record"], ids=["none", "empty", "full"])
@pytest.mark.parametrize("by_link", [False, True], ids=["by its path", "by a link"])
def test_a_file_to_write_is_as_it_was_until_it_is_written(tmp_path: Path, before: bytes | None, by_link: bool) -> None:
    """It is opened to see whether it can be written, before minutes of work."""
    path, link = tmp_path / "record.json", tmp_path / "link"
    if before is not None:
        path.write_bytes(before)
    if by_link:
        link.symlink_to(path)
    asked = link if by_link else path
    assert output.FileToWrite().convert(str(asked), None, None) == asked
    assert (path.read_bytes() if path.exists() else None) == before
    assert link.is_symlink() is by_link
