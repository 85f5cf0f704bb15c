"""The house: the order of the rooms, how many there are, and what each kind of module may do.

Imports inside functions and for type checkers count as any other.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import run_python

PACKAGE = Path(__file__).resolve().parent.parent / "ortgpu"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom to the top: a room imports those before it.
ROOMS = (
    "errors", "process", "model", "environment", "provider", "diagnosis", "running", "session", "distributed",
    "integrations", "testing", "pytest_plugin", "cli", "__main__", "__init__",
)  # fmt: skip
MOST_ENTRIES = 17
MOST_FLOORS = 6

# Modules of the diagnosis that hold no checks: these ask for facts, or try something in a child process. `classifier`
# looks around once a run has failed, for what its words do not say.
WITHOUT_CHECKS = {"diagnosing", "probe.probing", "checks.classifier"}
READS = re.compile(r"(read|inspect|try|run|load|locate|find|list)(_|$)|initialise|processes_on|sessions$|current_rank")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> list[tuple[str, str]]:
    """Module and name of everything that a file imports, wherever in it; names of ortgpu are written in full."""
    return [*_imports_of(path)]


def _imports_of(path: Path) -> Iterator[tuple[str, str]]:
    here = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, each.name) for each in node.names)


def module_of(path: Path) -> str:
    """Its name below ortgpu: "diagnosis.facts"; of a package, that of the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in FILES}


def own_imports(path: Path) -> set[str]:
    """Modules of ortgpu, below it, that a file imports."""
    found = set()
    for module, name in imports_of(path):
        base, _, inner = module.partition(".")
        if base == "ortgpu":
            below = ".".join(filter(None, (inner, name)))
            found.add(below if below in MODULES else inner)
    return found & MODULES.keys()


def room_of(module: str) -> str:
    return module.partition(".")[0]


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def test_a_room_imports_those_below_it() -> None:
    upwards = {
        (module, other)
        for module, path in MODULES.items()
        for other in own_imports(path)
        if room_of(other) != room_of(module) and ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    }
    assert not upwards


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_floors(room: str) -> None:
    """Its modules that import none of the room stand on the first; no circle of them stands anywhere."""
    left = {module: own_imports(path) - {module} for module, path in MODULES.items() if room_of(module) == room}
    floors = 0
    while left:
        higher = {module: others for module, others in left.items() if others & left.keys()}
        assert len(higher) < len(left), f"a circle: {sorted(left)}"
        left, floors = higher, floors + 1
    assert floors <= MOST_FLOORS


def test_no_folder_of_sessions_imports_one_that_imports_it() -> None:
    """The folders below session/, and session/ itself for the modules that lie in it."""
    folders: dict[str, set[str]] = {}
    for path in modules("session"):
        below = folders.setdefault(path.parent.as_posix(), set())
        below |= {MODULES[each].parent.as_posix() for each in own_imports(path) if room_of(each) == "session"}
    left = {folder: others - {folder} for folder, others in folders.items()}
    while left:
        higher = {folder: others for folder, others in left.items() if others & left.keys()}
        assert len(higher) < len(left), f"a circle: {sorted(left)}"
        left = higher


def test_whoever_opens_the_package_sees_a_few_rooms() -> None:
    # A build leaves folders without modules behind where a room has moved.
    entries = [each.name for each in PACKAGE.iterdir() if each.is_file() or any(each.rglob("*.py"))]
    assert len(entries) <= MOST_ENTRIES, entries
    assert {Path(each).stem for each in entries} - {"ERRORS", "py"} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_each_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(parsed(path))


@pytest.mark.parametrize("path", modules("environment"), ids=module_of)
def test_facts_need_nothing_of_ortgpu_but_threads(path: Path) -> None:
    assert {room_of(each) for each in own_imports(path)} <= {"environment", "process", "errors"}


@pytest.mark.parametrize(
    "path",
    [each for each in modules("diagnosis") if module_of(each).partition(".")[2] not in {*WITHOUT_CHECKS, ""}],
    ids=module_of,
)
def test_checks_read_nothing(path: Path) -> None:
    sources = re.compile(r"ortgpu\.(environment|provider\.(living|runtime))\b")
    found = [name for module, name in imports_of(path) if sources.match(module) and READS.match(name)]
    assert found == []
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"\bos\.(?:environ|listdir|stat|access|getpid)\b|\bopen\(|\bPath\(", text) == []


def test_those_without_checks_do_read() -> None:
    """Or they belong among the others."""
    names = {module_of(each).partition(".")[2] or "__init__": each for each in modules("diagnosis")}
    reading = {name for name, path in names.items() if any(READS.match(each) for _, each in imports_of(path))}
    assert reading >= WITHOUT_CHECKS


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_the_command_line_knows_a_terminal(path: Path) -> None:
    if (PACKAGE / "cli") not in path.parents:
        known = {module.partition(".")[0] for module, _ in imports_of(path)}
        assert not known & {"click", "rich"}


def test_every_module_can_be_imported() -> None:
    """Without Ray, and without the folder that Python reads at its start."""
    left_out = ("__init__", "integrations.ray.", "session.guard.startup")
    names = [f"ortgpu.{module}" for module in MODULES if not module.startswith(left_out)]
    run_python("import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)", *names).ok()


def test_no_test_imports_a_benchmark() -> None:
    """Benchmarks import `tests/support`; their own tests start them as programs, or a program that imports them."""
    tests = PACKAGE.parent / "tests"
    files = {*tests.rglob("*.py")} - {tests / "programs/benchmarks.py"}
    assert [path for path in files for module, _ in imports_of(path) if module.partition(".")[0] == "benchmarks"] == []
