"""How the command line writes: for people on a terminal, and as plain lines when something else reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ortgpu.errors import GPUError

_UNLIMITED = 10_000  # columns where no terminal sets a limit: lines are then as long as what they say
_USUAL = 80  # columns of a terminal that does not say how wide it is
SCHEMA = 1  # of JSON documents: raised when a key goes, or changes its meaning; new keys do not raise it
_INDENT = "  "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 without tab and line feed, C1


class FileToWrite(click.Path):
    """A path that is refused before the work that it is for, where it could not be written after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        existed = os.path.exists(path)  # Path.exists raises where a folder may not be searched
        try:
            path.open("ab").close()
            if not existed:
                os.unlink(os.path.realpath(path))  # not the link that may lead there
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be written: {error.strerror}", param, ctx)
        return path


def prepare_streams() -> None:
    """A name that the encoding of stdout cannot hold is shown escaped instead of ending the program.

    A stream that whoever started us has closed is one that swallows: Python has None for it.
    """
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
    # said outright, because rich would take colours from FORCE_COLOR and a width from COLUMNS or its own guess of 80
    terminal = stream.isatty()
    # mpirun gives its ranks terminals of no size, and before 3.11 Python says so
    width = (shutil.get_terminal_size().columns or _USUAL) if terminal else _UNLIMITED
    return Console(file=stream, force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Say on a terminal that something takes its time; say nothing where nobody looks."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(text, spinner="line"):  # of ASCII: the terminal may know nothing else
        yield


@contextlib.contextmanager
def progress_bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, and nothing elsewhere. Yields what is to be called at each step of ``total``."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, completed=total)  # what was left out will not come


def line(console: Console, text: str = "", style: str | None = None) -> None:
    """Text as it is. The terminal folds a long line, so that a command copied from it is still one line."""
    console.print(_harmless(text), style=style, soft_wrap=True)


def _harmless(text: str) -> str:
    """Names out of a model may hold what a terminal takes for commands: those characters are shown escaped."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def heading(console: Console, text: str) -> None:
    line(console, text, style="bold")


def facts(console: Console, values: Mapping[str, object]) -> None:
    """Names and values, a pair a line, values aligned."""
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        line(console, f"{_INDENT}{name:<{width}}  {value}".rstrip())


def table(console: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Columns as wide as their content and no frame: the same in a terminal, a log and a bug report."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*(_harmless(str(cell)) for cell in row))
    with console.capture() as capture:
        console.print(result, width=console.width - len(_INDENT))
    for text in capture.get().splitlines():
        console.print(f"{_INDENT}{text.rstrip()}", soft_wrap=True)


def show_why_on_cpu(console: Console, error: Exception, what: str, *, by_option: bool) -> None:
    """What keeps a model off the GPU, and who allowed the CPU; ``what`` was done there all the same."""
    show_error(console, error)
    who = "--allow-cpu was given" if by_option else "ORTGPU_ALLOW_CPU is set"
    line(console, f"{what} on the CPU all the same, because {who}.", style="bold yellow")


def show_error(console: Console, error: Exception, also: Sequence[GPUError] = ()) -> None:
    """A GPUError in the order of every message: what failed, the facts, the fixes, what else was found, where more is.

    Other exceptions are ONNX Runtime's own, about the model: what they say, and what is ``also`` known of it, is all
    there is.
    """
    line(console, f"{type(error).__name__}: {getattr(error, 'summary', error)}", style="bold red")
    if not isinstance(error, GPUError):
        for other in also:
            line(console, f"  - {other.summary}")
            show_reasons(console, other)
        return
    show_reasons(console, error)
    if error.others:
        heading(console, "Also found:")
    for other in error.others:
        line(console, f"  - {other.code}: {other.summary}")
    line(console, f"More: ortgpu explain {error.code}", style="dim")


def show_reasons(console: Console, error: GPUError, *, most_facts: int | None = None) -> None:
    """The facts behind an error, ``most_facts`` of them at the most, and its fixes."""
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
            line(console, f"    {text}", style="green" if fix.executable else None)


def error_document(error: Exception, also: Sequence[GPUError] = ()) -> dict[str, object]:
    """The error as plain data, with everything else that the same diagnosis found. One of ONNX Runtime's own has the
    same keys, and no code; ``also``: what is known of its model."""
    if isinstance(error, GPUError):
        return {**error.as_dict(), "others": [other.as_dict() for other in error.others]}
    others = [other.as_dict() for other in also]
    return {**GPUError(str(error)).as_dict(), "type": type(error).__name__, "code": None, "others": others}


def document(*, ok: bool, **content: object) -> dict[str, object]:
    """What a command writes with --json: these keys first, in every one of them."""
    from ortgpu import __version__

    return {"schema": SCHEMA, "ortgpu": __version__, "ok": ok, **content}


def write_json(document: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")
