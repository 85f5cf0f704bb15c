"""Two threads import parts of ortgpu at once. Who imports a module of a package holds its lock while waiting for the
package, whose own code may wait for that module: of such a circle Python breaks one side off, with half a module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ortgpu
from tests.support.cpu_session import child

pytestmark = pytest.mark.lab

PACKAGE = Path(ortgpu.__file__).parent

PROGRAM = """
import importlib
outcomes = []
other = threading.Thread(target=lambda: outcomes.append(outcome(lambda: importlib.import_module(sys.argv[1]).__name__)))

class Pausing:
    # In the middle of the package's code, until the other thread waits for it
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "ortgpu.diagnosis.facts" and other.ident is None:
            other.start()
            other.join(1)

sys.meta_path.insert(0, Pausing)
outcomes.append(outcome(lambda: importlib.import_module("ortgpu.diagnosis.diagnosing").__name__))
other.join()
report(sorted(each.get("returned", str(each)) for each in outcomes))
"""


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
        """
        import importlib
        sys.path.insert(0, sys.argv[1])
        reached, goes_on = threading.Event(), threading.Event()

        class Pausing:
            @staticmethod
            def find_spec(name, path, target=None):
                if name == "wanted":
                    reached.set()
                    goes_on.wait(30)

        ortgpu.install()
        sys.meta_path.insert(-1, Pausing)  # before the finder of files
        outcomes = []
        wanted = lambda: importlib.import_module("wanted").__name__
        other = threading.Thread(target=lambda: outcomes.append(outcome(wanted)))
        other.start()
        reached.wait(30)
        ortgpu.uninstall()
        goes_on.set()
        other.join()
        report(outcomes)
        """,
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
