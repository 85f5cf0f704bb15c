"""``ortgpu explain``: show a section of ERRORS.md, the page that has one section for each error."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
from typing import TYPE_CHECKING

import click

from ortgpu.cli import output
from ortgpu.cli.pasted import recognise
from ortgpu.errors import catalogue

if TYPE_CHECKING:
    from rich.console import Console

_INDEX = re.compile(r"^ *- \[`([\w-]+)`\]\(#[\w-]+\): (.+)$", re.MULTILINE)
_SECTION = re.compile(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((\S+?)\)(?:, )?")


@functools.cache
def page() -> str:
    return importlib.resources.files("ortgpu").joinpath("ERRORS.md").read_text(encoding="utf-8")


@functools.cache
def sections() -> dict[str, tuple[str, str]]:
    """Return the title from the index, and the text in the form described on the page, of each error by code."""
    titles = dict(_INDEX.findall(page()))
    return {code: (titles[code], text.strip("\n")) for code, text in _SECTION.findall(page())}


@click.command()
@click.argument("words", metavar="[CODE | TEXT | -]", nargs=-1)
@click.option("--markdown", is_flag=True, help="Write the reference page instead: all errors, or the one of CODE.")
def explain(words: tuple[str, ...], markdown: bool) -> int:
    """Explain an error: meaning, causes, how to confirm, how to fix.

    CODE is in the last line of an error's message (driver-not-found). The name of the class works too
    (DriverNotFoundError). Without CODE, all errors are listed.

    TEXT is a message of ONNX Runtime, the loader or a traceback, in quotes; - reads it from the standard input. It may
    come from another machine: `ortgpu doctor` looks at this one.
    """
    text = click.open_file("-", encoding="utf-8", errors="replace").read() if words == ("-",) else " ".join(words)
    code = _find(text) if words else None
    if markdown:
        click.echo(page() if code is None else f"## {code}\n\n{sections()[code][1]}\n", nl=False)
    elif code is not None:
        _show(output.stdout(), code, *sections()[code])
    else:
        _list(output.stdout())
    return 0


def _find(text: str) -> str:
    """Return the code for a code or class name in any case, or for a text. Raises UsageError if there is none."""
    names = {cls.__name__.lower(): error_code for error_code, cls in catalogue().items()}
    query = text.strip(" :.,`\n").lower().replace("_", "-")  # The name may be copied from a text.
    if (code := names.get(query, query)) in sections():
        return code
    if match := recognise(text):
        output.line(output.stderr(), f"In the text: {match[1]}", style="dim")
        return match[0]
    if len(query.split()) > 1:
        hint = "`ortgpu explain` lists all, and `ortgpu doctor` looks at this machine."
        raise click.UsageError(f"no check knows a line of this text; {hint}")
    close = difflib.get_close_matches(query, [*sections(), *names], n=1, cutoff=0.5)
    hint = f"did you mean {names.get(close[0], close[0])}?" if close else "`ortgpu explain` lists all."
    raise click.UsageError(f"there is no error {text!r}; {hint}")


def _list(console: Console) -> None:
    column, classes = max(len(code) for code in sections()) + 2, catalogue()
    for code, (title, _) in sections().items():
        bold = "bold" if classes[code].__subclasses__() else None
        output.line(console, code.ljust(column) + title, style=bold, column=column)


def _show(console: Console, code: str, title: str, text: str) -> None:
    """Show a section without Markdown, except for the backticks in its prose."""
    output.heading(console, f"{code}: {title}")
    class_line, *rest = (line for line in text.split("\n") if line)
    output.line(console, class_line.strip("`"), style="dim")
    is_command = False
    for line in rest:
        if line.strip() == "```":
            is_command = not is_command
        elif is_command:
            output.command(console, f"      {line.strip()}", style="green")
        elif line.startswith("**"):
            output.line(console)
            output.heading(console, line.strip("*"))
        elif line.startswith("*"):
            output.line(console, line.strip("*"), style="yellow")
        elif line.startswith("Sources: "):
            output.line(console)
            output.heading(console, "Sources")
            names = line.removeprefix("Sources: ")
            for source in filter(None, (*_LINK.findall(names), _LINK.sub("", names).strip(", "))):
                output.line(console, f"  {source}", style="dim")
        elif line.startswith("- "):
            output.line(console, f"  {line}")
        else:
            output.line(console)
            output.line(console, line)
