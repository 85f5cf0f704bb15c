"""Fixes that hold on Windows, made of those that the checks write for a POSIX shell.

Only what installs packages stays a command, in quotes that cmd.exe knows too; the rest becomes a sentence for a person,
and what is for Linux alone is left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from ...errors import DeviceError, DriverError, Fix, GPUError, manual, shell

_QUOTED = re.compile(r"'([^'\s]+)'")
_LAST_RESORT = "restart Windows, and where that does not help install the NVIDIA driver again"


def advise_for_windows(errors: Iterable[GPUError]) -> None:
    """Give errors the fixes of Windows in the place of their own."""
    for error in errors:
        fixes = tuple(dict.fromkeys(each for fix in error.fixes if (each := translated(fix)) is not None))
        of_the_driver = error.fixes and isinstance(error, (DriverError, DeviceError))
        if fixes and fixes[0].kind == "manual":  # the fix before it may be of Linux alone
            fixes = (manual(fixes[0].removeprefix("or ").removeprefix("and "), needs=fixes[0].needs), *fixes[1:])
        error.fixes = fixes or ((manual(_LAST_RESORT, needs="reboot"),) if of_the_driver else ())


def translated(fix: Fix) -> Fix | None:
    """Return the fix for Windows; None if it has no such thing."""
    if fix.linux_only:
        return None
    if fix.kind == "manual":
        return manual(_QUOTED.sub(lambda match: quoted(match[1]), fix), needs=fix.needs)
    if fix.kind != "shell":
        return fix
    steps = [_step(words) for words in fix.split(" && ")]
    if None in steps:
        return None
    if all(is_command for _, is_command in filter(None, steps)):
        return shell(" && ".join(text for text, _ in filter(None, steps)), needs=fix.needs)
    texts = [text if not is_command else f"run {text}" for text, is_command in filter(None, steps)]
    return manual(", then ".join(texts), needs=fix.needs)


def _step(command: str) -> tuple[str, bool] | None:
    """Return one command as a sentence, or again as a command."""
    words = shlex.split(command)
    first, rest = (words[0], words[1:]) if words else ("", [])
    if first == "sudo" and rest[:1] == ["chmod"]:
        first, rest = "chmod", rest[1:]
    if first in ("sudo", "nvidia-smi", "echo", "ulimit") or any(word.startswith("LD_") for word in rest):
        return None
    if first == "export":
        return "set " + " and ".join("{} to {}".format(*word.split("=", 1)) for word in rest), False
    if first == "unset":
        return f"remove {' and '.join(rest)} from the variables of this program", False
    named = " and ".join(word for word in rest if not re.match(r"-|[ua]\+rX", word))
    if first == "rm":
        return f"delete {named}", False
    if first == "chmod":
        return f"let this user read {named} (Properties, Security)", False
    return " ".join(map(quoted, words)), True


def quoted(word: str) -> str:
    """Quote one word for cmd.exe and for a POSIX shell."""
    return word if re.fullmatch(r"[\w.:\\/=~+,@-]+", word) else f'"{word}"'
