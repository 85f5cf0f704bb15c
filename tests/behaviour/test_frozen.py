"""Programs that are frozen, by PyInstaller for instance: what looks for imports in the code finds every module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from modulefinder import ModuleFinder
from pathlib import Path

import pytest

import ortgpu
from ortgpu.cli import COMMANDS
from tests.lab.child import outcome_of
from tests.lab.environments import install, network_variables
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
from ortgpu.environment import child
from ortgpu.environment.packages import interpreter
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


@pytest.mark.parametrize("place", ["sys.path.append", "setattr(sys, 'prefix', folder) or str"])
def test_a_program_of_pex(lab: Lab, tmp_path: Path, place: str) -> None:
    """It runs on the system's interpreter, into which pip would install what it does not see; or in an environment of
    its own, which is made anew."""
    machine = lab.machine()
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10")
    (tmp_path / "PEX-INFO").write_text("{}", encoding="utf-8")
    code = f"import sys\nfolder = {str(tmp_path)!r}\n{place}(folder)\nopen_session({str(lab.models.relu)!r}, {{}})"
    error = outcome_of(machine.run(code).ok()).error
    assert error is not None
    assert error.type == "LibraryNotFoundError"
    assert "this program is frozen: add nvidia-curand" in error.text
    assert "-m pip" not in error.text


PROGRAM_FOR_PEX = """
import sys
sys.path.append(sys.argv[1])
from ortgpu import GPUError, GPUSession
try:
    GPUSession(sys.argv[2])
except GPUError as error:
    print(type(error).__name__, *error.fixes, sep="\\n")
"""


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["", "--venv"])
def test_a_pex_that_is_built_again(lab: Lab, tmp_path: Path, mode: str) -> None:
    """The real thing. It fetches 300 MB."""
    tool = install("pex", ["pex"]).parents[2] / "bin" / "pex"
    (tmp_path / "program.py").write_text(PROGRAM_FOR_PEX, encoding="utf-8")
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PEX_ROOT": str(tmp_path / "root")}

    def run(*command: str) -> list[str]:
        done = subprocess.run(
            command, cwd=tmp_path, env={**network_variables(tmp_path / "pip"), **variables}, capture_output=True,
            text=True, check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def build_and_open(engine: str) -> list[str]:
        requirements = [engine, "onnx", "nvidia-ml-py", "numpy"]
        run(str(tool), *requirements, *filter(None, [mode]), "--python", sys.executable, "-o", "app.pex")
        return run("./app.pex", "program.py", str(PACKAGE.parent), str(lab.models.relu))

    broken = build_and_open("onnxruntime")
    assert broken[0] == "CPUOnlyPackageError"
    assert broken[1].startswith("this program is frozen: add ")
    assert ", leave out onnxruntime, and build it again" in broken[1]
    mended = build_and_open(broken[1].split()[5])
    assert mended[:1] != ["CPUOnlyPackageError"], mended
    shutil.rmtree(tmp_path)
