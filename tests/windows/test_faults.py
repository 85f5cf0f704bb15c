"""The faults of Windows, rows W01 to W07 of the corpus, as far as files and words show them: on prepared machines.

Nothing here was run on Windows. What plain ONNX Runtime does there is what its issues say.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts
from ortgpu.diagnosis.requirements import check_inference
from ortgpu.environment.gpu.cuda import CudaState
from ortgpu.environment.gpu.driver import Driver
from ortgpu.environment.inspection import as_plain
from ortgpu.errors import (
    DeviceError,
    DriverError,
    GPUError,
    Severity,
)
from tests.support.diagnosis_cases import CASES, Case
from tests.support.made_facts import AVAILABLE, CUDA_H200, H200, HEALTHY, part
from tests.windows.machine import VISUAL_C, Machine
from tests.windows.trees import NEEDED_12, TOOLKIT, TOOLKITS


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("ortgpu.environment.libraries.wheel.this_machine", lambda: "AMD64")
    return Machine(tmp_path)


def only(facts: Facts, severity: Severity = "fatal") -> GPUError:
    (found,) = [problem for problem in find_problems(facts) if problem.severity == severity]
    return found


def with_gpu(facts: Facts) -> Facts:
    """An RTX 4090 in it: the provider of a prepared machine has no fat binary, so nothing is said about that."""
    nvml = replace(facts.environment.driver.nvml, gpus=(replace(H200, name="RTX 4090", compute_capability=(8, 9)),))
    return replace(facts, environment=replace(facts.environment, driver=replace(facts.environment.driver, nvml=nvml)))


def test_a_healthy_machine(machine: Machine) -> None:
    machine.wheels()
    assert find_problems(machine.facts()) == ()
    tried = machine.facts(cuda=CudaState(0, (CUDA_H200,), 1))
    assert find_problems(tried) == ()
    assert {row.name: row.status_minimum for row in check_inference(with_gpu(tried).environment)}["CUDA"] == "pass"
    assert "fail" not in {row.status_minimum for row in check_inference(tried.environment)}
    assert as_plain(tried.environment)["provider"]["needed"]


# W01: "LoadLibrary failed with error 126"


def test_w01_no_cuda_libraries(machine: Machine) -> None:
    problem = only(machine.facts())
    assert problem.code == "library-not-found"
    assert problem.details()["missing"] == TOOLKIT
    assert "cublasLt64_13.dll: found nowhere" in str(problem)
    (fix,) = problem.fixes
    assert fix.executable
    assert re.search(r"-m pip install .*nvidia-cublas~=13\.0", fix)
    assert "'" not in fix  # which cmd.exe takes for part of a name


def test_w01_one_library_missing(machine: Machine) -> None:
    machine.wheels("cublasLt64_13.dll")
    problem = only(machine.facts())
    assert problem.details()["missing"] == ("cublasLt64_13.dll",)
    assert "nvidia-cublas" in problem.fixes[0]


def test_w01_libraries_of_the_cuda_before(machine: Machine) -> None:
    machine.write(machine.tmp_path / "site/nvidia/cublas/bin/cublas64_12.dll")
    machine.write(machine.tmp_path / "site/nvidia/cublas/bin/cublasLt64_12.dll")
    machine.changes["sys_path"] = (str(machine.tmp_path / "site"),)
    problem = only(machine.facts())
    assert problem.code == "library-version"
    assert "is cublas64_12.dll, cublas64_13.dll is needed" in str(problem)


def test_w01_a_library_of_visual_c_missing(machine: Machine) -> None:
    """1.31.1 links MSVCP140_ATOMIC_WAIT.dll, which redistributables of before 2019 do not have."""
    machine.wheels()
    machine.write(machine.provider, [*TOOLKIT, *VISUAL_C, "KERNEL32.dll", "api-ms-win-crt-heap-l1-1-0.dll"])
    assert find_problems(machine.facts()) == ()
    (machine.system / "MSVCP140_ATOMIC_WAIT.dll").unlink()
    problem = only(machine.facts(), "warning")
    assert problem.code == "library-not-found"
    assert problem.details()["missing"] == ("MSVCP140_ATOMIC_WAIT.dll",)
    assert "Visual C++ Redistributable" in problem.fixes[0]
    said = "ImportError: DLL load failed while importing onnxruntime_pybind11_state: The specified module is missing."
    assert only(machine.facts(import_error=said)).summary == problem.summary
    assert find_problems(machine.facts(available_providers=AVAILABLE)) == (), "it was found where nobody looks"


def test_w01_an_import_of_which_no_file_tells_why(machine: Machine) -> None:
    machine.wheels()
    said = "ImportError: DLL load failed while importing onnxruntime_pybind11_state: initialization routine failed."
    problem = only(machine.facts(import_error=said))
    assert problem.code == "broken-package"
    assert "Visual C++ Redistributable" in problem.fixes[0]


LOAD_FAILED = "ImportError: DLL load failed while importing {}: {}"
STATE = "onnxruntime_pybind11_state"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        # numpy issue 13848, NVIDIA/tacotron2 issue 335, Haoming02/sd-webui-forge-classic issue 1241: in Windows's words
        (LOAD_FAILED.format(STATE, "The paging file is too small for this operation to complete."), "paging file"),
        (LOAD_FAILED.format(STATE, "An Application Control policy has blocked this file."), "Smart App Control"),
        # CPython issue 126929, whatever Windows is set to
        (LOAD_FAILED.format(STATE, "The filename or extension is too long."), "shorter path"),
        (LOAD_FAILED.format(STATE, "Access is denied."), "onnxruntime-gpu=="),
        (LOAD_FAILED.format(STATE, "%1 is not a valid Win32 application."), "onnxruntime-gpu=="),
        # dream80/roop_colab issue 16, mattyamonaca/layerdivider issue 52: what says nothing, in other languages
        (LOAD_FAILED.format(STATE, "找不到指定的程序。"), "Visual C++"),
        (
            LOAD_FAILED.format(STATE, "ダイナミック リンク ライブラリ (DLL) 初期化ルーチンの実行に失敗しました。"),
            "Visual C++",
        ),
    ],
)
def test_an_import_of_which_windows_tells_why(said: str, advice: str, machine: Machine) -> None:
    machine.wheels()
    problem = only(machine.facts(import_error=said))
    assert problem.code == "broken-package"
    assert advice in problem.fixes[0]
    assert any("Visual C++" in fix for fix in problem.fixes) == (advice == "Visual C++")


def test_numpy_is_whole_where_windows_blocks_it(machine: Machine) -> None:
    machine.wheels()
    blocked = LOAD_FAILED.format("_multiarray_umath", "An Application Control policy has blocked this file.")
    problem = only(machine.facts(import_error="ImportError: import numpy failed", numpy_error=blocked))
    (fix,) = problem.fixes
    assert "Smart App Control" in fix
    assert blocked in problem.evidence


# W03: "CUDA_PATH is set but CUDA wasnt able to be loaded"


def test_w03_cuda_path_set_is_no_fault_and_no_cause(machine: Machine) -> None:
    from ortgpu.diagnosis.checks.opening import of_construction

    machine.changes["variables"] = {"CUDA_PATH": str(machine.tmp_path / TOOLKITS / "v12.9")}
    facts = machine.facts()
    text = "CUDA_PATH is set but CUDA wasnt able to be loaded. Please install the correct version of CUDA and cuDNN"
    said = of_construction(text, facts)
    assert said is not None
    assert said.code == "provider-fallback"  # in the place of which the cause is raised, where one is found
    assert only(facts).details()["missing"] == TOOLKIT


# W06: several toolkits


def test_w06_the_toolkit_of_the_right_major_is_taken_whatever_the_variables_say(machine: Machine) -> None:
    for version, major in (("v12.9", 12), ("v13.0", 13)):
        for name in (f"cublas64_{major}.dll", f"cublasLt64_{major}.dll"):
            machine.write(machine.tmp_path / TOOLKITS / version / "bin" / name)
    twelve = machine.tmp_path / TOOLKITS / "v12.9"
    machine.changes["variables"] = {"CUDA_PATH": str(twelve), "PATH": str(twelve / "bin")}
    assert find_problems(machine.facts())[0].severity == "warning"  # there is no cuDNN
    chosen = [one.chosen for one in machine.facts().environment.libraries if one.required]
    assert {one.root for one in chosen if one is not None} == {str(machine.tmp_path / TOOLKITS / "v13.0")}


# W07: an ONNX Runtime of Windows' own


def test_w07_the_one_in_system32_does_no_harm_by_being_there(machine: Machine) -> None:
    """The wheel's extension holds its own, and links none by name."""
    machine.wheels()
    machine.write(machine.system / "onnxruntime.dll")
    assert find_problems(machine.facts()) == ()


