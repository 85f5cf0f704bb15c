"""What the command line shows in a terminal of 80 columns: whole words, and commands that can be copied."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import sys
from pathlib import Path

import pytest

from ortgpu.__main__ import main
from ortgpu.cli import COMMANDS, output
from ortgpu.cli.explain import sections
from ortgpu.cli.tune import _row
from ortgpu.errors import catalogue
from ortgpu.provider.placement import PlacedNode, Placement
from ortgpu.session.tuning.children import Trial
from tests.support.command_line import ESCAPE, NO_GPU, Terminal, example_report, ortgpu, shown_in_a_terminal

BRANCHES = [code for code, cls in catalogue().items() if not cls.__subclasses__()]
COLUMNS = 80
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def lines_in_a_terminal(*arguments: str, columns: int = COLUMNS, env: dict[str, str] | None = None) -> list[str]:
    """Return the lines of ``python -m ortgpu`` in a terminal without colours, before the terminal folds any."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown_in_a_terminal(*arguments, columns=columns, env=env))
    return [each.rstrip() for each in text.split("\n")]


def breaks_a_word(text: str, columns: int = COLUMNS) -> bool:
    """Return True if the terminal folds a line that is neither one long word nor a command."""
    is_command = re.match(r" {4,}(\S*/python[\d.]*|pip|sudo|uv|echo)\b", text)
    return len(text) > columns and " " in text.strip() and not is_command


@functools.cache
def lines_without_a_gpu(arguments: str, model: Path) -> list[str]:
    return lines_in_a_terminal(*arguments.format(model=model).split(), env=NO_GPU)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import onnx.parser

    path = tmp_path_factory.mktemp("model") / "model.onnx"
    path.write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        "doctor",
        "doctor --verbose --no-probe",
        "doctor --profile training",
        "demo",
        "check {model}",
        "check --allow-cpu {model}",
        "bench --allow-cpu --rounds 5 --batch 1 {model}",
        "check --compare cpu --allow-cpu {model}",
        "tune {model}",
        "preflight",
        "explain",
        "chekc",
        "check --device=cuda:99 --inputs={model} {model} --allow-cpu",
        "bench --plot /no/such/folder/whose/name/is/rather/long/figures.svg {model}",
    ],
)
def test_no_line_breaks_a_word(arguments: str, model: Path) -> None:
    assert_no_line_breaks_a_word(lines_without_a_gpu(arguments, model))


def assert_no_line_breaks_a_word(shown: list[str]) -> None:
    assert len("".join(shown)) > 40
    assert "Traceback (most recent call last):" not in shown
    assert [line for line in shown if breaks_a_word(line)] == []


@pytest.mark.parametrize("arguments", ["doctor --no-probe --verbose", "explain", "explain driver-not-found"])
def test_no_word_is_lost_on_the_way(arguments: str) -> None:
    """As wide as the terminal is, it shows the words that a file gets."""
    piped = ortgpu(*arguments.split(), env=NO_GPU).stdout
    for columns in (80, 200):
        shown = lines_in_a_terminal(*arguments.split(), columns=columns, env=NO_GPU)
        assert [word for line in shown for word in line.split()][-50:] == piped.split()[-50:]
        assert sum(len(line) > columns for line in shown) <= sum(len(word) > columns - 4 for word in piped.split())


