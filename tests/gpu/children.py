"""Run one of the programs of programs.py in a child, and read its reports as a test reads values."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import Child, child_environment, run_child

PROGRAMS = Path(__file__).with_name("programs.py")

# What ONNX Runtime says of the machine when it is imported, whoever imports it, and 1.31 of every GPU but the first.
ABOUT_THE_MACHINE = re.compile(r"device_discovery\.cc|cpuid_info\.cc|No registered plugin EP device found")
COMPLAINT = re.compile(r"\[(W|E|F):onnxruntime|EP Error|[Ff]alling back|Failed to (load|create)")


@dataclass(frozen=True, slots=True)
class Report:
    """What a child reported, by name. A name that never came fails the test that asks for it, with the reason."""

    child: Child

    def __getitem__(self, name: str) -> Any:
        if name not in self.child.reports:
            pytest.fail(f"no report of {name!r}: {self.child.output}", pytrace=False)
        return self.child.reports[name]

    def get(self, name: str) -> Any:
        return self.child.reports.get(name)

    def complaints(self) -> list[str]:
        """Printed lines in which ONNX Runtime complains. Python's warnings are reported apart, ours only."""
        lines = (self.child.stdout + "\n" + self.child.stderr).splitlines()
        return [line for line in lines if COMPLAINT.search(line) and not ABOUT_THE_MACHINE.search(line)]

    def error(self, name: str) -> RaisedError:
        """The exception that the action called `name` raised."""
        outcome = self[name]
        if "error" not in outcome:
            pytest.fail(f"{name!r} raised nothing; it returned {outcome.get('returned')!r}", pytrace=False)
        return RaisedError(**outcome["error"])

    def returned(self, name: str) -> Any:
        """What the action called `name` returned."""
        outcome = self[name]
        if "error" in outcome:
            error = RaisedError(**outcome["error"])
            pytest.fail(f"{name!r} raised {error.type}: {error.text}", pytrace=False)
        return outcome["returned"]


@dataclass(frozen=True, slots=True)
class RaisedError:
    """An exception of a child: names of its classes, its text, and the fields of an ortgpu error."""

    type: str
    bases: list[str]
    module: str
    text: str
    fields: Mapping[str, Any]

    def is_a(self, name: str) -> bool:
        return name in self.bases


def run_program(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    deadline: float = 90,
    before: Sequence[str] = (),
    interpreter: Sequence[str] = (),
) -> Report:
    """``before``: what starts the interpreter, such as a command that gives it other mounts."""
    given = json.dumps(dict(arguments or {}), default=str)
    command = [*before, sys.executable, *interpreter, str(PROGRAMS), name, given]
    return Report(run_child(command, env=child_environment() if env is None else env, deadline=deadline))