def test_w07_it_was_loaded_first(machine: Machine) -> None:
    machine.wheels()
    other = machine.write(machine.system / "onnxruntime.dll")
    machine.mapped = (str(other),)
    assert find_problems(machine.facts()) == ()
    said = "ImportError: The requested API version [24] is not available, only API versions [1, 17] are supported"
    problem = only(machine.facts(import_error=said))
    assert problem.code == "library-conflict"
    assert problem.details()["libraries"] == (str(other),)
    without = replace(machine.facts(import_error=said))
    without = replace(without, environment=replace(without.environment, mapped=()))
    assert "another onnxruntime.dll" in only(without).summary


# The driver and the device


def test_no_driver(machine: Machine) -> None:
    machine.wheels()
    facts = machine.facts()
    driver = replace(facts.environment.driver, libcuda=None, libcuda_error="Could not find module 'nvcuda.dll'",
                     cuda_version=None)  # fmt: skip
    problem = only(replace(facts, environment=replace(facts.environment, driver=driver)))
    assert problem.code == "driver-not-found"
    assert "nvcuda.dll" in problem.summary
    assert not re.search("docker|/dev|libcuda|container", str(problem))


@pytest.mark.parametrize(("capability", "advised"), [((8, 9), True), ((8, 0), False), ((7, 0), False), ((6, 1), True)])
def test_a_driver_for_cuda_12(capability: tuple[int, int], advised: bool, machine: Machine) -> None:
    """The wheels for CUDA 12 hold no code for 7.0 and 8.0 on Windows, and do on Linux."""
    machine.wheels()
    facts = machine.facts()
    driver = facts.environment.driver
    nvml = replace(
        driver.nvml, driver_version="572.16", cuda_version=(12, 8), gpus=(replace(H200, compute_capability=capability),)
    )
    driver = replace(driver, cuda_version=(12, 8), nvml=nvml)
    problem = only(replace(facts, environment=replace(facts.environment, driver=driver)))
    assert problem.code == "driver-too-old"
    assert any("onnxruntime-gpu>=1.20,<1.27" in fix for fix in problem.fixes) == advised


