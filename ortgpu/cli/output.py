"""Output of the command line: for people on a terminal, and as plain lines for programs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ortgpu import __version__
from ortgpu.errors import GPUError, escape_controls
from ortgpu.process.late import late

if TYPE_CHECKING:
    from ortgpu.diagnosis.checks import model as model_check
    from ortgpu.model import contents
else:
    model_check = late("ortgpu.diagnosis.checks.model")
    contents = late("ortgpu.model.contents")

_UNLIMITED = 1 << 20  # With so many columns, lines are not folded where there is no terminal.
_USUAL = 80  # A terminal of unknown width has so many columns.
SCHEMA = 1  # The version of the JSON documents. It increases if a key is removed or changes its meaning.
_INDENT = "  "
_LEAD = re.compile(r" *(?:[-|] )?")  # The start of a line. Its continuation lines are indented by as much.
_NARROWEST = 20  # The fewest columns of a text behind its lead, even if the terminal is narrower.


class FileToWrite(click.Path):
    """A path for output. A path that cannot be written is refused before the work begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        existed = os.path.exists(path)  # Path.exists raises if the folder cannot be searched.
        try:
            path.open("ab").close()
            if not existed:
                os.unlink(os.path.realpath(path))  # A link to the file stays.
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be written: {error.strerror}", param, ctx)
        return path


MODEL_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# Options of several commands
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write one JSON document, also when there is a problem."
)
probe_timeout_option = click.option(  # Whole seconds, because "nan" is a float.
    "--timeout", type=click.IntRange(1, 3600), default=30, show_default=True, help="Seconds that the probe may take."
)
inputs_option = click.option(
    "--inputs",
    metavar="FILE",
    type=MODEL_FILE,
    help="Inputs as an .npz file (numpy.savez), one array per input name.",
)


