"""How the plugin comes into a test run, and what it costs there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ortgpu
from tests.pytest_plugin.inner import ONE_OF_EACH, PLUGIN, Faked, Run
from tests.support.children import program_text

pytest_plugins = "pytester"


def is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))


@pytest.mark.parametrize("named", [True, False], ids=["-p", "entry point"])
def test_start_up_imports_nothing_heavy(pytester: pytest.Pytester, named: bool) -> None:
    pytester.makeconftest(program_text("pytest_plugin.start_up_imports_nothing_heavy_conftest"))
    pytester.makepyfile("def test_plain(): pass")
    arguments = ["-p", PLUGIN] if named else []
    if not named and not is_installed():
        pytest.skip("ortgpu is importable here and not installed: there is no entry point")
    result = pytester.runpytest_subprocess("-s", "-p", "no:hypothesispytest", *arguments)
    result.assert_outcomes(passed=1)
    assert "heavy: [], ours: ['ortgpu', 'ortgpu.pytest_plugin']" in result.stdout.str()


@pytest.mark.parametrize("way", ["-p twice", "-p and the entry point's name", "conftest", "variable"])
def test_loading_it_in_several_ways(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, faked: Faked, way: str
) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    arguments = ["-p", PLUGIN]
    if way == "-p twice":
        arguments += ["-p", PLUGIN]
    elif way == "-p and the entry point's name":
        arguments = ["-p", "ortgpu", "-p", PLUGIN] if is_installed() else ["-p", PLUGIN, "-p", "ortgpu"]
    elif way == "conftest":
        pytester.makeconftest(f"pytest_plugins = [{PLUGIN!r}]")
        arguments = [] if is_installed() else arguments
    else:
        monkeypatch.setenv("PYTEST_PLUGINS", PLUGIN)
        arguments = []
    pytester.runpytest_inprocess(*arguments, "--ortgpu=auto").assert_outcomes(passed=1, skipped=2)


def test_the_package_may_be_imported_before_pytest(pytester: pytest.Pytester, run_child: Run) -> None:
    """By ``ortgpu exec``, for instance. pytest marks the packages of installed plugins as this conftest does."""
    pytester.makeconftest("import ortgpu, pytest; pytest.register_assert_rewrite('ortgpu')")
    pytester.makepyfile("def test_plain(): pass")
    run_child("-W", "error").assert_outcomes(passed=1)


def test_the_guard_may_wait_before_pytest(
    pytester: pytest.Pytester, run_child: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORTGPU_ENFORCE=1 and ``ortgpu exec`` import its file at the start, and it is among those of the package."""
    startup = Path(ortgpu.__file__).parent / "session" / "guard" / "startup"
    monkeypatch.setenv("PYTHONPATH", str(startup), prepend=os.pathsep)
    pytester.makeconftest("import _ortgpu_waiting, pytest; pytest.register_assert_rewrite('_ortgpu_waiting')")
    pytester.makepyfile("def test_plain(): pass")
    run_child("-W", "error").assert_outcomes(passed=1)


def test_it_can_be_left_out(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--ortgpu', type=int)")
    pytester.makepyfile("def test_theirs(request): assert request.config.getoption('ortgpu') == 3")
    pytester.runpytest_inprocess("-p", "no:ortgpu", "--ortgpu=3").assert_outcomes(passed=1)


@pytest.mark.parametrize("declared", [False, True])
def test_the_marker_is_registered(pytester: pytest.Pytester, run: Run, faked: Faked, declared: bool) -> None:
    if declared:
        pytester.makeini("[pytest]\nmarkers = ortgpu: ours")
    pytester.makepyfile(ONE_OF_EACH)
    run("--strict-markers", "--strict-config").assert_outcomes(passed=1, skipped=2)
    run("--markers").stdout.fnmatch_lines(["@pytest.mark.ortgpu(count=1, memory=None, *): needs*"])
