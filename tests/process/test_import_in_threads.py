"""Two threads import parts of ortgpu at once. Who imports a module of a package holds its lock while waiting for the
package, whose own code may wait for that module: of such a circle Python breaks one side off, with half a module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ortgpu
from tests.support.cpu_session import child

PACKAGE = Path(ortgpu.__file__).parent
SUBJECT = "diagnosis"  # the package whose own code imports its modules

PROGRAM = """
import importlib
outcomes = []
other = threading.Thread(target=lambda: outcomes.append(outcome(lambda: importlib.import_module(sys.argv[1]).__name__)))

class Pausing:
    # In the middle of the package's code, until the other thread waits for it
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "ortgpu.diagnosis.probe.attempts" and other.ident is None:
            other.start()
            other.join(1)

sys.meta_path.insert(0, Pausing)
outcomes.append(outcome(lambda: importlib.import_module("ortgpu.diagnosis").__name__))
other.join()
report(sorted(each.get("returned", str(each)) for each in outcomes))
"""


@pytest.mark.parametrize(
    "module",
    [
        "running.cuda_graph",
        "running.graph_requests",
        "distributed.checkpoint",
        "distributed.cuda_runtime",
        "distributed.training",
    ],
)
def test_both_threads_have_whole_modules(module: str) -> None:
    assert child(PROGRAM, f"ortgpu.{module}") == sorted(["ortgpu.diagnosis", f"ortgpu.{module}"])


def test_modules_of_the_diagnosis_are_imported_from_it() -> None:
    """``from .diagnosis import messages``: the package is whole before its module is asked for."""
    of_one_thread = {PACKAGE / "cli", PACKAGE / SUBJECT}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: from {'.' * node.level}{node.module}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not of_one_thread.intersection(path.parents)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and f".{SUBJECT}." in f".{node.module or ''}"
    ]
    assert wrong == []
