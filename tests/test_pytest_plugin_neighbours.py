"""The pytest plugin beside what it does not know: a project's own fixtures, other plugins, older releases of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortgpu.testing import GPURequirement
from tests.lab.environments import install

pytest_plugins = "pytester"

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "ortgpu.pytest_plugin"
DEADLINE = 100.0

# The machine that inner runs see. What the plugin looks for is counted, and how.
NO_GPU = """
    import os, signal
    import pytest
    from ortgpu import testing
    from ortgpu.errors import NoDeviceError

    def find_gpus():
        with open("looks", "a") as looks:
            looks.write(f"timed={signal.getitimer(signal.ITIMER_REAL)[0] > 0} ")
        return testing.FoundGPUs((), NoDeviceError("CUDA shows no GPU"))

    testing.find_gpus = find_gpus
"""
SMALL_GPU = """
    import pytest
    from ortgpu import testing
    from ortgpu.devices import Device

    GPUS = (Device("cuda", 0, None, None, None, 4 * 2**30, None),)
    testing.find_gpus = lambda: testing.FoundGPUs(GPUS, None)
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ORTGPU_GPU", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    command = (sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments)
    return pytester.run(*command, timeout=DEADLINE)


def test_fixtures_of_the_project_need_no_gpu(pytester: pytest.Pytester) -> None:
    """Only their names are ours."""
    pytester.makeconftest(
        NO_GPU
        + """
    @pytest.fixture
    def gpu_device(): return "theirs"

    @pytest.fixture
    def gpu_session(gpu_device): return gpu_device
    """
    )
    pytester.makepyfile(
        """
        import pytest

        def test_theirs(gpu_device): assert gpu_device == "theirs"
        def test_theirs_through_another(gpu_session): assert gpu_session == "theirs"

        @pytest.mark.parametrize("gpu_devices", ["theirs"])
        def test_a_parameter(gpu_devices): assert gpu_devices == "theirs"
        """
    )
    run(pytester, "--gpu=require").assert_outcomes(passed=3)
    run(pytester, "-m", "gpu").assert_outcomes(deselected=3)
    assert not Path("looks").exists()


def test_fixtures_of_the_project_around_ours_need_one(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NO_GPU + "\n    @pytest.fixture\n    def gpu_device(gpu_device): return gpu_device\n")
    pytester.makepyfile("def test_around(gpu_device): pass\ndef test_plain(): pass")
    run(pytester, "-m", "gpu").assert_outcomes(skipped=1, deselected=1)


def test_a_marker_of_the_project_is_told_whose_it_is(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NO_GPU)
    pytester.makepyfile("import pytest\n@pytest.mark.gpu('A100')\ndef test_theirs(): pass")
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stdout.str() + result.stderr.str()
    assert "takes its values by name, not 'A100'" in said
    assert "-p no:ortgpu" in said
    assert not Path("looks").exists()


def test_no_timeout_counts_the_look(pytester: pytest.Pytester) -> None:
    """Opening a session takes a second, and a minute where a driver hangs: the test has not begun."""
    pytester.makeconftest(NO_GPU)
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it(): pass")
    run(pytester, "-q", "-p", "pytest_timeout", "--timeout=60").assert_outcomes(skipped=1)
    assert Path("looks").read_text(encoding="utf-8") == "timed=False "


@pytest.mark.parametrize("listing", ["--collect-only", "--fixtures", "--fixtures-per-test"])
def test_lists_need_no_look(pytester: pytest.Pytester, listing: str) -> None:
    pytester.makeconftest(NO_GPU)
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it(): pass")
    assert run(pytester, listing).ret == 0
    assert not Path("looks").exists()


def test_a_test_that_was_refused_may_be_tried_again(pytester: pytest.Pytester) -> None:
    """As pytest-rerunfailures does: what the second try says is not the first one's refusal."""
    pytester.makeconftest(
        SMALL_GPU
        + """
    from _pytest.runner import runtestprotocol

    chosen = []

    def choose_gpus(gpus, requirement, *, first):
        chosen.append(first)
        if len(chosen) == 1:
            raise testing.UnmetRequirementError("too little memory is free")
        return gpus

    testing.choose_gpus = choose_gpus

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item, nextitem):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        refused = runtestprotocol(item, nextitem=nextitem, log=False)
        assert refused[0].failed
        item._initrequest()
        runtestprotocol(item, nextitem=nextitem)
        return True
    """
    )
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it(): pytest.skip('of its own accord')")
    run(pytester, "--gpu=require").assert_outcomes(skipped=1)


def test_none_asks_for_nothing(pytester: pytest.Pytester) -> None:
    """It is what `pytest --markers` shows as the default, and takes back what a class or a module asks for."""
    assert GPURequirement.parse(memory=None, compute_capability=None) == GPURequirement()
    pytester.makeconftest(SMALL_GPU)
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.gpu(memory="8GiB")

        def test_of_the_module(): pass

        @pytest.mark.gpu(memory=None)
        def test_of_the_function(): pass
        """
    )
    run(pytester).assert_outcomes(passed=1, skipped=1)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_oldest_pytest(pytester: pytest.Pytester) -> None:
    """Where ortgpu is installed, the plugin is loaded by every run: it must not end those of an older pytest."""
    site = install("pytest-7.0", ["pytest==7.0.1", "pluggy==1.0.0"])
    pytester.makeconftest(NO_GPU)
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass

        @pytest.mark.gpu
        def test_marked(): pass

        @pytest.mark.xfail(strict=True)
        def test_fixture(gpu_device): assert 0
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    for mode, outcome in {"auto": "1 passed, 2 skipped", "require": "1 passed, 2 errors"}.items():
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-W", "error", f"--gpu={mode}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert "pytest-7.0.1" in done.stdout, done.stdout + done.stderr
        assert outcome in done.stdout, done.stdout + done.stderr
