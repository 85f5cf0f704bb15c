"""The plugin among the workers of pytest-xdist."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.inner import Run

pytest_plugins = "pytester"


def spread(pytester: pytest.Pytester, gpus: int) -> None:
    """Inner tests that write down which worker has which GPU, on a machine with so many."""
    pytester.makeconftest(
        f"""
        from ortgpu import testing
        from ortgpu.devices import Device

        gpus = tuple(
            Device("cuda", n, f"GPU-{{n}}", "NVIDIA H200", (9, 0), 1, "580.65.06") for n in range({gpus})
        )
        testing.find_gpus = lambda: testing.FoundGPUs(gpus, None)
        """
    )
    pytester.makepyfile(
        """
        import os, pathlib, pytest, time

        @pytest.mark.parametrize("number", range(8))
        def test_it(number, gpu_device):
            worker = os.environ["PYTEST_XDIST_WORKER"]
            pathlib.Path(f"{worker}-{gpu_device.ordinal}").touch()
            time.sleep(0.1)

        def test_plain(): pass
        """
    )


@pytest.mark.parametrize(("gpus", "expected"), [(2, {"gw0-0", "gw1-1"}), (1, {"gw0-0", "gw1-0"})])
def test_workers_are_spread_over_the_gpus(
    pytester: pytest.Pytester, run_child: Run, gpus: int, expected: set[str]
) -> None:
    pytest.importorskip("xdist")
    spread(pytester, gpus)
    result = run_child("-n", "2")
    result.assert_outcomes(passed=9)
    assert {path.name for path in pytester.path.glob("gw*-*")} == expected
    if gpus == 2:
        result.stdout.fnmatch_lines(
            ["ortgpu: gw0: cuda:0 (NVIDIA H200, GPU-0)", "ortgpu: gw1: cuda:1 (NVIDIA H200, GPU-1)"], consecutive=True
        )
    else:
        result.stdout.fnmatch_lines(["ortgpu: gw0, gw1: cuda:0 (NVIDIA H200, GPU-0)"])


def test_workers_refuse_wrong_markers(pytester: pytest.Pytester, run_child: Run) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.ortgpu(cuont=2)
        def test_it(): print("a test ran")
        """
    )
    result = run_child("-n", "2", "-s")
    said = result.stdout.str() + result.stderr.str()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in said
    assert "test_workers_refuse_wrong_markers.py::test_it: @pytest.mark.ortgpu: cuont is not known" in said
    assert "a test ran" not in said
