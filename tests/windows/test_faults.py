"""The faults of Windows, rows W01 to W07 of the corpus, as far as files and words show them: on prepared machines.

Nothing here was run on Windows. What plain ONNX Runtime does there is what its issues say.
"""

from __future__ import annotations

import os
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
    LibraryNotFoundError,
    ProviderRequestError,
    Severity,
)
from ortgpu.provider.preloading import open_library
from ortgpu.provider.tensorrt import check_loadable
from tests.support.diagnosis_cases import CASES, Case
from tests.support.made_facts import AVAILABLE, CUDA_H200, H200, HEALTHY, part
from tests.windows.machine import VISUAL_C, Machine
from tests.windows.trees import CUDNN, NEEDED_12, TOOLKIT, TOOLKITS


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
    tried = machine.facts(preload=machine.preload(everything=True), cuda=CudaState(0, (CUDA_H200,), 1))
    assert find_problems(tried) == ()
    assert {row.name: row.status_minimum for row in check_inference(with_gpu(tried).environment)}["CUDA"] == "pass"
    assert "fail" not in {row.status_minimum for row in check_inference(tried.environment)}
    assert as_plain(tried.environment)["provider"]["needed"]


# W01: "LoadLibrary failed with error 126"


@pytest.mark.parametrize("tried", [False, True], ids=["looked at", "loaded"])
def test_w01_no_cuda_libraries(tried: bool, machine: Machine) -> None:
    facts = machine.facts(preload=machine.preload() if tried else None)
    problem = only(facts)
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


def test_w01_what_the_loader_says_of_the_provider(machine: Machine) -> None:
    machine.wheels()
    machine.write(machine.provider, [*TOOLKIT, "helper.dll"])
    report = machine.preload()
    assert report.ok
    said = open_library(str(machine.provider), loader=machine.loader)
    facts = replace(machine.facts(preload=report, provider_error=said))
    facts = replace(facts, environment=replace(facts.environment, system_libraries_missing=()))
    problem = only(facts)
    assert (problem.code, problem.details()["missing"]) == ("library-not-found", ("helper.dll",))
    assert "install what brings helper.dll" in problem.fixes[0]


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


@pytest.mark.parametrize("code", [225, 1260, 4551])
def test_a_library_that_windows_blocks_is_whole(code: int, machine: Machine) -> None:
    machine.wheels()
    machine.kernel.blocked["cublas64_13.dll"] = code
    problem = only(machine.facts(preload=machine.preload()))
    (fix,) = problem.fixes
    assert "virus scanner" in fix


# W02: error 127, a library of another version earlier on PATH


def test_w02_a_cublas_of_another_release_is_loaded_already(machine: Machine) -> None:
    machine.wheels(but=lambda name: {"cublasLt64_13.dll": ["new"]} if name == "cublas64_13.dll" else ())
    other = machine.write(machine.tmp_path / "other/cublasLt64_13.dll", exports=["old"])
    assert machine.kernel.load(str(other)) == 0
    problem = only(machine.facts(preload=machine.preload()))
    assert problem.code == "library-conflict"
    assert problem.details()["libraries"] == (str(other),)
    assert f"in this process: {other}" in str(problem)


def test_w02_a_provider_for_newer_libraries(machine: Machine) -> None:
    site = machine.wheels()
    machine.write(site / "nvidia/cu13/bin/x86_64/cublasLt64_13.dll", exports=["call"])
    machine.write(machine.provider, {"cublasLt64_13.dll": ["new"], "cublas64_13.dll": ["call"]})
    report = machine.preload()
    assert report.ok
    said = open_library(str(machine.provider), loader=machine.loader)
    problem = only(machine.facts(preload=report, provider_error=said))
    assert problem.code == "library-version"
    assert "lacks new" in problem.summary
    assert problem.details()["found"] == {"cublasLt64_13.dll": str(site / "nvidia/cu13/bin/x86_64/cublasLt64_13.dll")}


def test_w02_what_is_earlier_on_path_is_not_taken(machine: Machine) -> None:
    """By the right name, and another inside: a copy that somebody renamed."""
    site = machine.wheels()
    machine.write(machine.tmp_path / "tool/cublas64_13.dll").write_bytes(
        (machine.write(machine.tmp_path / "tool/cublas64_12.dll")).read_bytes()
    )
    machine.changes["variables"] = {"PATH": str(machine.tmp_path / "tool")}
    report = machine.preload()
    assert report.ok
    assert report.roots == (str(site / "nvidia"),)
    assert {file.problem for file in report.rejected} >= {"its own name is cublas64_12.dll, cublas64_13.dll is needed"}


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


# B20: torch, imported later, gets the libraries that are loaded already