def prepare_streams() -> None:
    """Escape characters that the encoding lacks. Discard output for a stream that the parent has closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdout() -> Console:
    return _console(sys.stdout)


def stderr() -> Console:
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    # All sizes are explicit, because rich would read COLUMNS, or guess a width of 80.
    terminal, coloured = stream.isatty(), bool(os.environ.get("FORCE_COLOR"))
    # mpirun gives its ranks terminals without a size. Python before 3.11 reports such a width as 0.
    width = (shutil.get_terminal_size().columns or _USUAL) if terminal else _UNLIMITED
    return Console(
        file=stream,
        force_terminal=terminal or coloured,
        color_system="standard" if coloured else "auto",  # With "auto" TERM=dumb, usual in CI, removes all colours.
        width=width,
        height=25,  # Without a height, rich takes its own width for TERM=dumb.
        markup=False,
        emoji=False,
        highlight=False,
    )


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a text with a spinner on a terminal. Show nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    with stderr().status(text, spinner="line"):  # Every terminal can show this spinner, because it is ASCII.
        yield


def line(console: Console, text: str = "", style: str | None = None, *, column: int = 0) -> None:
    """Write a text. A terminal gets it folded between words, aligned behind ``column`` and the indent of the text.

    A word that is too long for its line, such as a path, gets a line of its own, further left.
    """
    for row in _harmless(text).split("\n"):
        lead = _LEAD.match(row, column)
        hang = max(lead.end() if lead else 0, column)
        room = max(console.width - hang, _NARROWEST)
        parts = textwrap.wrap(row[hang:], room, break_long_words=False, break_on_hyphens=False) or [""]
        if len(parts[0]) > room:
            parts.insert(0, "")
        for number, part in enumerate(parts):
            indent = row[:hang] if number == 0 else " " * hang if len(part) <= room else _INDENT
            command(console, f"{indent}{part}".rstrip(), style)


def command(console: Console, text: str, style: str | None = None) -> None:
    """Write a text as it is. The terminal folds a long line, so a command copied from it is still one line."""
    console.print(_harmless(text), style=style, soft_wrap=True)


def _harmless(text: str) -> str:
    """Escape control characters in the lines of a text. Texts outside of errors quote names and paths, too."""
    return "\n".join(map(escape_controls, text.split("\n")))


def heading(console: Console, text: str) -> None:
    line(console, text, style="bold")


def facts(console: Console, values: Mapping[str, object]) -> None:
    """Write names and values, one pair on a line. All lines of all values are aligned."""
    column = max((len(name) for name in values), default=0) + 2 * len(_INDENT)
    for name, value in values.items():
        for number, text in enumerate(str(value).split("\n")):
            line(console, f"{_INDENT}{'' if number else name}".ljust(column) + text, column=column)


def table(console: Console, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Write a table without a frame, so that it looks the same in a terminal, a log and a bug report.

    The widest column is folded between words. If the table is still too wide, each row is a list of names and values.
    """
    cells = [[_harmless(str(cell)) for cell in row] for row in rows]
    if not cells:
        return
    by_column = zip(columns, *cells, strict=True)
    widths = [max(1, *(cell_len(text) for cell in column for text in cell.split("\n"))) for column in by_column]
    widest = widths.index(max(widths))
    room = console.width - len(_INDENT) * len(columns) - sum(widths) + widths[widest]
    if max(cell_len(word) for row in (columns, *cells) for word in row[widest].split() or [""]) > room:
        for number, row in enumerate(cells):
            if number:
                line(console)
            facts(console, dict(zip(columns, row, strict=True)))
        return
    widths[widest] = min(widths[widest], room)
    for number, row in enumerate([list(columns), *cells]):
        # textwrap counts characters, and a Chinese character is two cells wide.
        folded = [Text(cell).wrap(console, width) for cell, width in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            padded = (set_cell_size(str(part), width) for part, width in zip(parts, widths, strict=True))
            text = _INDENT + _INDENT.join(padded).rstrip()
            console.print(text, style=None if number else "bold", soft_wrap=True)


def show_that_on_cpu(console: Console, what: str, *, by_option: bool) -> None:
    """Show that something was done on the CPU, and the option or variable that allowed it."""
    cause = "--allow-cpu" if by_option else "ORTGPU_ALLOW_CPU"
    line(console, f"NOT on the GPU: {what} on the CPU because of {cause}", style="bold yellow")


def show_error(
    console: Console,
    error: Exception,
    also: Sequence[GPUError] = (),
    *,
    most_facts: int | None = None,
    with_others: bool = True,
) -> None:
    """Show a GPUError: the summary, the facts, the fixes, other problems, and where to read more.

    Other exceptions are ONNX Runtime's own, about the model. ``also`` holds further problems of the model.
    """
    summary = error.summary if isinstance(error, GPUError) else escape_controls(str(error).strip())
    line(console, f"{type(error).__name__}: {summary}", style="bold red")
    if not isinstance(error, GPUError):
        for other in also:
            line(console, f"  - {other.summary}")
            show_reasons(console, other)
        return
    show_reasons(console, error, most_facts=most_facts)
    if with_others and error.others:
        heading(console, "Also found:")
        for other in error.others:
            line(console, f"  - {other.code}: {other.summary}")
    line(console, f"More: ortgpu explain {error.code}", style="dim")


def show_problem(error: Exception, as_json: bool, *, model: Path | None = None, also: Sequence[GPUError] = ()) -> int:
    """Show why a command failed, or write the reason as its document. Return its exit code.

    For an error of ONNX Runtime, ``also`` holds further problems, and our own reader looks for problems of the model.
    """
    if model is not None and not isinstance(error, GPUError):
        also = (*model_check.judge_file(contents.read_model(model)), *also)
    if as_json:
        name = str(model) if model else None
        write_json(document(ok=False, model=name, error=error_document(error, also)))
    else:
        show_error(stdout(), error, also)
    return 1


def show_reasons(console: Console, error: GPUError, *, most_facts: int | None = None) -> None:
    """Show at most ``most_facts`` of the facts behind an error, and its fixes."""
    for fact in error.evidence[:most_facts]:
        line(console, f"  - {fact}")
    if most_facts is not None and len(error.evidence) > most_facts:
        line(console, f"  - ... {len(error.evidence) - most_facts} more with --verbose")
    if error.fixes:
        heading(console, "To fix it:")
    show_fixes(console, error)


def show_fixes(console: Console, error: GPUError) -> None:
    for fix in error.fixes:
        for text in fix.splitlines():
            if fix.kind == "manual":
                line(console, f"    {text}")
            else:
                command(console, f"    {text}", style="green" if fix.executable else None)


def error_document(error: Exception, also: Sequence[GPUError] = ()) -> dict[str, object]:
    """Return the error as plain data. An error of ONNX Runtime has no code, and ``also`` are its others."""
    if isinstance(error, GPUError):
        return {**error.as_dict(), "others": [other.as_dict() for other in error.others]}
    others = [other.as_dict() for other in also]
    changes = {"type": type(error).__name__, "code": None, "summary": str(error), "others": others}
    return {**GPUError("").as_dict(), **changes}


def document(*, ok: bool, **content: object) -> dict[str, object]:
    """Return the document of a command with --json. It begins with the same keys for every command."""
    return {"schema": SCHEMA, "ortgpu": __version__, "ok": ok, **content}


def write_json(document: Mapping[str, object]) -> None:
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)  # JSON has neither Infinity nor NaN.
    sys.stdout.write(json.dumps(finite, indent=2, ensure_ascii=True) + "\n")
