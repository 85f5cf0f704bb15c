"""Advice that was printed, executed: in an environment of its own that pip may change as it likes.

An overlay is made of links to the environment that runs the tests. Files are safe: pip never writes into one, but
removes it and puts another in its place. A folder that is a link is not: what pip removes in it is removed in the
original. So no folder may be a link here, and packages that no session needs are left out, since there are many files
in them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.faults.case import MENDED, OPENS, AnyCase, Case
from tests.lab import Machine, Outcome, Overlay, Problem
from tests.lab.fixtures import Lab

#: What a session, and pip, are made of, by the beginning of a name in site-packages.
KEPT = (
    *("onnxruntime", "nvidia", "numpy", "onnx", "google", "protobuf", "flatbuffers", "packaging", "ml_dtypes"),
    *("typing_extensions", "pynvml", "pip"),
    *("ortgpu-", "click", "rich", "pygments", "markdown_it", "mdurl", "platformdirs"),  # what `ortgpu fix` is made of
)
#: Not pip's to change: it is linked as it is.
LIBRARY_UNDER_TEST = "ortgpu"


def stand_alone(overlay: Overlay) -> None:
    """Make an overlay into an environment that shares no folder with the one it was made of."""
    for entry in list(overlay.site.iterdir()):
        if entry.name == LIBRARY_UNDER_TEST:
            continue
        if entry.name.lower().startswith(KEPT):
            own(overlay, entry)
        elif entry.is_symlink() or entry.is_file():
            entry.unlink()


def own(overlay: Overlay, entry: Path) -> None:
    """Make a folder of an overlay, and all folders in it, real ones, so that pip may remove what is in them."""
    if entry.is_symlink() and entry.is_dir():
        overlay.take_apart(entry.relative_to(overlay.site).as_posix(), whole=True)
    elif entry.is_dir():
        for inner in list(entry.iterdir()):
            own(overlay, inner)


def shared_folders(overlay: Overlay) -> list[str]:
    """Folders of an overlay that are links: none, beside the library under test, once it stands alone."""
    return [
        os.path.join(folder, name)
        for folder, names, _ in os.walk(overlay.site)
        for name in names
        if os.path.islink(os.path.join(folder, name)) and name != LIBRARY_UNDER_TEST
    ]


def advisor(case: AnyCase, error: Problem) -> Problem:
    """The finding whose fixes a case has executed."""
    wanted = case.advice_of or case.error
    return next(found for found in (error, *error.others) if found.type == wanted)


def executable_fixes(case: AnyCase, error: Problem) -> list[Mapping[str, Any]]:
    return [fix for fix in advisor(case, error).remedies if fix["executable"]]


def machine_to_mend(case: Case, lab: Lab) -> Machine:
    machine = case.machine(lab)
    stand_alone(machine.overlay)
    return machine


def follow_advice(case: Case, lab: Lab) -> Iterator[tuple[str, Outcome, str | None]]:
    """Each executable fix of a case, as it was printed, what is found after it, and why that is not mended.

    Each begins with a new machine.
    """
    number = 0
    while True:
        machine = machine_to_mend(case, lab)
        broken = case.open(lab, machine)
        assert broken.error is not None, broken.result.output
        fixes = executable_fixes(case, broken.error)
        if number >= len(fixes):
            return
        text, applied = str(fixes[number]["text"]), fixes[number]
        by_ortgpu_fix = number == 0 and goes_through_fix(case, fixes[0])
        if by_ortgpu_fix:
            applied = {"kind": "shell", "text": with_ortgpu_fix(case, lab, machine, text)}
        outcome = case.open_after(lab, machine, applied)
        yield text, outcome, why_not_mended(case, outcome, by_ortgpu_fix=by_ortgpu_fix)
        number += 1
        if number >= len(fixes):
            return


def goes_through_fix(case: Case, fix: Mapping[str, Any]) -> bool:
    """Whether `ortgpu fix` meets the fault of a case: what a program itself does first, or asks for, it cannot see.

    An error that is not the first one, or a warning, may be gone before its turn comes. The doctor's child starts ONNX
    Runtime's telemetry in a folder of its own, so that it does not meet the fault of 1.29.0.
    """
    of_program = bool(case.prelude or case.arguments or case.advice_of)
    is_met = case.ask in ("session", "probe") and case.name != "neither-shell-nor-identity"
    return fix["kind"] == "shell" and not of_program and is_met


#: Fails unless the command ran with success, and prints the commands that `ortgpu fix` leaves to the user's shell.
CHECK = """
import json, sys
document = json.load(sys.stdin)
ran = [each["command"] for each in document["commands"] if each["exit_status"] == 0]
if sys.argv[1] not in ran:
    sys.exit(f"not run with success: {json.dumps(document)}")
print("\\n".join(document["your_shell"]))
"""


def with_ortgpu_fix(case: Case, lab: Lab, machine: Machine, text: str) -> str:
    """The commands of a user who runs `ortgpu fix`, and then what that leaves to the user's own shell.

    Their exit status is not 0 unless `ortgpu fix` ran the fix ``text`` with success.
    """
    python = shlex.quote(str(machine.overlay.python))
    model = f" --model {shlex.quote(str(getattr(lab.models, case.model)))}" if case.ask == "session" else ""
    fix = f"{python} -m ortgpu fix --yes --json{model}"
    return f'lines=$({fix} | {python} -c {shlex.quote(CHECK)} {shlex.quote(text)}) && eval "$lines"'


def why_not_mended(case: Case, outcome: Outcome, *, by_ortgpu_fix: bool = False) -> str | None:
    """What is wrong with an environment after a fix, or None when the fault is gone.

    `ortgpu fix` goes on with the error that the fix leaves, and may mend that too.
    """
    output = outcome.result.output[-6000:]
    if outcome.result.reports.get("first_status") not in (0, None):
        return f"the command ended with {outcome.result.reports.get('first_status')}\n{output}"
    error = outcome.error
    if error is None:
        return None if outcome.providers and "CUDAExecutionProvider" in outcome.providers else output
    if case.after == OPENS:
        return f"{error.type} is found:\n{error.text}"
    found = {error.type, *error.other_types}
    fault = case.advice_of or case.error
    if fault in found and fault != case.after:
        return f"{fault} is still found:\n{error.text}"
    if error.type != case.after and not (by_ortgpu_fix and error.type == MENDED):
        return f"{error.type} is found instead of {case.after}:\n{error.text}\n{output}"
    return None
