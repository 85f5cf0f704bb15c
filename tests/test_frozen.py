"""Programs that are frozen, by PyInstaller for instance: what looks for imports in the code finds every module."""

from __future__ import annotations

from modulefinder import ModuleFinder
from pathlib import Path

import ortgpu
from ortgpu.cli import COMMANDS
from tests.lab.child import outcome_of
from tests.lab.fixtures import Lab

PACKAGE = Path(ortgpu.__file__).parent
OTHERS = ["click", "rich", "numpy", "onnx", "onnxruntime", "pynvml", "torch", "ray", "matplotlib", "mpi4py", "nccl"]


def imports_of(module: str) -> set[str]:
    """Every module that the package's own modules import, from one of them on, without running any."""
    finder = ModuleFinder([str(PACKAGE.parent)], excludes=OTHERS)
    finder.import_hook(module)
    return set(finder.modules)


def test_every_command() -> None:
    assert {f"ortgpu.cli.{name}" for name in COMMANDS} <= imports_of("ortgpu.__main__")


def test_every_public_name() -> None:
    assert {f"ortgpu.{home}" for home in ortgpu._HOMES.values()} <= imports_of("ortgpu")


def test_what_asks_nvml() -> None:
    """It is one module, of a name that no option collects."""
    finder = ModuleFinder([str(PACKAGE.parent)], excludes=OTHERS)
    finder.import_hook("ortgpu")
    assert "pynvml" in finder.badmodules, "those that are excluded are there too"


def test_the_demo_does_not_start_the_program_again(lab: Lab) -> None:
    """In the place of the interpreter stands the program: it would start itself, and again from there."""
    code = "import sys; sys.frozen = True\nfrom ortgpu.__main__ import main; report(main(['demo']))"
    result = lab.machine().run(code)
    assert result.json == 0, result.output
    assert "this program is frozen: it has no interpreter" in result.stdout


def test_a_program_of_nuitka(lab: Lab) -> None:
    """It sets no sys.frozen, and names an interpreter that is not there; each module that it compiled has this name."""
    machine = lab.machine()
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10")
    code = f"""
import sys, types
from ortgpu.environment import child, interpreter
sys.executable = "/opt/app.dist/python"
interpreter.__compiled__ = types.SimpleNamespace(standalone=True)
started = child.run_python("pass", timeout=9)
open_session({str(lab.models.relu)!r}, {{}})
assert "this program is frozen" in started.errors, started
"""
    error = outcome_of(machine.run(code).ok()).error
    assert error is not None
    assert error.type == "LibraryNotFoundError"
    assert "this program is frozen: add nvidia-curand" in error.text
    assert "-m pip" not in error.text
