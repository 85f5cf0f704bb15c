"""The layers: facts judge nothing, checks read nothing, and the command line alone knows how to show something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ortgpu"

# Modules of the diagnosis that hold no checks: these ask for facts, or try something in a child process. `failure` asks
# once a session could not be opened; `execution` looks around once a run has failed, for what its words do not say.
WITHOUT_CHECKS = {"__init__", "elsewhere", "execution", "failure", "probe", "probe_child", "training_attempts"}
READS = re.compile(r"(read|inspect|try|run|load|locate|find|list)(_|$)|initialise|processes_on|sessions$|current_rank")


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file imports, wherever in it; names of ortgpu are written in full."""
    here = ["ortgpu", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, each.name) for each in node.names)


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("*.py"))


def name_of(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", modules("environment"), ids=name_of)
def test_facts_need_nothing_of_ortgpu_but_threads(path: Path) -> None:
    own = {module for module, _ in imports_of(path) if module.startswith("ortgpu")}
    assert {one for one in own if not one.startswith("ortgpu.environment")} <= {"ortgpu.background"}


@pytest.mark.parametrize(
    "path", [each for each in modules("diagnosis") if each.stem not in WITHOUT_CHECKS], ids=name_of
)
def test_checks_read_nothing(path: Path) -> None:
    sources = re.compile(r"ortgpu\.(environment|registry|runtime|distributed\.ranks)\b")
    found = [name for module, name in imports_of(path) if sources.match(module) and READS.match(name)]
    assert found == []
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"\bos\.(?:environ|listdir|stat|access|getpid)\b|\bopen\(|\bPath\(", text) == []


def test_those_without_checks_do_read() -> None:
    """Or they belong among the others."""
    reading = {each.stem for each in modules("diagnosis") if any(READS.match(name) for _, name in imports_of(each))}
    assert reading >= WITHOUT_CHECKS


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_knows_a_terminal(path: Path) -> None:
    if (PACKAGE / "cli") not in path.parents:
        known = {module.partition(".")[0] for module, _ in imports_of(path)}
        assert not known & {"click", "rich"}