def test_b20_the_libraries_of_an_installed_torch_are_taken(machine: Machine) -> None:
    machine.wheels()
    for name in (*TOOLKIT, *CUDNN):
        machine.write(machine.tmp_path / "torch/lib" / name)
    machine.changes["torch_folder"] = str(machine.tmp_path / "torch")
    report = machine.preload(everything=True)
    assert report.ok
    assert {os.path.dirname(lib.path) for lib in report.libraries if lib.source != "nvidia wheels"} == {
        str(machine.tmp_path / "torch/lib")
    }
    assert {lib.soname for lib in report.libraries if lib.source == "torch"} == {*TOOLKIT, *CUDNN}


# W05: a part of cuDNN missing


@pytest.mark.parametrize("part_missing", ["cudnn_graph64_9.dll", "cudnn_ops64_9.dll", "cudnn_cnn64_9.dll"])
def test_w05_a_part_of_cudnn_missing(part_missing: str, machine: Machine) -> None:
    machine.wheels(part_missing)
    facts = machine.facts(preload=machine.preload(everything=True))
    problem = only(facts, "warning")
    assert problem.code == "library-not-found"
    assert problem.details()["missing"] == (part_missing,)
    assert "nvidia-cudnn-cu13" in problem.fixes[0]
    wanting = replace(facts, request=replace(facts.request, cudnn_operators=("Conv",)))
    assert only(wanting).details()["missing"] == (part_missing,)


def test_w05_a_part_that_is_cut_short(machine: Machine) -> None:
    site = machine.wheels()
    part_of_it = site / "nvidia/cudnn/bin/cudnn_engines_tensor_ir64_9.dll"
    part_of_it.write_bytes(part_of_it.read_bytes()[:1100])
    problem = only(machine.facts(preload=machine.preload(everything=True)), "warning")
    assert problem.details()["missing"] == ("cudnn_engines_tensor_ir64_9.dll",)
    assert "truncated: 1100 of" in str(problem)


def test_cudnn_for_the_other_cuda(machine: Machine) -> None:
    machine.wheels()
    machine.answers["cudnnGetCudartVersion"] = 12090
    problem = only(machine.facts(preload=machine.preload(everything=True)), "warning")
    assert problem.code == "library-conflict"
    assert "cudnn64_9.dll in this process is built for CUDA 12" in problem.summary


# W06: several toolkits


def test_w06_the_toolkit_of_the_right_major_is_taken_whatever_the_variables_say(machine: Machine) -> None:
    for version, major in (("v12.9", 12), ("v13.0", 13)):
        for name in (f"cublas64_{major}.dll", f"cublasLt64_{major}.dll"):
            machine.write(machine.tmp_path / TOOLKITS / version / "bin" / name)
    twelve = machine.tmp_path / TOOLKITS / "v12.9"
    machine.changes["variables"] = {"CUDA_PATH": str(twelve), "PATH": str(twelve / "bin")}
    assert find_problems(machine.facts())[0].severity == "warning"  # there is no cuDNN
    assert machine.preload().roots == (str(machine.tmp_path / TOOLKITS / "v13.0"),)


# W07: an ONNX Runtime of Windows' own


def test_w07_the_one_in_system32_does_no_harm_by_being_there(machine: Machine) -> None:
    """The wheel's extension holds its own, and links none by name."""
    machine.wheels()
    machine.write(machine.system / "onnxruntime.dll")
    assert find_problems(machine.facts()) == ()


def test_w07_it_was_loaded_first(machine: Machine) -> None:
    machine.wheels()
    other = machine.write(machine.system / "onnxruntime.dll")
    assert machine.kernel.load(str(other)) == 0
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


# TensorRT


def test_tensorrt_is_found_along_path_and_missed_by_its_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.provider.tensorrt.this_machine", lambda: "AMD64")
    with pytest.raises(ProviderRequestError, match="is not part of the installed"):
        check_loadable(str(machine.provider), loader=machine.loader)
    needs = ["nvinfer_10.dll", "nvonnxparser_10.dll", *TOOLKIT]
    machine.write(machine.capi / "onnxruntime_providers_tensorrt.dll", needs)
    with pytest.raises(LibraryNotFoundError) as raised:
        check_loadable(str(machine.provider), loader=machine.loader)
    assert raised.value.missing == ("nvinfer_10.dll", "nvonnxparser_10.dll")
    assert "TensorRT in a release 10.*" in raised.value.fixes[0]
    assert "nvinfer_10.dll was not found (error 126)" in str(raised.value)
    machine.write(machine.tmp_path / "trt/nvinfer_10.dll")
    machine.write(machine.tmp_path / "trt/nvonnxparser_10.dll", ["nvinfer_10.dll"])
    monkeypatch.setenv("PATH", f"C:\\Tools;{machine.tmp_path / 'trt'}")
    check_loadable(str(machine.provider), loader=machine.loader)


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
