"""The names of ``ortgpu`` as a program sees them: star imports, help, and the types of a program that uses all."""

from __future__ import annotations

import importlib.util
import os
import pydoc
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ortgpu
from ortgpu.errors import catalogue
from tests.support.children import run_python

FUNCTIONS = ("diagnose", "enforce", "fit", "inspect_environment", "install", "preload", "sessions", "tune", "uninstall")


def test_star_import_brings_every_public_name() -> None:
    code = "from ortgpu import *\nprint(*sorted(name for name in globals() if not name.startswith('_')))"
    done = run_python(code).ok()
    names = set(done.stdout.split())
    classes = {cls.__name__ for cls in catalogue().values()}
    assert names >= {
        *classes,
        *FUNCTIONS,
        "GPUSession",
        "GPUSessionPool",
        "Device",
        "Placement",
        "distributed",
        "testing",
    }
    assert {"CPUExecutionWarning", "Fix"} <= names
    assert not names & {"TYPE_CHECKING", "annotations"}


def test_a_module_for_tests_needs_no_import_of_its_own() -> None:
    run_python("import ortgpu\nassert ortgpu.testing.GPURequirement.parse(count=2).count == 2").ok()


@pytest.mark.parametrize("package", [ortgpu, ortgpu.distributed], ids=lambda package: package.__name__)
def test_dir_lists_what_star_import_brings(package: ModuleType) -> None:
    public = {name for name in dir(package) if not name.startswith("_")}
    namespace: dict[str, object] = {}
    exec(f"from {package.__name__} import *", namespace)
    assert public == namespace.keys() - {"__builtins__"}


def test_help_shows_what_arrives_when_it_is_used() -> None:
    text = pydoc.plain(pydoc.render_doc(ortgpu))
    assert "class GPUSession(" in text
    assert all(f"{name}(" in text for name in FUNCTIONS)
    text = pydoc.plain(pydoc.render_doc(ortgpu.distributed))
    assert "class Rank(" in text
    assert all(f"{name}(" in text for name in ("current_rank", "has_collective_ops", "preflight", "require_training"))


def test_ray_names_what_it_has_where_there_is_no_ray() -> None:
    from ortgpu.integrations import ray

    public = {name for name in dir(ray) if not name.startswith("_")}
    assert public == set(ray.__all__)
    assert public >= {"GPUDeployment", "RayGPUSession", "open_session", "preflight", "probe"}


needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed: it is of the extra dev"
)


@pytest.mark.lab
@needs_mypy
def test_every_name_has_a_type_in_a_program_of_a_user(tmp_path: Path) -> None:
    handlers = "\n".join(
        f"except ortgpu.{cls.__name__} as error:\n    text = error.code" for cls in catalogue().values()
    )
    program = f"""\
import warnings
import ortgpu
from ortgpu import Device, Diagnosis, Fix, GPUError, GPUSession, GPUSessionPool, LibraryNotFoundError

text: str
try:
    with GPUSession("m.onnx", device="cuda:1", cpu_nodes="forbid") as session:
        device: Device = session.device
except LibraryNotFoundError as error:
    missing: tuple[str, ...] = tuple(error.missing)
{handlers}
found: Diagnosis = ortgpu.diagnose("m.onnx")
problems: tuple[GPUError, ...] = found.problems
fixes: tuple[Fix, ...] = problems[0].fixes
warnings.simplefilter("error", ortgpu.CPUExecutionWarning)
warnings.simplefilter("error", ortgpu.CPUNodesWarning)

@ortgpu.enforce()
def guarded(count: int) -> str:
    return str(count)

class Named(GPUSession):
    name: str

class NamedPool(GPUSessionPool):
    name: str

text = guarded(1) + Named.for_rank("m.onnx").name
with Named("m.onnx") as named, NamedPool("m.onnx") as named_pool:
    text += named.name + named_pool.name
with GPUSessionPool("m.onnx", devices=[0, "cuda:1"]) as pool:
    text = ", ".join(str(lost.error.fixes) for lost in pool.lost)
print(text, missing, device.ordinal, fixes, ortgpu.sessions()[0].model, ortgpu.distributed.current_rank().rank)
"""
    assert type_errors(program, tmp_path) == ""


@pytest.mark.lab
@needs_mypy
def test_a_session_has_for_a_type_checker_what_onnx_runtimes_has(tmp_path: Path) -> None:
    """Pyright infers it from the code, and editors complete names with it. Mypy wants stubs, and gets some here."""
    stubs = tmp_path / "stubs"
    home = "onnxruntime_inference_collection"
    for path, text in {
        "__init__.pyi": f"from .capi.{home} import InferenceSession as InferenceSession",
        "capi/__init__.pyi": "",
        f"capi/{home}.pyi": "class InferenceSession:\n    def get_modelmeta(self) -> str: ...",
    }.items():
        file = stubs / "onnxruntime" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    program = """\
from onnxruntime import InferenceSession
from ortgpu import GPUSession

def named(session: InferenceSession) -> str:
    return session.get_modelmeta()

session = GPUSession("m.onnx")
number: int = session.get_modelmeta()
named(session)
session.get_modelmet()
"""
    wrong_type, misspelt = type_errors(program, tmp_path, MYPYPATH=str(stubs)).splitlines()
    assert 'expression has type "str", variable has type "int"' in wrong_type
    assert '"GPUSession" has no attribute "get_modelmet"' in misspelt


def type_errors(program: str, folder: Path, **variables: str) -> str:
    """What mypy says of the program of a user."""
    source = folder / "program.py"
    source.write_text(program, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        str(folder),
        str(source),
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(ortgpu.__file__).parent.parent), **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=env)
    assert done.returncode == (1 if done.stdout else 0), done.stdout + done.stderr
    return done.stdout
