"""The package is installed again, or another one, while a process has it imported: a cell of a notebook does that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.advice import stand_alone
from tests.faults.case import H200, MENDED, with_gpus
from tests.faults.package_files import BUILD
from tests.lab import Cuda, Machine
from tests.lab.fixtures import Lab
from tests.lab.installed import GPU_DISTRIBUTION

REPLACES = """
import glob, os, shutil, sysconfig
import onnxruntime
site = sysconfig.get_path("purelib")
for old in glob.glob(os.path.join(site, "onnxruntime*")):
    shutil.rmtree(old)
for new in glob.glob(os.path.join({kept!r}, "*")):
    shutil.move(new, site)
"""


FAILS = """
try:
    GPUSession({!r})
except GPUError:
    pass
else:
    raise SystemExit("a session")
"""


def set_aside(machine: Machine) -> Path:
    """The package, and its record, where the program brings it back from."""
    kept = machine.overlay.root / "kept"
    kept.mkdir()
    for entry in machine.overlay.site.glob("onnxruntime*"):
        entry.rename(kept / entry.name)
    return kept


def check(lab: Lab, machine: Machine, kept: Path, was: str, *, first: str = "", after: str = MENDED) -> None:
    program = first + REPLACES.format(kept=str(kept))
    found = machine.run(f"{program}\nopen_session({str(lab.models.relu)!r}, {{}})").ok().json
    error = found["error"]
    assert error is not None, f"a session: {found}"
    assert error["type"] == "BrokenPackageError", error["text"]
    for words in ("replaced", f"imported: {was}", f"there now: {GPU_DISTRIBUTION}", "restart its kernel"):
        assert words in error["text"], error["text"]
    assert "pip" not in error["text"], error["text"]
    anew = machine.open_session(lab.models.relu).error
    assert anew is not None
    assert anew.type == after, "what is there now is whole"


def test_the_gpu_build_after_an_import_of_the_cpu_build(lab: Lab) -> None:
    machine = lab.machine()
    stand_alone(machine.overlay)
    kept = set_aside(machine)
    machine.overlay.add_wheel(lab.wheels.cpu_twin)
    check(lab, machine, kept, "onnxruntime ")


def test_another_release_after_the_import(lab: Lab) -> None:
    """Opening the provider of 1.31.1 in a process that has imported 1.26.0 ends it (SIGSEGV)."""
    machine = lab.machine()
    stand_alone(machine.overlay)
    kept = set_aside(machine)
    shutil.copytree(kept, machine.overlay.site, dirs_exist_ok=True)
    machine.overlay.replace(BUILD, b"package_name = 'onnxruntime-gpu'\n__version__ = '1.26.0'\ncuda_version = '12.8'\n")
    check(lab, machine, kept, "onnxruntime-gpu 1.26.0")


def test_another_release_after_a_session_that_failed(lab: Lab) -> None:
    """What a session advised was done, and the cell was run again: the release before knew nothing of the one there."""
    machine = lab.machine(**with_gpus(H200))
    stand_alone(machine.overlay)
    kept = set_aside(machine)
    shutil.copytree(kept, machine.overlay.site, dirs_exist_ok=True)
    machine.overlay.replace(BUILD, b"package_name = 'onnxruntime-gpu'\n__version__ = '1.26.0'\ncuda_version = '12.8'\n")
    check(
        lab,
        machine,
        kept,
        "onnxruntime-gpu 1.26.0",
        after="DriverUnusableError",
        first=f"from ortgpu import GPUError, GPUSession\n{FAILS.format(str(lab.models.relu))}",
    )


def test_another_release_after_a_session_on_the_cpu(lab: Lab) -> None:
    """The CPU was allowed, and the driver has no device. The first session's error is out of date for the second."""
    machine = lab.machine(cuda=Cuda(init=100))
    stand_alone(machine.overlay)
    kept = set_aside(machine)
    shutil.copytree(kept, machine.overlay.site, dirs_exist_ok=True)
    machine.overlay.replace(BUILD, b"package_name = 'onnxruntime-gpu'\n__version__ = '1.26.0'\ncuda_version = '12.8'\n")
    model = str(lab.models.relu)
    first = f"from ortgpu import GPUSession\nGPUSession({model!r}, allow_cpu=True)\n"
    program = first + REPLACES.format(kept=str(kept))
    found = machine.run(f"{program}\nopen_session({model!r}, {{'allow_cpu': True}})").ok().json
    assert found["error"] is None, found["error"]
    (error,) = [warned["error"] for warned in found["warnings"] if warned["error"] is not None]
    assert error["type"] == "BrokenPackageError", error["text"]
    assert "imported: onnxruntime-gpu 1.26.0" in error["text"]


def test_a_library_that_is_installed_after_a_session_on_the_cpu(lab: Lab) -> None:
    """The CPU was allowed, and its warning named a package to install. The next session no longer lacks the library."""
    machine = lab.machine(**with_gpus(H200))
    (library,) = machine.overlay.site.glob("nvidia/**/libcurand.so.10")
    aside = library.rename(machine.overlay.root / library.name)
    model = str(lab.models.relu)
    program = f"""
import os, sysconfig
from ortgpu import GPUSession
GPUSession({model!r}, allow_cpu=True)
os.rename({str(aside)!r}, {str(library)!r})
os.mkdir(os.path.join(sysconfig.get_path("purelib"), "nvidia_curand-99.dist-info"))
open_session({model!r}, {{'allow_cpu': True}})
"""
    found = machine.run(program).ok().json
    assert found["error"] is None, found["error"]
    (error,) = [warned["error"] for warned in found["warnings"] if warned["error"] is not None]
    assert error["type"] == "DriverUnusableError", error["text"]  # The driver of this machine is an imitation.


def test_the_cpu_build_of_the_same_release_after_the_import(lab: Lab) -> None:
    """What this process has goes on working: a driver is all that it lacks. The next one will not have CUDA."""
    machine = lab.machine()
    stand_alone(machine.overlay)
    program = f"""
import os, sysconfig, zipfile
import onnxruntime
site = sysconfig.get_path("purelib")
with zipfile.ZipFile({str(lab.wheels.cpu_twin)!r}) as wheel:
    for name in wheel.namelist():
        if os.path.isfile(os.path.join(site, name)):
            os.unlink(os.path.join(site, name))  # as pip does: never into a file that is in use
        wheel.extract(name, site)
"""
    found = machine.run(f"{program}\nopen_session({str(lab.models.relu)!r}, {{}})").ok().json
    assert "replaced after" not in str(found["error"]), found["error"]["text"]
    assert MENDED in [found["error"]["type"], *(each["type"] for each in found["error"]["others"])]


@pytest.mark.slow
def test_a_release_for_another_cuda_after_the_import(lab: Lab) -> None:
    machine = lab.machine(**with_gpus(H200))
    stand_alone(machine.overlay)
    kept = set_aside(machine)
    machine.overlay.add_wheel(lab.wheels.get(GPU_DISTRIBUTION, "1.22.0"))
    program = REPLACES.format(kept=str(kept))
    found = machine.run(f"{program}\nopen_session({str(lab.models.relu)!r}, {{}})").ok().json
    assert found["error"]["type"] == "BrokenPackageError", found
    assert "imported: onnxruntime-gpu 1.22.0" in found["error"]["text"]