def shown_by(monkeypatch: pytest.MonkeyPatch, columns: int = COLUMNS) -> io.StringIO:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_a_help_breaks_a_word(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_by(monkeypatch)
    assert main([command, "--help"]) == 0
    assert_no_line_breaks_a_word([each.rstrip() for each in terminal.getvalue().split("\n")])


@pytest.mark.parametrize("code", BRANCHES)
def test_explanations_are_folded_and_their_commands_are_not(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_by(monkeypatch)
    assert main(["explain", code]) == 0
    commands = {line.strip() for block in re.findall(r"```\n(.*?)```", sections()[code][1], re.DOTALL)
                for line in block.splitlines()}  # fmt: skip
    lines = terminal.getvalue().splitlines()
    assert commands <= {line.strip() for line in lines}
    assert [
        line for line in lines if len(line) > COLUMNS and " " in line.strip() and line.strip() not in commands
    ] == []


def test_text_goes_on_below_its_own_column(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_by(monkeypatch, 40)
    console = output.stdout()
    output.line(console, "  - a fact of which there is more to say than fits")
    output.facts(console, {"name": "a value that is longer than the line\nand another line", "second": "x"})
    output.facts(console, {"path": "in /a/folder/whose/name/is/longer/than/that"})
    output.command(console, "    pip install --force-reinstall --no-deps 'onnxruntime-gpu>=1.28'")
    assert terminal.getvalue() == (
        "  - a fact of which there is more to say\n"
        "    than fits\n"
        "  name    a value that is longer than\n"
        "          the line\n"
        "          and another line\n"
        "  second  x\n"
        "  path  in\n"
        "  /a/folder/whose/name/is/longer/than/that\n"
        "    pip install --force-reinstall --no-deps 'onnxruntime-gpu>=1.28'\n"
    )


def test_a_table_that_is_folded_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of `ortgpu tune`: rich made their column narrower than its words, and broke them."""
    trials = [
        Trial({"cudnn_conv_algo_search": "EXHAUSTIVE", "prefer_nhwc": "1"}, 0.8, (0.0102, 0.05), 2e-4, "chosen"),
        Trial({"enable_cuda_graph": "1"}, None, (), None, "rejected: output 'y' has infinities where plain has none"),
    ]
    terminal = shown_by(monkeypatch, COLUMNS)
    output.table(output.stdout(), ("settings", "ms", "speed-up", "error", "verdict"), map(_row, trials))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    words = {word for line in lines for word in line.split()}
    assert {"cudnn_conv_algo_search", "EXHAUSTIVE,", "prefer_nhwc", "verdict", "infinities", "none"} <= words


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        ("demo", "Raised instead of running on the CPU unnoticed."),
        ("check {model}", "Error: "),
        ("check --allow-cpu {model}", "NOT on the GPU: "),
        ("check --allow-cpu --placement --verbose {model}", "NOT on the GPU: "),
        ("doctor", "not OK: "),
        ("doctor --verbose --no-probe", "not OK: "),
        ("fix --yes", "not fixed: "),
        ("fix --dry-run", "would run (--dry-run)"),
        ("hold --python {model}", "Error: "),
    ],
)
def test_the_verdict_is_in_sight_on_a_small_terminal(arguments: str, verdict: str, model: Path) -> None:
    text = lines_without_a_gpu(arguments, model)
    rows = [line[start : start + COLUMNS] for line in text for start in range(0, max(len(line), 1), COLUMNS)]
    while rows and not rows[-1]:
        rows.pop()
    assert verdict in re.sub(r"\s+", " ", " ".join(rows[-23:]))


def test_table_that_does_not_fit_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("0", "host-of-a-cluster.example", "GPU-11111111-2222-3333-4444-555555555555")]
    narrow = shown_by(monkeypatch, 70)
    output.table(output.stdout(), ("rank", "host", "UUID"), rows * 2)
    one = (
        "  rank  0\n"
        "  host  host-of-a-cluster.example\n"
        "  UUID  GPU-11111111-2222-3333-4444-555555555555\n"
    )  # fmt: skip
    assert narrow.getvalue() == f"{one}\n{one}"
    wide = shown_by(monkeypatch, 80)
    output.table(output.stdout(), ("rank", "host", "UUID"), rows)
    assert len(wide.getvalue().splitlines()) == 2


def test_placement_with_long_names(monkeypatch: pytest.MonkeyPatch) -> None:
    node = PlacedNode("n", "QLinearGlobalAveragePoolOfSomebodyElse", "com.example", "CPUExecutionProvider", "compute")
    terminal = shown_by(monkeypatch, 60)
    dataclasses.replace(example_report(), placement=Placement((node,))).show(output.stdout())
    assert [line for line in terminal.getvalue().splitlines() if len(line) > 60] == []
    assert "operator  QLinearGlobalAveragePoolOfSomebodyElse\n" in terminal.getvalue()


# Colours


@pytest.mark.parametrize("term", ["xterm", "dumb", ""])
def test_colours_without_a_terminal_when_asked(term: str) -> None:
    result = ortgpu("explain", "no-device", env={"FORCE_COLOR": "1", "TERM": term, "NO_COLOR": ""})
    assert ESCAPE in result.stdout
    plain = ortgpu("explain", "no-device", env={"FORCE_COLOR": "", "TERM": term})
    assert re.sub(r"\x1b\[[0-9;]*m", "", result.stdout) == plain.stdout


def test_no_spinner_without_a_terminal() -> None:
    result = ortgpu("doctor", env={"FORCE_COLOR": "1", **NO_GPU})
    assert "Looking at" not in result.stderr


def test_document_has_no_colours() -> None:
    assert ESCAPE not in ortgpu("doctor", "--no-probe", "--json", env={"FORCE_COLOR": "1"}).stdout


# Commands


def test_commands_are_listed_in_the_order_of_use() -> None:
    assert list(COMMANDS) == ["demo", "check", "doctor", "fix", "hold", "explain", "tune", "bench", "exec", "preflight"]


@pytest.mark.parametrize(("typed", "meant"), [("chek", "check"), ("docter", "doctor"), ("explian", "explain"),
                                              ("pre-flight", "preflight"), ("benchmark", "bench")])  # fmt: skip
def test_unknown_command_is_answered_with_the_nearest(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed, "model.onnx"]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_command_that_is_like_none_is_only_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["placement"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "completed"), [("ortgpu ch", "plain,check"), ("ortgpu check --allow", "plain,--allow-cpu")]
)
def test_a_shell_completes_commands_and_options(words: str, completed: str) -> None:
    """As the guide says: eval "$(_ORTGPU_COMPLETE=bash_source ortgpu)"."""
    env = {"_ORTGPU_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert ortgpu(env=env).stdout.split() == [completed]
    wrong = {**env, "COMP_WORDS": "ortgpu chek --al", "COMP_CWORD": "2"}
    assert "Traceback" not in ortgpu(env=wrong).stderr
    assert "complete -o nosort" in ortgpu(env={"_ORTGPU_COMPLETE": "bash_source"}).stdout
