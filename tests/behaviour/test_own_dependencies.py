"""What ortgpu itself needs is missing or broken: its commands say so and what mends it, and blame nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.lab import Machine, Overlay
from tests.lab.fixtures import Lab


def old_protobuf(overlay: Overlay) -> None:
    """An onnx of today meets a protobuf before 5.26, which has no such module; TensorFlow and others pin one."""
    overlay.remove("google/protobuf/runtime_version.py")


def no_protobuf(overlay: Overlay) -> None:
    overlay.uninstall("protobuf")


def ortgpu(machine: Machine, *arguments: str) -> Any:
    result = machine.run(argv=["-m", "ortgpu", *arguments])
    assert "Traceback" not in result.output, result.output
    return result


@pytest.mark.parametrize("breaks", [old_protobuf, no_protobuf])
def test_the_demo_does_without_onnx(lab: Lab, breaks: Any) -> None:
    machine = lab.machine()
    breaks(machine.overlay)
    result = ortgpu(machine, "demo")
    assert result.returncode == 0
    assert "no exception says so" in result.output


def test_a_model_is_judged_without_onnx(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine()
    old_protobuf(machine.overlay)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    code = f"import ortgpu; report(ortgpu.diagnose(model={str(path)!r}).as_dict()['problems'])"
    problems = machine.run(code).ok().json
    [found] = [each for each in problems if each["code"] != "driver-not-found"]
    assert (found["type"], found["severity"]) == ("GPUError", "fatal")
    assert "cannot be read" in found["summary"]


@pytest.mark.parametrize("name", ["rich", "click"])
def test_without_its_command_line(lab: Lab, name: str) -> None:
    machine = lab.machine()
    machine.overlay.uninstall(name)
    result = ortgpu(machine, "doctor")
    assert result.returncode == 1
    assert result.stdout == ""
    command = result.stderr.splitlines()[-1].strip()
    assert command.endswith("pip install --upgrade rich click")
    shown = subprocess.run(f"{command} --help", shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr


SHADOWS = ["raise RuntimeError('no such thing')", "answer = 42"]


@pytest.mark.parametrize("text", SHADOWS)
@pytest.mark.parametrize("name", ["rich", "click", "numpy"])
def test_a_file_of_the_users_own_is_in_the_way(lab: Lab, tmp_path: Path, name: str, text: str) -> None:
    """`click.py` beside the program: installing what is installed already would not help."""
    stray = tmp_path / f"{name}.py"
    stray.write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    result = lab.machine().run(argv=["-m", "ortgpu", "check"], env={"PYTHONPATH": path})
    assert result.returncode == 1
    assert f"rename {stray}, or take its folder off the search path" in result.output
    assert "install --" not in result.output


@pytest.mark.parametrize("probe", [False, True])
def test_a_file_of_the_users_own_hides_a_module_of_python(lab: Lab, tmp_path: Path, probe: bool) -> None:
    """`numbers.py` beside the program, which NumPy imports: NumPy is whole, and to install it again would not help."""
    stray = tmp_path / "numbers.py"
    stray.write_text("one = 1", encoding="utf-8")
    code = f"""
        import ortgpu
        try:
            ortgpu.GPUSession({str(lab.models.relu)!r})
        except ortgpu.GPUError as error:
            found = ortgpu.diagnose(probe=True).problems[0] if {probe} else error
            report(found.as_dict())
    """
    found = lab.machine().run(dedent(code), env={"PYTHONPATH": str(tmp_path)}).ok().json
    assert (found["type"], found["details"]["files"]) == ("BrokenPackageError", [str(stray)])
    assert found["summary"] == f"import onnxruntime fails: {stray} is imported instead of Python's own module"
    assert [fix["text"] for fix in found["fixes"]] == [
        f"rename {stray}, or take its folder off the search path of this program"
    ]


def test_a_numpy_that_is_a_bare_folder_is_installed_again(lab: Lab) -> None:
    """As an interrupted upgrade leaves it. A second import of ONNX Runtime succeeds in the same process."""
    machine = lab.machine()
    machine.overlay.take_apart("numpy").remove("numpy/__init__.py")
    code = f"""
        import ortgpu
        for _ in range(2):
            try:
                ortgpu.GPUSession({str(lab.models.relu)!r})
            except ortgpu.GPUError as error:
                report(error.as_dict())
    """
    found = machine.run(dedent(code)).ok().json
    assert found["type"] == "BrokenPackageError"
    assert "the installed numpy" in found["summary"]
    assert ["install --force-reinstall --no-deps numpy==" in fix["text"] for fix in found["fixes"]] == [True]
