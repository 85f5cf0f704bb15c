"""Advice that was executed: the text that an error prints, applied to the environment that made it, mends the fault.

A shell command is run by /bin/sh, code is put before the session, and what is found then is another finding or nothing.
pip asks the real index. Fixes that fetch hundreds of megabytes are run on demand, ``pytest -m slow``; the result of the
last run of all of them is in tests/faults/README.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults import CASES, Case
from tests.faults.advice import follow_advice, machine_to_mend, shared_folders, why_not_mended
from tests.faults.case import MENDED
from tests.lab import Overlay
from tests.lab.environments import network_variables
from tests.lab.fixtures import Lab

WITH_A_FIX = [case for case in CASES if case.after is not None]
QUICK = next(case for case in CASES if case.name == "no-libcudart")


#: By the command that is their fix: the case that is played each time, and the others.
SAME_COMMAND = {
    "unset PYTHONPATH": (
        "cpu-package-first-on-pythonpath",
        *("archive-first-on-pythonpath", "trimmed-copy-first-on-pythonpath", "other-wheels-first-on-pythonpath"),
    ),
    "unset LD_PRELOAD": (
        "another-onnxruntime-in-ld-preload",
        "part-of-another-cublas-in-ld-preload",
        "linking-stub-in-ld-preload",
        "library-that-shares-out-the-gpu",
    ),
    "export LD_LIBRARY_PATH=": (
        "cuda-compat-older-than-the-driver",
        *("cuinit-804", "cuinit-34", "older-libcuda-than-the-driver", "cuda-compat-on-a-gpu-that-does-not-support-it"),
    ),
    "unset CUDA_VISIBLE_DEVICES": (
        "hidden-by--1",
        *(each.name for each in CASES if each.name.startswith("hidden-by-")),
    ),
    "chmod -R u+rX ": ("package-unreadable", "library-unreadable"),
    "/sbin/ldconfig -n ": ("driver-without-its-link", "driver-linked-to-nothing"),
}


def _is_repeated(case: Case) -> bool:
    return any(case.name in others and case.name != played for played, *others in SAME_COMMAND.values())


def _named(case: Case, *, slow: bool) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.slow, pytest.mark.timeout(1800)] if slow else [])


@pytest.mark.parametrize(
    "case",
    [_named(case, slow=case.slow_fix or case.slow_break or _is_repeated(case)) for case in WITH_A_FIX],
)
def test_what_is_printed_mends_the_fault(lab: Lab, case: Case) -> None:
    tried = list(follow_advice(case, lab))
    assert tried, "the case says that there is a fix to execute, and none is printed"
    commands = [command for command, names in SAME_COMMAND.items() if case.name in names]
    assert all(tried[0][0].startswith(command) for command in commands), tried[0][0]
    for text, _, problem in tried:
        assert problem is None, f"after: {text}\n{problem}"


def _nothing_at_all(_lab: Lab, overlay: Overlay) -> None:
    """Neither ONNX Runtime nor a library of CUDA."""
    overlay.uninstall("onnxruntime-gpu").remove("nvidia", "nvidia_c*.dist-info", "nvidia_nvjitlink-*.dist-info")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_command_installs_all_that_is_needed(lab: Lab) -> None:
    """ONNX Runtime without its libraries would be the next error."""
    case = Case("nothing", "OnnxRuntimeNotInstalledError", ("not installed",), _nothing_at_all, after=MENDED)
    ((_, outcome, problem),) = follow_advice(case, lab)
    assert problem is None
    assert outcome.error is not None
    assert outcome.error.type == MENDED, outcome.error.text
    assert "LibraryNotFoundError" not in outcome.error.other_types


@pytest.mark.slow
def test_a_package_that_requires_onnxruntime_does_not_bring_it_back(lab: Lab, tmp_path: Path) -> None:
    """Once both packages were mended: by pip's own judgement, and by the next installation."""
    case = next(case for case in CASES if case.name == "cpu-package-over-gpu-package")
    machine = machine_to_mend(case, lab)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "library"\nversion = "1"\ndependencies = ["onnxruntime>=1.18"]\n'
        "[tool.setuptools]\npy-modules = []\n",
        encoding="utf-8",
    )
    network = network_variables(lab.wheels.folder / "pip")

    def pip(*arguments: str) -> str:
        return machine.run(argv=["-m", "pip", *arguments], env=network, timeout=300).ok().output

    pip("install", str(tmp_path))
    error = case.open(lab, machine).error
    assert error is not None
    (text,) = (fix["text"] for fix in error.remedies)
    assert text.endswith(" -m ortgpu hold")
    fixed = case.open_after(lab, machine, {"kind": "shell", "text": text})
    assert fixed.result.reports.get("first_status") == 0, fixed.result.output
    assert fixed.error is not None
    assert fixed.error.type == MENDED, fixed.error.text
    pip("check")
    assert "Requirement already satisfied: onnxruntime>=1.18" in pip("install", "--upgrade", str(tmp_path))
    again = case.open(lab, machine).error
    assert again is not None
    assert again.type == MENDED, again.text


def test_without_the_fix_the_fault_stays(lab: Lab) -> None:
    """What would be seen if a fix did nothing: the tests above can fail."""
    machine = machine_to_mend(QUICK, lab)
    after = QUICK.open_after(lab, machine, {"kind": "shell", "text": "true"})
    assert "still found" in str(why_not_mended(QUICK, after))
    failed = QUICK.open_after(lab, machine, {"kind": "shell", "text": "false"})
    assert "ended with 1" in str(why_not_mended(QUICK, failed))


def test_code_is_put_before_the_session(lab: Lab) -> None:
    machine = QUICK.machine(lab)
    after = QUICK.open_after(lab, machine, {"kind": "python", "text": "raise SystemExit(7)"})
    assert after.result.returncode == 7


def test_pip_leaves_the_original_environment_as_it_was(lab: Lab) -> None:
    machine = machine_to_mend(QUICK, lab)
    assert shared_folders(machine.overlay) == []
    before = _state(machine.overlay.source)
    assert any(state[0] for state in before.values())
    (*_, problem), *_ = follow_advice(QUICK, lab)
    assert problem is None
    # More of the same kinds: files that pip replaces, and a package whose folder it empties.
    done = machine.run(argv=["-m", "pip", "uninstall", "-y", "onnxruntime-gpu", "numpy"]).ok()
    assert "Successfully uninstalled numpy" in done.stdout
    assert not (machine.overlay.site / "numpy").exists()
    assert _state(machine.overlay.source) == before


def _state(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Identity, size, time of the last change of content, and mode of every file below a folder."""
    found = {}
    for root, _, names in os.walk(folder):
        if root.endswith("__pycache__"):  # written by whoever imports first
            continue
        for name in names:
            seen = os.lstat(os.path.join(root, name))
            found[os.path.join(root, name)] = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_mode)
    return found
