"""``ortgpu explain``: what an error means, how it comes about, how to tell, how to mend it."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from ortgpu.cli import output
from ortgpu.errors import GPUError, catalogue
from ortgpu.explanations import BY_CODE, EXPLANATIONS, Explanation

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 96  # of a line of prose; a terminal may be narrower
_COMMAND = "$ "
_NOT_RAISED = "Not raised itself: a class to catch the ones below it by."


@click.command()
@click.argument("code", required=False)
@click.option("--markdown", is_flag=True, help="Write the reference page instead: all errors, or the one of CODE.")
def explain(code: str | None, markdown: bool) -> int:
    """Say what an error means, how it comes about, how to tell, and how to mend it.

    CODE is the last line of an error's message (driver-not-found); the name of its class will do as well
    (DriverNotFoundError). Without it, all errors are listed.
    """
    chosen = _find(code) if code is not None else None
    console = output.stdout()
    if markdown:
        pages = _section(chosen) if chosen is not None else reference_page()
        click.echo("\n".join(pages))
    elif chosen is not None:
        _show(console, chosen)
    else:
        _list(console)
    return 0


def _find(code: str) -> Explanation:
    """By code or by class name, in any spelling of upper and lower case."""
    names = {cls.__name__.lower(): known for known, cls in catalogue().items()}
    wanted = code.strip(" :.,`").lower().replace("_", "-")  # as it is copied out of a text
    found = BY_CODE.get(names.get(wanted, wanted))
    if found is not None:
        return found
    close = difflib.get_close_matches(wanted, [*BY_CODE, *names], n=1, cutoff=0.5)
    hint = f"did you mean {names.get(close[0], close[0])}?" if close else "`ortgpu explain` lists all."
    raise click.UsageError(f"there is no error {code!r}; {hint}")


def _list(console: Console) -> None:
    width, classes = max(len(code) for code in BY_CODE), catalogue()
    for explanation in EXPLANATIONS:
        bold = "bold" if classes[explanation.code].__subclasses__() else None
        output.line(console, f"{explanation.code:<{width}}  {explanation.title}", style=bold)


def _tree() -> Iterator[tuple[int, Explanation]]:
    """All explanations with how far below GPUError their class is, parents before children."""
    classes = catalogue()
    for explanation in EXPLANATIONS:
        bases = [cls for cls in classes[explanation.code].__mro__ if issubclass(cls, GPUError)]
        yield len(bases) - 1, explanation


def _parts(explanation: Explanation) -> Iterator[tuple[str, Iterable[str]]]:
    if explanation.comes_about:
        yield "How it comes about", explanation.comes_about
    yield "How to tell", explanation.tell
    yield "How to mend it", explanation.mend


def _class_line(code: str) -> str:
    """The class, what else it is, and the fields that it adds."""
    cls = catalogue()[code]
    fields = [name for name in cls.fields if name not in getattr(cls.__base__, "fields", ())] or list(cls.fields)
    text = f"{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
    return text + (f"; fields: {', '.join(fields)}" if fields else "")


# For a terminal, or a pipe


def _show(console: Console, explanation: Explanation) -> None:
    output.heading(console, f"{explanation.code}: {explanation.title}")
    output.line(console, _class_line(explanation.code), style="dim")
    if not explanation.is_raised:
        output.line(console, _NOT_RAISED, style="yellow")
    output.line(console)
    _write(console, explanation.means, "", "")
    for title, entries in _parts(explanation):
        output.line(console)
        output.heading(console, title)
        for entry in entries:
            if entry.startswith(_COMMAND):
                output.line(console, "      " + entry.removeprefix(_COMMAND), style="green")
            else:
                _write(console, entry, "  - ", "    ")
    if explanation.sources:
        output.line(console)
        output.heading(console, "Sources")
        for source in explanation.sources:
            output.line(console, f"  {_address(source) or source}", style="dim")


def _write(console: Console, text: str, first: str, rest: str) -> None:
    """Prose, folded between words on a terminal; one line where something else reads."""
    if not console.is_terminal:
        output.line(console, first + text)
        return
    folded = textwrap.wrap(
        text,
        min(console.width, _WIDTH),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for each in folded:
        output.line(console, each)


# The reference page


def reference_page() -> Iterator[str]:
    """The lines of the whole page, which lies beside this package as ERRORS.md."""
    yield "<!-- Written by `ortgpu explain --markdown`. Change ortgpu/explanations.py instead, and write it again. -->"
    yield ""
    yield "# The errors of ortgpu"
    yield ""
    yield (
        "Every error has a stable code. `ortgpu explain CODE` shows the same text as this page, and the last line of "
        "an error's message names its code. All derive from `GPUError`, a RuntimeError, and have `code`, `summary`, "
        "`evidence`, `fixes`, `others`, `severity` and `consequence_of`; fields of their own are named with each. "
        "Numbers behind a repository's name are its threads."
    )
    yield ""
    for depth, explanation in _tree():
        yield f"{'  ' * depth}- [`{explanation.code}`](#{explanation.code}): {explanation.title}"
    for explanation in EXPLANATIONS:
        yield ""
        yield from _section(explanation)


def _section(explanation: Explanation) -> Iterator[str]:
    yield f"## {explanation.code}"
    yield ""
    yield f"`{_class_line(explanation.code)}`"
    yield ""
    if not explanation.is_raised:
        yield f"*{_NOT_RAISED}*"
        yield ""
    yield explanation.means
    for title, entries in _parts(explanation):
        yield ""
        yield f"**{title}**"
        yield ""
        for entry in entries:
            if entry.startswith(_COMMAND):
                yield from ("  ```", f"  {entry.removeprefix(_COMMAND)}", "  ```")
            else:
                yield f"- {entry}"
    if explanation.sources:
        yield ""
        links = (f"[{source}]({url})" if (url := _address(source)) else source for source in explanation.sources)
        yield f"Sources: {', '.join(links)}"


def _address(source: str) -> str | None:
    """Where a thread or a page that is named without its scheme is."""
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", source):
        return f"https://github.com/{match[1]}/issues/{match[2]}"
    return f"https://{source}" if re.fullmatch(r"[\w-]+(\.[\w-]+)+/\S+\.html|pypi\.org/\S+", source) else None
