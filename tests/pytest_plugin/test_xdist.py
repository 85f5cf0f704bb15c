"""The plugin among the workers of pytest-xdist."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.pytest_plugin.inner import Run
from tests.support.children import program_text

pytestmark = pytest.mark.lab

pytest_plugins = "pytester"


def spread(pytester: pytest.Pytester, gpus: int) -> None:
    """Inner tests that write down which worker has which GPU, on a machine with so many."""
    pytester.makeconftest(
        f"""
        from ortgpu import testing
        from ortgpu.provider.devices import Device

        gpus = tuple(
            Device("cuda", n, f"GPU-{{n}}", "NVIDIA H200", (9, 0), 1, "580.65.06") for n in range({gpus})
        )
        testing.find_gpus = lambda: testing.FoundGPUs(gpus, None)
        """
    )
    pytester.makepyfile(program_text("pytest_plugin.spread"))


@pytest.mark.parametrize(
    ("gpus", "expected"), [(2, {"gw0-0", "gw1-1"}), pytest.param(1, {"gw0-0", "gw1-0"}, marks=pytest.mark.slow)]
)
def test_workers_are_spread_over_the_gpus(
    pytester: pytest.Pytester, run_child: Run, gpus: int, expected: set[str]
) -> None:
    pytest.importorskip("xdist")
    spread(pytester, gpus)
    result = run_child("-n", "2")
    result.assert_outcomes(passed=9)
    assert {path.name for path in pytester.path.glob("gw*-*")} == expected


def looks(pytester: pytest.Pytester, first: str = "") -> None:
    """Inner tests on both workers, that write down which process looked for GPUs, and what was shown to it."""
    spread(pytester, 2)
    conftest = pytester.path / "conftest.py"
    conftest.write_text(
        conftest.read_text(encoding="utf-8")
        + dedent(
            f"""
            import os, time

            find_gpus = testing.find_gpus
            worker = os.environ.get("PYTEST_XDIST_WORKER")
            {first}

            def note_and_find():
                with open("looks", "a") as file:
                    file.write(f"{{os.environ.get('CUDA_VISIBLE_DEVICES')}}\\n")
                time.sleep(1)  # the other worker comes meanwhile
                if os.path.exists("crash"):
                    os.remove("crash")
                    os._exit(1)
                return find_gpus()

            testing.find_gpus = note_and_find
            """
        ),
        encoding="utf-8",
    )


def test_one_worker_looks_for_all(pytester: pytest.Pytester, run_child: Run) -> None:
    """Opening a session takes a second of a GPU, and a minute where a driver hangs: not for each worker."""
    pytest.importorskip("xdist")
    looks(pytester)
    run_child("-n", "2").assert_outcomes(passed=9)
    assert (pytester.path / "looks").read_text().splitlines() == ["None"]
    assert {path.name for path in pytester.path.glob("gw*-*")} == {"gw0-0", "gw1-1"}


def test_a_worker_that_sees_other_gpus_looks_itself(pytester: pytest.Pytester, run_child: Run) -> None:
    """A conftest may give each worker its GPU by the variable."""
    pytest.importorskip("xdist")
    looks(pytester, first="os.environ['CUDA_VISIBLE_DEVICES'] = str(worker)[-1:]")
    run_child("-n", "2").assert_outcomes(passed=9)
    assert sorted((pytester.path / "looks").read_text().split()) == ["0", "1"]


def test_a_worker_that_dies_while_it_looks_holds_nobody_up(pytester: pytest.Pytester, run_child: Run) -> None:
    pytest.importorskip("xdist")
    looks(pytester)
    (pytester.path / "crash").touch()
    result = run_child("-n", "2")
    result.assert_outcomes(passed=9)
    assert (pytester.path / "looks").read_text().splitlines() == ["None"] * 2


def test_workers_that_share_no_folder_look_each(pytester: pytest.Pytester, run_child: Run) -> None:
    pytest.importorskip("xdist")
    looks(pytester)
    run_child("-n", "2", "-p", "no:tmpdir").assert_outcomes(passed=9)
    assert (pytester.path / "looks").read_text().splitlines() == ["None"] * 2


def test_workers_refuse_wrong_markers(pytester: pytest.Pytester, run_child: Run) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(program_text("pytest_plugin.workers_refuse_wrong_markers"))
    result = run_child("-n", "2", "-s")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["@pytest.mark.ortgpu: cuont is not known: *"])
    result.stdout.no_fnmatch_line("*a test ran*")
