"""The rule of ortgpu.process.background on locks: a signal handler or a finalizer may use the library at any moment."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import ortgpu
from tests.programs.woken import WAYS
from tests.support.children import child_environment, run_child
from tests.support.fork_server import fork_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks for SIGALRM and isolate=True")


@pytest.mark.parametrize("kind", ["threads", "isolate"])
@pytest.mark.parametrize("seconds", ["4", pytest.param("60", marks=[pytest.mark.slow, pytest.mark.timeout(200)])])
def test_handlers_and_finalizers_may_use_a_service(kind: str, seconds: str) -> None:
    command = [sys.executable, "-m", "tests.programs.handlers", seconds, kind, "1"]
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = run_child(command, env=env, deadline=float(seconds) + 90).ok().reports
    counts = found["counts"]
    assert counts["wrong"] == 0
    assert min(counts[name] for name in ("SIGALRM", "SIGTERM", "finalized")) >= 10
    assert counts.get("ended", 0) >= (float(seconds) > 10)
    assert found["left"] == []


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_finalizer_in_a_thread_of_the_service_may_wait_for_it(way: str) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = fork_python(["-m", "tests.programs.woken", way], env=env, deadline=60).ok().reports
    assert found["asked"] == 5
    assert found["found"] == [3]


PACKAGE = Path(ortgpu.__file__).parent
OTHERS = {"Lock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Timer"}
# Locks that say that something has happened
WAITED_FOR = {"process/background.py", "process/threads.py"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_each_lock_is_reentrant_and_taken_with_the_mark_of_its_thread(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    locks = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and path.relative_to(PACKAGE).as_posix() not in WAITED_FOR:
            assert ast.unparse(node) not in {f"threading.{name}" for name in OTHERS}, f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "functools.cached_property" or path.name == "background.py"
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "queue", "_thread"):
            assert {each.name for each in node.names} <= {"SimpleQueue", "Empty", "get_ident"}, "steps of C"
        if isinstance(node, ast.Assign) and re.search(r"\b(RLock|fork_safe_lock)\(", ast.unparse(node.value)):
            locks |= {ast.unparse(each).rpartition(".")[2] for each in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            taken = [ast.unparse(item.context_expr) for item in node.items]
            if any(each.rpartition(".")[2] in locks for each in taken):
                assert taken[0] == "this_thread.holds", f"line {node.lineno}"
