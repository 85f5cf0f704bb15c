"""GPU memory that a test leaves behind."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from ortgpu import testing
from ortgpu.testing import UnmeasurableMemoryError, gpu_leak_check
from tests.pytest_plugin.inner import Faked, GiB, Memory, Run, Session, gpu
from tests.support.children import program_text, run_python

pytest_plugins = "pytester"


@pytest.mark.lab
@pytest.mark.parametrize("shown", [True, False], ids=["process is shown", "process is not shown"])
def test_a_leak(memory: Memory, shown: bool) -> None:
    memory.own = memory.own if shown else None
    with gpu_leak_check([gpu(0)]):
        memory.take(testing.LEAK_MARGIN)
    left = r"GPU memory was left behind: 65 MiB more on cuda:0 .*; up to 64 MiB are no leak"
    with pytest.raises(AssertionError, match=left), gpu_leak_check([gpu(0)]):
        memory.take(testing.LEAK_MARGIN + testing.MiB)
    whose = "by this process" if shown else "by all processes"
    with pytest.raises(AssertionError, match=whose), gpu_leak_check([gpu(0)]):
        memory.take(testing.LEAK_MARGIN + 1)


def test_other_processes_do_not_matter_where_this_one_is_shown(memory: Memory) -> None:
    with gpu_leak_check([gpu(0)], shared=True):
        memory.all = 140 * GiB


def test_memory_may_take_a_moment_to_come_back(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_SETTLING", 60.0)  # it ends with the reading that finds it back
    with gpu_leak_check([gpu(0)]):
        memory.take(GiB)
        memory.after = {4: 600 * testing.MiB}
    assert memory.reads == 4


def test_what_cannot_be_measured(memory: Memory) -> None:
    memory.own = None
    with (
        pytest.raises(UnmeasurableMemoryError, match="other processes use it too"),
        gpu_leak_check([gpu(0)], shared=True),
    ):
        pass
    memory.all = None
    with pytest.raises(UnmeasurableMemoryError, match="does not say how much"), gpu_leak_check([gpu(0)]):
        pass


def test_nvml_that_fails_meanwhile(memory: Memory) -> None:
    memory.own = None
    with pytest.raises(UnmeasurableMemoryError, match="no longer"), gpu_leak_check([gpu(0)]):
        memory.all = None


def test_what_was_raised_inside_is_not_replaced(memory: Memory) -> None:
    def run() -> None:
        with gpu_leak_check([gpu(0)]):
            memory.take(GiB)
            raise KeyError

    with pytest.raises(KeyError):
        run()


def test_what_warms_up_a_gpu() -> None:
    """The models are right, and the second time nothing is done. On the CPU, which takes the place of the GPU."""
    code = "pytest_plugin_children.warming.what_warms_up_a_gpu"
    run_python(dedent(code)).ok()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, memory: Memory, sessions: list[str]) -> None:
    """Each object of the inner tests' class Held, and each session, holds a GiB while it lives or is open."""
    opened, closed = Session.__init__, Session.close

    def open_(self: Session, *arguments: Any, **options: Any) -> None:
        memory.take(GiB)
        opened(self, *arguments, **options)

    def close(self: Session) -> None:
        memory.take(-GiB)
        closed(self)

    monkeypatch.setattr(Session, "__init__", open_)
    monkeypatch.setattr(Session, "close", close)
    monkeypatch.setattr(testing, "hold", memory.take, raising=False)


LEAKS = program_text("pytest_plugin.leak_check_leaks")


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("body", "outcomes"),
    [
        ("def test_it(gpu_leak_check): kept.append(Held())", {"passed": 1, "errors": 1}),
        ("def test_it(gpu_leak_check): Held()", {"passed": 1}),
        ("def test_it(gpu_session, gpu_leak_check): gpu_session('model')", {"passed": 1}),
        ("def test_it(gpu_leak_check, gpu_session): gpu_session('model')", {"passed": 1}),
        ("def test_it(gpu_leak_check, value): pass", {"passed": 1}),
        ("def test_it(value, gpu_leak_check): pass", {"passed": 1}),
        ("def test_it(gpu_leak_check): held = Held(); assert 0", {"failed": 1}),
        ("def test_it(gpu_leak_check): kept.append(Held()); pytest.skip('no')", {"skipped": 1}),
    ],
)
def test_the_leak_check_of_a_test(
    pytester: pytest.Pytester, run: Run, faked: Faked, body: str, outcomes: dict[str, int]
) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(dedent(LEAKS) + "\n" + body)
    result = run()
    result.assert_outcomes(**outcomes)
    if "errors" in outcomes:
        result.stdout.fnmatch_lines(
            [
                "*ERROR at teardown of test_it*",
                "GPU memory was left behind: 1.0 GiB more on cuda:0 (NVIDIA H200, GPU-0)*",
            ]
        )
        result.stdout.no_fnmatch_line("During handling of the above exception*")


@pytest.mark.usefixtures("held")
def test_a_run_that_is_interrupted_ends_as_ever(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    """Fixtures are then torn down after the run: what is said of leaks would be a traceback of pytest's."""
    faked.has(gpu(0))
    pytester.makepyfile(f"{dedent(LEAKS)}\ndef test_it(gpu_leak_check): kept.append(Held()); pytest.exit('enough')")
    result = run()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_a_leak_check_that_cannot_look(pytester: pytest.Pytester, run: Run, faked: Faked, memory: Memory) -> None:
    memory.own = memory.all = None
    faked.has(gpu(0))
    pytester.makepyfile("def test_it(gpu_leak_check): pass")
    result = run()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*NVML does not say how much memory of cuda:0 * is in use"])
    required = run("--ortgpu=require")
    required.assert_outcomes(errors=1)
    required.stdout.no_fnmatch_line("During handling of the above exception*")
