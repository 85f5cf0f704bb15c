"""The fixtures that give a test its GPU and its sessions."""

from __future__ import annotations

import pytest

from ortgpu.errors import ExecutionError
from ortgpu.provider.devices import CPU
from ortgpu.testing import gpu_sessions
from tests.pytest_plugin.inner import Faked, GiB, Run, Session, gpu
from tests.support.children import program_text

pytest_plugins = "pytester"


def test_a_fixture_marks_its_test(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(program_text("pytest_plugin.a_fixture_marks_its_test"))
    run("-m", "ortgpu").assert_outcomes(passed=3, deselected=1)
    run("-m", "not ortgpu").assert_outcomes(passed=1, deselected=3)


def test_a_fixture_that_is_asked_for_late(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile("def test_it(request): request.getfixturevalue('gpu_session')")
    run("--ortgpu=auto").assert_outcomes(skipped=1)
    run("--ortgpu=require").assert_outcomes(failed=1)
    pytester.makepyfile(program_text("pytest_plugin.a_fixture_that_is_asked_for_late"))
    run("--ortgpu=require").assert_outcomes(failed=1)


def test_a_marked_test_is_skipped_before_its_fixtures(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    """A fixture for many tests opens a GPUSession itself, which would raise where there is no GPU."""
    pytester.makepyfile(program_text("pytest_plugin.a_marked_test_is_skipped_before_its_fixtures"))
    run().assert_outcomes(skipped=1)
    faked.has(gpu(0))
    run().assert_outcomes(errors=1)


def test_facts_of_the_device(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0, total_memory=80 * GiB), gpu(1))
    pytester.makepyfile(program_text("pytest_plugin.facts_of_the_device"))
    run().assert_outcomes(passed=1)


def test_sessions_are_opened_on_the_gpu_and_closed(
    pytester: pytest.Pytester, run: Run, faked: Faked, sessions: list[str]
) -> None:
    faked.has(gpu(0, compute_capability=(7, 5)), gpu(1))
    pytester.makepyfile(program_text("pytest_plugin.sessions_are_opened_on_the_gpu_and_closed"))
    run().assert_outcomes(failed=1)
    names = ["first", "second", "third", "fourth", "fifth"]
    devices = [1, "cuda:0", None, None, 1]
    assert sessions == [
        *(f"open {name} on {device}" for name, device in zip(names, devices, strict=True)),
        *(f"close {name}" for name in reversed(names)),
    ]


def test_the_cpu_is_no_gpu(sessions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "device", CPU)
    monkeypatch.setenv("ORTGPU_ALLOW_CPU", "1")
    with gpu_sessions() as open_session:
        with pytest.raises(ExecutionError, match="got one on the CPU") as raised:
            open_session("model")
        assert raised.value.evidence == ("ORTGPU_ALLOW_CPU=1",)
        open_session("meant", allow_cpu=True)
    assert sessions[-2:] == ["close meant", "close model"]
