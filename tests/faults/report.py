"""The table: played, printed, and recorded in this folder's README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import GROUPS, Case
from tests.faults.advice import advisor, executable_fixes, follow_advice
from tests.faults.case import AnyCase, outcome_words
from tests.faults.rows import ROWS, Kind
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than

README, OF_WINDOWS = (Path(__file__).with_name(name) for name in ("README.md", "WINDOWS.md"))
BEGIN, END = "<!-- begin: python -m tests.faults --markdown -->", "<!-- end -->"
WAYS = ("silent", "logged", "printed", "warned", "raised", "aborted")
KINDS: dict[Kind, str] = {
    "elsewhere": "tested elsewhere",
    "gpu": "tested on a GPU",
    "not here": "not to be had here",
}


@dataclass
class Played:
    """What came of one case. ``advice`` None: it was not executed, for want of time or of an executable fix."""

    case: AnyCase
    error: str
    wrong: list[str]
    plain: str
    fixes: int = 0
    advice: bool | None = None
    needs: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.wrong

    @property
    def loudest(self) -> str:
        return self.plain.split()[0]


def play(case: Case, lab: Lab, *, advice: bool = True) -> Played:
    """Open the case's machine with ortgpu and with plain ONNX Runtime, and follow the advice."""
    machine = case.machine(lab)
    outcome = case.open(lab, machine)
    plain = outcome_words(case.open_plain(lab, machine))
    error = outcome.error
    if error is None:
        return Played(case, "none", [f"a session on {outcome.providers}\n{outcome.result.output}"], plain)
    wrong = [f"{error.type} instead of {case.error}"] if error.type != case.error else []
    wrong += [f"{word!r} is not named" for word in case.says if word not in error.text]
    wrong += [f"{word!r} is blamed" for word in case.silent_about if word in error.text]
    wrong += [f"{name} is not found" for name in case.others if name not in error.other_types]
    if plain != case.plain and older_than(case.plain_since) is None:
        wrong.append(f"plain ONNX Runtime: {plain} instead of {case.plain}")
    played = Played(case, error.type, wrong, plain)
    if wrong:
        return played
    needs = [fix for fix in advisor(case, error).remedies if not fix["executable"]]
    played.needs = [fix["needs"] or "a person" for fix in needs]
    played.fixes = len(executable_fixes(case, error))
    if advice and played.fixes:
        problems = [problem for *_, problem in follow_advice(case, lab) if problem]
        wrong += problems
        played.advice = not problems
    return played


def groups_table(played: Sequence[Played]) -> list[list[str]]:
    """One line a group: cases, right errors, fixes executed and true, what the others need, plain ONNX Runtime."""
    rows = [["", "cases", "right error", "fix executed and true", "no fix to execute: it takes", "plain ONNX Runtime"]]
    for letter, title in (*_groups_of(played).items(), ("", "all")):
        some = [one for one in played if not letter or one.case.group == letter]
        executed = [one for one in some if one.advice is not None]
        waiting = [one for one in some if one.fixes and one.advice is None]
        true = f"{sum(bool(one.advice) for one in executed)}/{len(executed)}"
        rows.append(
            [
                f"{letter} {title}".strip(),
                str(len(some)),
                f"{sum(one.right or one.advice is False for one in some)}/{len(some)}",
                true + (f" ({len(waiting)} not executed)" if waiting else ""),
                _counts(need for one in some if not one.fixes for need in _least(one.needs)),
                _counts((one.loudest for one in some), WAYS),
            ]
        )
    return rows


def _least(needs: Sequence[str]) -> list[str]:
    """What the first fix takes: one entry a case, so that the column adds up with the executed ones."""
    return list(needs[:1]) or ["nothing is advised"]


def _counts(words: Iterable[str], order: Sequence[str] = ()) -> str:
    found = list(words)
    names = [word for word in order if word in found] or sorted(set(found))
    return ", ".join(f"{found.count(name)} {name}" for name in names)


def _groups_of(played: Sequence[Played]) -> dict[str, str]:
    return {letter: title for letter, title in GROUPS.items() if any(one.case.group == letter for one in played)}


def cases_table(played: Sequence[Played]) -> list[list[str]]:
    rows = [["case", "rows", "error", "plain ONNX Runtime", "fix"]]
    for one in played:
        fix = "; ".join(one.needs) or "nothing is advised"
        if one.fixes:
            fix = {True: "executed, true", False: "executed, WRONG", None: "not executed"}[one.advice]
        right = one.error if one.right or one.advice is False else f"{one.error}, WRONG"
        rows.append([one.case.name, " ".join(one.case.rows), right, one.plain, fix])
    return rows


def rows_table() -> list[list[str]]:
    return [["row", "", "where, or why not"], *([row.id, KINDS[row.kind], row.where] for row in ROWS)]


def as_text(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def recorded(text: str) -> dict[str, list[str]]:
    """The lines of the case tables in a README, by the name of the case: the tables of five columns."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells if len(row) == 5 and row[0] != "case" and row[0].strip("-")}


def write(played: Sequence[Played], about: str, page: Path = README) -> None:
    """Put the tables between the two marks of a page."""
    groups = [
        f"### {letter}: {title}\n\n" + as_markdown(cases_table([one for one in played if one.case.group == letter]))
        for letter, title in _groups_of(played).items()
    ]
    others = ["### The other rows of the corpus\n\n" + as_markdown(rows_table())] if page == README else []
    generated = "\n\n".join([about, as_markdown(groups_table(played)), *groups, *others])
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{generated}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


__all__ = ["Played", "as_markdown", "as_text", "cases_table", "groups_table", "play", "recorded", "write"]
