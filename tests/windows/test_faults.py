"""The faults of Windows: the table, played in Python for Windows, and words about what Wine does not answer.

The whole table with its fixes: ``pytest -m windows tests/windows/test_faults.py``, or ``python -m tests.faults
--windows``. ``-m "windows and not slow"`` plays the cases that show most.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts
from ortgpu.environment.gpu.driver import Driver
from ortgpu.environment.packages.installer import quote_program, quoted
from ortgpu.errors import DeviceError, DriverError, GPUError
from tests.faults import CASES as ON_LINUX
from tests.faults.on_windows import Wheels, WindowsCase, play
from tests.faults.report import BEGIN, OF_WINDOWS, recorded
from tests.faults.windows_cases import CASES as ON_WINDOWS
from tests.lab.models import Models
from tests.lab.windows import why_not
from tests.support.diagnosis_cases import CASES, Case
from tests.support.made_facts import H200, HEALTHY, part

# The table

EXECUTED_QUICKLY = "no-cublasLt64_13.dll"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return Wheels(tmp_path_factory.mktemp("wheels"))


def _marked(case: WindowsCase) -> Any:
    return pytest.param(case, id=case.name, marks=[] if case.shown else [pytest.mark.slow])


@pytest.mark.windows
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*map(_marked, ON_WINDOWS)])
def test_a_case(case: WindowsCase, wheels: Wheels, models: Models, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The error, its words, what plain ONNX Runtime does, and what its fix comes to. Quickly: one fix of all."""
    quickly = "not slow" in str(pytestconfig.getoption("-m"))
    played = play(case, tmp_path, wheels, models, advice=case.name == EXECUTED_QUICKLY or not quickly)
    assert not played.wrong, "\n".join(played.wrong)
    assert played.fixes or tuple(played.needs) == case.needs


def test_the_page_has_every_case() -> None:
    rows = recorded(OF_WINDOWS.read_text(encoding="utf-8"))
    assert list(rows) == [case.name for case in ON_WINDOWS]
    for case in ON_WINDOWS:
        _, error, plain, fix = rows[case.name]
        assert (error, plain) == (case.error, case.plain)
        assert fix == ("executed, true" if case.after else "; ".join(case.needs))


def test_a_case_of_linux_is_here_or_has_its_reason() -> None:
    page, _, _ = OF_WINDOWS.read_text(encoding="utf-8").partition(BEGIN)
    first_cells = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    reasons = [name for cell in first_cells for name in re.findall("`(.*?)`", cell)]
    here = {case.name for case in ON_WINDOWS}
    assert sorted(reasons) == sorted(case.name for case in ON_LINUX if case.name not in here)


def test_names_are_unique() -> None:
    assert len({case.name for case in ON_WINDOWS}) == len(ON_WINDOWS)


# What Wine cannot do


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


def only(**observed: Any) -> GPUError:
    """The one fatal problem of a whole Windows on which this was seen."""
    facts = of_windows(HEALTHY)
    facts = replace(facts, observed=replace(facts.observed, **observed))
    (found,) = [problem for problem in find_problems(facts) if problem.severity == "fatal"]
    return found


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
        (LOAD_FAILED.format(STATE, "A dynamic link library (DLL) initialization routine failed."), "Visual C++"),
    ],
)
def test_an_import_of_which_windows_tells_why(said: str, advice: str) -> None:
    problem = only(import_error=said)
    assert problem.code == "broken-package"
    assert advice in problem.fixes[0]
    assert any("Visual C++" in fix for fix in problem.fixes) == (advice == "Visual C++")


def test_numpy_is_whole_where_windows_blocks_it() -> None:
    blocked = LOAD_FAILED.format("_multiarray_umath", "An Application Control policy has blocked this file.")
    problem = only(import_error="ImportError: import numpy failed", numpy_error=blocked)
    (fix,) = problem.fixes
    assert "Smart App Control" in fix
    assert blocked in problem.evidence


def test_the_onnxruntime_of_windows_was_taken() -> None:
    """microsoft/winml-cli issue 689, on Windows 11."""
    said = "ImportError: The requested API version [24] is not available, only API versions [1, 17] are supported"
    problem = only(import_error=said)
    assert problem.code == "library-conflict"
    assert "another onnxruntime.dll" in problem.summary


@pytest.mark.parametrize(("capability", "advised"), [((8, 9), True), ((8, 0), False), ((7, 0), False), ((6, 1), True)])
def test_a_driver_for_cuda_12(capability: tuple[int, int], advised: bool) -> None:
    """The wheels for CUDA 12 hold no code for 7.0 and 8.0 on Windows, and do on Linux."""
    facts = of_windows(HEALTHY)
    driver = facts.environment.driver
    gpus = (replace(H200, compute_capability=capability),)
    nvml = replace(driver.nvml, driver_version="572.16", cuda_version=(12, 8), gpus=gpus)
    driver = replace(driver, cuda_version=(12, 8), nvml=nvml)
    problems = find_problems(replace(facts, environment=replace(facts.environment, driver=driver)))
    (problem,) = [problem for problem in problems if problem.code == "driver-too-old"]
    assert any("onnxruntime-gpu>=1.20,<1.27" in fix for fix in problem.fixes) == advised
    assert not any("curand" in fix for fix in problem.fixes)


# What is advised

OF_LINUX = re.compile(
    r"\b(sudo|chmod|export [A-Z_]+=|unset|docker|modprobe|rmmod|ulimit|apt-get|LD_LIBRARY_PATH|LD_PRELOAD|dmesg"
    r"|ldconfig|libcuda|containers?|kernel modules?|reboot)\b"
    r"|/dev/|rm -|(^|\s)'"
)
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


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a==1.0", "a==1.0"),
        ("a~=1.0", "a~=1.0"),
        ("a>=1", '"a>=1"'),
        ("a~=1.0,<2", '"a~=1.0,<2"'),  # PowerShell takes a comma for a list
        ("a[b]", '"a[b]"'),
        (r"C:\Büro\x", r"C:\Büro\x"),
        (r"C:\My Python\x", r'"C:\My Python\x"'),
        (r"C:\O'Neil", r'''"C:\O'Neil"'''),
    ],
)
def test_quotes(word: str, expected: str) -> None:
    assert quoted(word, windows=True) == expected


def test_quotes_of_a_program() -> None:
    r"""learn.microsoft.com/cpp, "Parsing C command-line arguments": no backslash escapes a quote in the first one."""
    assert quote_program("C:\\Python\\python.exe", windows=True) == "C:\\Python\\python.exe"
    assert quote_program("C:\\My Python\\python.exe", windows=True) == 'C:\\"My Python"\\python.exe'
