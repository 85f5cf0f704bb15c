"""Modules that are imported at their first use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ortgpu.process.late import REASONS
from tests.support.children import run_python

PACKAGE = Path(__file__).resolve().parents[2] / "ortgpu"
SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "late.py"}
MOST_INSIDE = 60  # A file whose import is late for a reason names it in the table of `late`.


def test_each_module_of_the_table_is_imported_late_somewhere() -> None:
    used = {name for text in SOURCES.values() for name in re.findall(r'\blate\("([\w.]+)"\)', text)}
    assert {name.removeprefix("ortgpu") for name in used} == set(REASONS)


def test_type_checkers_see_the_import_of_each_late_module() -> None:
    """They read the first branch, and mypy would take a wrong name in the second for anything."""
    for path, text in SOURCES.items():
        checked = "\n".join(re.findall(r"^if TYPE_CHECKING:\n(.*?)^else:", text, re.MULTILINE | re.DOTALL))
        for alias, name in re.findall(r'^ +(\w+) = late\("([\w.]+)"\)', text, re.MULTILINE):
            assert re.search(rf"\bimport .*\b{alias}\b", checked), f"{alias} in {path}"
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", checked), f"{name} in {path}"


def test_few_imports_are_inside_functions() -> None:
    inside = {
        (path, each.lineno)
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for each in ast.walk(node)
        if isinstance(each, (ast.Import, ast.ImportFrom))
    }
    assert len(inside) <= MOST_INSIDE


def test_a_module_is_imported_when_it_is_used() -> None:
    run_python("process.late.a_module_is_imported_when_it_is_used").ok()


def test_a_module_that_is_absent_raises_when_it_is_used() -> None:
    child = run_python("process.late.a_module_that_is_absent_raises_when_it_is_used")
    assert child.ok().stdout.strip() == "raised"
