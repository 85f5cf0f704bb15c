"""The plugin beside what it does not know: a project's own fixtures, other plugins, older releases of pytest."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ortgpu import testing
from ortgpu.provider.devices import Device
from ortgpu.testing import GPURequirement, UnmetRequirementError
from tests.lab.environments import install
from tests.pytest_plugin.inner import ONE_OF_EACH, PLUGIN, Faked, GiB, Run, gpu
from tests.support.children import program_text, run_child

pytest_plugins = "pytester"

DEADLINE = 100.0
TIMES = re.compile(r"T[\d:.]+|\d+\.\d+s|time=\S+|==+")
MARKED = "import pytest\n@pytest.mark.ortgpu\ndef test_it(): pass"


TRIES_TWICE = program_text("pytest_plugin.tries_twice")

# A project's own


def test_fixtures_of_the_project_need_no_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    """Only their names are ours."""
    pytester.makeconftest(program_text("pytest_plugin.fixtures_of_the_project_need_no_gpu_conftest"))
    pytester.makepyfile(program_text("pytest_plugin.fixtures_of_the_project_need_no_gpu"))
    run("--ortgpu=require").assert_outcomes(passed=3)
    run("-m", "ortgpu").assert_outcomes(deselected=3)
    assert faked.looks == 0


def test_fixtures_of_the_project_around_ours_need_one(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef gpu_device(gpu_device): return gpu_device\n")
    pytester.makepyfile("def test_around(gpu_device): pass\ndef test_plain(): pass")
    run("-m", "ortgpu").assert_outcomes(skipped=1, deselected=1)


ITS_OWN = {
    "marker": ("", "markers = gpu(kind): a rack of ours\n", []),
    "option": ("def pytest_addoption(parser): parser.addoption('--gpu', type=int)", "", ["--gpu=3"]),
    "flag": ("def pytest_addoption(parser): parser.addoption('--gpu', action='store_true')", "", ["--gpu"]),
    "ini": ("def pytest_addoption(parser): parser.addini('gpu', 'ours')", "gpu = 0\n", []),
}


@pytest.mark.lab
@pytest.mark.parametrize("own", list(ITS_OWN))
def test_gpu_belongs_to_the_project(pytester: pytest.Pytester, run_child: Run, own: str) -> None:
    conftest, ini, arguments = ITS_OWN[own]
    pytester.makeconftest(conftest)
    pytester.makeini(f"[pytest]\n{ini}")
    marks = ["@pytest.mark.gpu", "@pytest.mark.gpu('a100')", "@pytest.mark.gpu(8, rack='b')"] if own == "marker" else []
    tests = [f"{mark}\ndef test_{number}(): pass" for number, mark in enumerate(marks)]
    pytester.makepyfile("\n".join(["import pytest", *tests, "def test_plain(): pass"]))
    result = run_child("-W", "error", "--strict-markers", "--strict-config", *arguments)
    result.assert_outcomes(passed=1 + len(marks))
    if own == "marker":
        run_child("-m", "gpu").assert_outcomes(passed=3, deselected=1)


STRANGER = program_text("pytest_plugin.stranger")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-rA", "--setup-show", "--junitxml=junit.xml"],
        ["--collect-only", "-m", "gpu"],
        ["-p", "xdist", "-n", "1", "-v"],
    ],
    ids=["run", "collect", "xdist"],
)
def test_a_project_that_does_not_use_it_sees_no_difference(
    pytester: pytest.Pytester, run_child: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Every line of the output and of the report, and what is imported: as with `-p no:ortgpu`."""
    if "xdist" in arguments:
        pytest.importorskip("xdist")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers = gpu(kind): a rack of ours")
    pytester.makeconftest(program_text("pytest_plugin.a_project_that_does_not_use_it_sees_no_difference_conftest"))
    pytester.makepyfile(test_stranger=STRANGER)
    junit = pytester.path / "junit.xml"

    def outcome(*blocked: str) -> tuple[int, str, str]:
        result = run_child(*blocked, *arguments)
        report = junit.read_text(encoding="utf-8") if junit.exists() else ""
        seen = result.stdout.str() + result.stderr.str()
        return int(result.ret), TIMES.sub("", seen.replace("ortgpu.pytest_plugin", "")), TIMES.sub("", report)

    with_it = outcome()
    assert with_it == outcome("-p", f"no:{PLUGIN}", "-p", "no:ortgpu")
    assert "test_gpu[2]" in with_it[1]


def test_none_asks_for_nothing(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    """It is what `pytest --markers` shows as the default, and takes back what a class or a module asks for."""
    assert GPURequirement.parse(memory=None, compute_capability=None) == GPURequirement()
    faked.has(gpu(0, uuid=None, total_memory=4 * GiB))
    pytester.makepyfile(program_text("pytest_plugin.none_asks_for_nothing"))
    run().assert_outcomes(passed=1, skipped=1)


# Other plugins


@pytest.mark.parametrize("listing", ["--fixtures", "--fixtures-per-test"])
def test_lists_need_no_look(pytester: pytest.Pytester, run: Run, faked: Faked, listing: str) -> None:
    pytester.makepyfile(MARKED)
    assert run(listing).ret == 0
    assert faked.looks == 0


def test_no_timeout_counts_the_look(pytester: pytest.Pytester, run_child: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a session takes a second, and a minute where a driver hangs: the test has not begun."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(program_text("pytest_plugin.no_timeout_counts_the_look_conftest"))
    pytester.makepyfile(MARKED)
    result = run_child("-q", "-p", "pytest_timeout", "--timeout=60")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no-device: no test is timed"])


def test_a_test_that_was_refused_may_be_tried_again(
    pytester: pytest.Pytester, run: Run, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest-rerunfailures does: what the second try says is not the first one's refusal."""
    faked.has(gpu(0))
    chosen = []

    def choose(gpus: Sequence[Device], _requirement: GPURequirement, *, first: int) -> tuple[Device, ...]:
        chosen.append(first)
        if len(chosen) == 1:
            raise UnmetRequirementError("too little memory is free")
        return tuple(gpus)

    monkeypatch.setattr(testing, "choose_gpus", choose)
    pytester.makeconftest(TRIES_TWICE)
    pytester.makepyfile("import pytest\n@pytest.mark.ortgpu\ndef test_it(): pytest.skip('of its own accord')")
    run("--ortgpu=require").assert_outcomes(skipped=1)


def test_the_try_that_is_shown_says_how_to_mend_it(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    """pytest-rerunfailures shows the last one."""
    pytester.makeconftest(TRIES_TWICE)
    pytester.makepyfile(ONE_OF_EACH)
    result = run("--ortgpu=require")
    result.assert_outcomes(passed=1, errors=2)
    assert result.stdout.str().count("NVML sees 1 GPU") == 1


# Older releases


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_oldest_pytest(pytester: pytest.Pytester) -> None:
    """Where ortgpu is installed, the plugin is loaded by every run: it must not end those of an older pytest."""
    site = install("pytest-7.0", ["pytest==7.0.1", "pluggy==1.0.0"])
    pytester.makeconftest(program_text("pytest_plugin.the_oldest_pytest_conftest"))
    pytester.makepyfile(ONE_OF_EACH)
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(root)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for mode, outcome in {"auto": "1 passed, 2 skipped", "require": "1 passed, 2 errors"}.items():
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-W", "error", f"--ortgpu={mode}"]
        done = run_child(command, env=environment, cwd=Path.cwd(), deadline=DEADLINE)
        assert "pytest-7.0.1" in done.stdout, done.stdout + done.stderr
        assert outcome in done.stdout, done.stdout + done.stderr
