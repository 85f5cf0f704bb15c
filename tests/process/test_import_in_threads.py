"""Two threads import parts of ortgpu at once. Who imports a module of a package holds its lock while waiting for the
package, whose own code may wait for that module: of such a circle Python breaks one side off, with half a module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ortgpu
from tests.support.cpu_session import fresh_child as child

pytestmark = pytest.mark.lab

PACKAGE = Path(ortgpu.__file__).parent

PROGRAM = "process.import_in_threads.program"


@pytest.mark.parametrize(
    "module",
    [
        "running.cuda_graph",
        "running.graph_requests",
        "distributed.checkpoint",
        "distributed.worker",
        "distributed.diagnosis.packages",
    ],
)
def test_both_threads_have_whole_modules(module: str) -> None:
    assert child(PROGRAM, f"ortgpu.{module}") == sorted(["ortgpu.diagnosis.diagnosing", f"ortgpu.{module}"])


def test_a_guard_that_ends_takes_no_module_from_another_thread(tmp_path: Path) -> None:
    """Python goes through the finders by number: one that is taken out meanwhile would hide the next."""
    (tmp_path / "wanted.py").write_text("", encoding="utf-8")
    found = child(
        "process.import_in_threads.a_guard_that_ends_takes_no_module_from_another_thread",
        str(tmp_path),
    )
    assert found == [{"returned": "wanted"}]


def test_packages_import_none_of_their_modules() -> None:
    """The command line works in one thread."""
    inside = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("__init__.py"))
        if PACKAGE / "cli" not in path.parents and path.parent != PACKAGE
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.level == 1
    ]
    assert inside == []