def test_a_provider_of_before_cuda_13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.environment.libraries.wheel.this_machine", lambda: "AMD64")
    machine = Machine(tmp_path, needs=NEEDED_12)
    problem = only(machine.facts())
    assert problem.details()["missing"] == ("cudart64_12.dll", "cublasLt64_12.dll", "cublas64_12.dll",
                                            "cufft64_11.dll", "cudnn64_9.dll")  # fmt: skip
    assert {"nvidia-cublas-cu12~=12.0", "nvidia-cudnn-cu12~=9.0"} <= set(problem.fixes[0].split())
    assert "curand" not in problem.fixes[0]


# What is advised

OF_LINUX = re.compile(
    r"\b(sudo|chmod|export [A-Z_]+=|unset|docker|modprobe|rmmod|ulimit|apt-get|LD_LIBRARY_PATH|LD_PRELOAD|dmesg"
    r"|ldconfig|libcuda|containers?|kernel modules?|reboot)\b"
    r"|/dev/|rm -|(^|\s)'"
)


def of_windows(facts: Facts) -> Facts:
    """The same without what only Linux has: its containers, device files, limits and variables of the loader."""
    nothing = {"libc": None, "container": None, "wsl": False, "display_vendors": None}
    limits = {"address_space": None, "data": None, "open_files": None, "stack": None}
    change: Any = part("host", system="Windows", machine="AMD64", **nothing, **limits)
    environment = change(facts).environment
    was, variables = environment.driver, environment.variables
    path = "C:\\Windows\\System32\\nvcuda.dll" if was.libcuda else None
    driver = Driver(path, was.libcuda_error, was.cuda_version, None, (), was.nvml)
    now = {name: value for name, value in variables.now.items() if not name.startswith("LD_")}
    changed = replace(environment, driver=driver, variables=replace(variables, now=now))
    return replace(facts, environment=changed)


ONLY_THERE = ("another system", "an old C library")


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in ONLY_THERE], ids=lambda case: case.name)
def test_no_advice_for_linux(case: Case) -> None:
    """Whatever is wrong: what is said to do is something that can be done on Windows."""
    for problem in find_problems(of_windows(case.change(HEALTHY))):
        assert not re.search(r"kernel module|container|libcuda\b", problem.summary)
        for fix in problem.fixes:
            text = fix.replace("'", '"') if fix.kind == "python" else fix.replace("'never'", "")  # of pyproject.toml
            assert not OF_LINUX.search(text), fix
            assert fix.kind != "shell" or "&&" not in fix  # which Windows PowerShell does not have
        assert not "".join(problem.fixes[:1]).startswith(("or ", "and "))
        of_the_driver = isinstance(problem, (DriverError, DeviceError))
        assert of_the_driver or not any("restart Windows" in fix for fix in problem.fixes)
        assert problem.fixes or not of_the_driver or not find_problems(case.change(HEALTHY))[0].fixes
