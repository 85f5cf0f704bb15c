"""``python -m tests.gpu``, which runs the GPU tests in an order in which they do not disturb each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as steps
from tests.support.children import run_child
from tests.support.this_machine import find_gpus

pytestmark = pytest.mark.lab

TESTS = """
import pytest

@pytest.mark.parametrize("name", ["a b", "[c]::d"])
def test_skipped(name):
    pytest.skip("needs two GPUs")

def test_passed():
    pass

def test_failed():
    raise ValueError("wrong")
"""


def run(folder: Path, results: str, *arguments: str) -> dict[str, steps.Outcome]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / results}"]
    subprocess.run([*command, *arguments], cwd=folder, capture_output=True, timeout=120, check=False)
    return steps.outcomes([folder / results])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    return tmp_path


def test_no_file_is_forgotten_or_run_twice() -> None:
    files = [*(file for lane in steps.LANES for file in lane), steps.RANKS, *steps.TOGETHER, *steps.ALONE]
    assert sorted(files) == sorted(path.name for path in steps.HERE.glob("test_*.py"))


def test_names_are_those_that_pytest_takes(folder: Path) -> None:
    found = run(folder, "first.xml", "tests/gpu")
    assert sorted(outcome.what for outcome in found.values()) == ["failed", "passed", "skipped", "skipped"]
    assert found["tests/gpu/test_it.py::test_failed"].why == "ValueError: wrong"
    skipped = [test for test, outcome in found.items() if outcome == ("skipped", "needs two GPUs")]
    assert run(folder, "again.xml", *skipped) == {test: found[test] for test in skipped}


def test_of_several_outcomes_the_one_that_says_most_counts(folder: Path) -> None:
    run(folder, "first.xml", "tests/gpu")
    file = folder / "tests" / "gpu" / "test_it.py"
    file.write_text(TESTS.replace('pytest.skip("needs two GPUs")', "pass").replace('raise ValueError("wrong")', "pass"))
    run(folder, "second.xml", "tests/gpu")
    found = steps.outcomes(folder.glob("*.xml"))
    failed = found.pop("tests/gpu/test_it.py::test_failed")
    assert failed.what == "failed"
    assert {outcome.what for outcome in found.values()} == {"passed"}


def test_the_record_says_what_ran_and_how_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTGPU_CYCLES", "10000")
    monkeypatch.delenv("ORTGPU_SOAK_SECONDS", raising=False)
    record = steps._record(find_gpus(), run(folder, "first.xml", "tests/gpu"), {})
    assert record["how much"] == {"ORTGPU_CYCLES": "10000", "ORTGPU_SOAK_SECONDS": "what the test says"}
    assert record["by file"] == {"tests/gpu/test_it.py": "1 failed, 1 passed, 2 skipped"}
    assert record["commit"]


def test_without_a_gpu_nothing_is_said_to_have_passed(tmp_path: Path) -> None:
    if find_gpus().visible:
        pytest.skip("the CUDA driver shows a GPU")
    done = run_child([sys.executable, "-m", "tests.gpu", str(tmp_path)], deadline=120)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("no GPU to test on: ")
