"""What becomes of a test that needs a GPU: auto, require and skip, by whatever way they are set."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.pytest_plugin.inner import ONE_OF_EACH, Faked, Run, Session, gpu
from tests.support.children import program_text

pytest_plugins = "pytester"

# Modes


def test_auto_skips_with_the_diagnosis(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run()
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] *: no GPU can be used: driver-unusable: cuInit returned 999"])
    assert faked.looks == 1


def test_require_fails_with_the_diagnosis(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run("--ortgpu=require")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "no GPU can be used: driver-unusable: cuInit returned 999",
            "  - NVML sees 1 GPU",
            "    reboot",
            "A GPU is required: --ortgpu=require",
        ]
    )
    assert result.stdout.str().count("NVML sees 1 GPU") == 1, "the second failure need not say it again"


def test_require_fails_where_gpus_do_not_do(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(program_text("pytest_plugin.require_fails_where_gpus_do_not_do"))
    result = run("--ortgpu=require")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["needs 2 GPUs; found cuda:0 (NVIDIA H200, GPU-0)", "A GPU is required: *"])
    result.stdout.no_fnmatch_line("During handling of the above exception*")


def test_require_lets_no_xfail_hide_it(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(program_text("pytest_plugin.require_lets_no_xfail_hide_it"))
    run("--ortgpu=require").assert_outcomes(errors=1)
    run("--ortgpu=auto").assert_outcomes(skipped=1)
    faked.has(gpu(0))
    run("--ortgpu=require").assert_outcomes(xfailed=1)


def test_require_lets_no_xfail_hide_it_in_a_report_for_ci(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    """pytest takes a failed call with an xfail marker for skipped there."""
    pytester.makepyfile(program_text("pytest_plugin.a_fixture_that_is_asked_for_late"))
    run("--ortgpu=require", "--junitxml=report.xml")
    (suite,) = ElementTree.parse(pytester.path / "report.xml").getroot()
    assert suite.attrib["skipped"] == "0"
    assert int(suite.attrib["failures"]) + int(suite.attrib["errors"]) == int(suite.attrib["tests"])


ALLOWING = program_text("pytest_plugin.allowing")


def test_a_marker_lets_a_test_run_on_the_cpu_where_the_variable_allows_it(
    pytester: pytest.Pytester, run: Run, faked: Faked, sessions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Session, "device", gpu(0)
    )  # in the place of a session on the CPU, which would need its argument
    pytester.makepyfile(ALLOWING)
    run().assert_outcomes(skipped=3)
    monkeypatch.setenv("ORTGPU_ALLOW_CPU", "1")
    run().assert_outcomes(passed=2, skipped=1)
    assert sessions == ["open model on None"] * 2 + ["close model"] * 2
    run("--ortgpu=require").assert_outcomes(errors=3)
    run("--ortgpu=skip").assert_outcomes(skipped=3)


def test_the_option_runs_every_test_on_the_cpu_where_the_variable_allows_it(
    pytester: pytest.Pytester, run: Run, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    run("--ortgpu=cpu").stderr.fnmatch_lines(["*--ortgpu=cpu: set ORTGPU_ALLOW_CPU=1, too, *"])
    monkeypatch.setenv("ORTGPU_ALLOW_CPU", "1")
    run().assert_outcomes(passed=1, skipped=2)
    result = run("--ortgpu=cpu")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["ortgpu: none, tests run on the CPU: driver-unusable: cuInit returned 999"])


def test_with_a_gpu_no_test_runs_on_the_cpu(
    pytester: pytest.Pytester, run: Run, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTGPU_ALLOW_CPU", "1")
    faked.has(gpu(0))
    pytester.makepyfile(program_text("pytest_plugin.with_a_gpu_no_test_runs_on_the_cpu"))
    for mode in ("auto", "cpu"):
        run(f"--ortgpu={mode}").assert_outcomes(passed=1, skipped=1)


def test_skip_looks_for_nothing(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run("--ortgpu=skip")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["ortgpu: none is looked for: --ortgpu=skip", "SKIPPED*: needs a GPU, and none is looked for: --ortgpu=skip"]
    )
    assert faked.looks == 0


@pytest.mark.parametrize("first", ["", "@pytest.hookimpl(trylast=True)", "@pytest.hookimpl(tryfirst=True)"])
def test_a_marker_that_a_conftest_adds_counts(pytester: pytest.Pytester, run: Run, faked: Faked, first: str) -> None:
    """A whole folder of tests is marked in this way; they would have passed on the CPU."""
    adds = "def pytest_collection_modifyitems(items):\n    for each in items: each.add_marker(pytest.mark.ortgpu({}))"
    pytester.makepyfile("def test_plain(): pass")
    pytester.makeconftest(f"import pytest\n{first}\n{adds.format('')}")
    run("--ortgpu=auto").assert_outcomes(skipped=1)
    run("--ortgpu=require").assert_outcomes(errors=1)
    faked.has(gpu(0))
    run("--ortgpu=require").assert_outcomes(passed=1)
    pytester.makeconftest(f"import pytest\n{first}\n{adds.format('memory=[]')}")
    run("--ortgpu=auto").assert_outcomes(errors=1)


def test_a_test_that_is_skipped_anyway_needs_no_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(program_text("pytest_plugin.a_test_that_is_skipped_anyway_needs_no_gpu"))
    run("--ortgpu=require", "-q").assert_outcomes(skipped=1)
    assert faked.looks == 0


def test_it_runs_where_there_is_a_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(ONE_OF_EACH)
    for mode in ("auto", "require"):
        run(f"--ortgpu={mode}").assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("option", "variable", "ini", "mode", "source"),
    [
        ("skip", "require", "auto", "skip", "--ortgpu=skip"),
        (None, "skip", "require", "skip", "ORTGPU_GPU=skip"),
        (None, None, "skip", "skip", "ortgpu = skip in the ini file"),
        (None, "", "skip", "skip", "ortgpu = skip in the ini file"),
        ("require", "skip", "skip", "require", "--ortgpu=require"),
        (None, "require", "skip", "require", "ORTGPU_GPU=require"),
        (None, None, "require", "require", "ortgpu = require in the ini file"),
        ("auto", "require", "require", "auto", ""),
        (None, None, None, "auto", ""),
    ],
)
def test_command_line_before_variable_before_ini(
    pytester: pytest.Pytester,
    run: Run,
    faked: Faked,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    variable: str | None,
    ini: str | None,
    mode: str,
    source: str,
) -> None:
    if variable is not None:
        monkeypatch.setenv("ORTGPU_GPU", variable)
    if ini is not None:
        pytester.makeini(f"[pytest]\nortgpu = {ini}")
    pytester.makepyfile(ONE_OF_EACH)
    result = run(*([f"--ortgpu={option}"] if option else []))
    result.assert_outcomes(passed=1, **{"errors" if mode == "require" else "skipped": 2})
    assert faked.looks == (mode != "skip")
    assert source in result.stdout.str()


@pytest.mark.parametrize("where", ["option", "variable", "ini"])
def test_an_unknown_mode_is_a_usage_error(
    pytester: pytest.Pytester, run_child: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pytester.makepyfile("def test_it(): pass")
    if where == "variable":
        monkeypatch.setenv("ORTGPU_GPU", "always")
    if where == "ini":
        pytester.makeini("[pytest]\nortgpu = always")
    result = run_child(*(["--ortgpu=always"] if where == "option" else []))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    named = {"option": "argument --ortgpu: ", "variable": "ORTGPU_GPU=always: ", "ini": "ortgpu = always in the ini"}
    for said in (named[where], "always", "require"):
        assert said in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


# The line below the header


def test_the_line_names_the_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    run().stdout.fnmatch_lines(["collected 3 items", "ortgpu: none: driver-unusable: cuInit returned 999"])
    faked.has(gpu(0), gpu(1))
    run().stdout.fnmatch_lines(["ortgpu: cuda:0 (NVIDIA H200, GPU-0), cuda:1 (NVIDIA H200, GPU-1)"])


@pytest.mark.parametrize("arguments", [["-m", "not ortgpu"], ["--collect-only"], ["-q", "-k", "plain"]])
def test_nothing_is_looked_for_without_need(
    pytester: pytest.Pytester, run: Run, faked: Faked, arguments: list[str]
) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run(*arguments)
    result.stdout.no_fnmatch_line("ortgpu: *")
    assert faked.looks == 0
    assert result.ret == 0
