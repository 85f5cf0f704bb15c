"""The pytest plugin on a real GPU: each test is an inner test run in a child process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.children import child_environment, run_child
from tests.support.this_machine import GPUs

from .children import Report

pytestmark = pytest.mark.ortgpu

DEADLINE = 200

CONFTEST = """
    from tests.support.children import report
    from ortgpu import testing

    outcomes, reasons, grown = {}, {}, []
    really_grown = testing._grown

    def note_growth(gpus, before):
        growth = really_grown(gpus, before)
        grown.append([[size, whose] for size, whose in growth])
        report("grown", grown)
        return growth

    testing._grown = note_growth

    def pytest_runtest_logreport(report):
        name = report.nodeid.partition("::")[2]
        if report.when == "call" or not report.passed:
            outcomes[name] = ", ".join(filter(None, [outcomes.get(name), f"{report.when} {report.outcome}"]))
            reasons[name] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)

    def pytest_sessionfinish(session):
        report("outcomes", outcomes)
        report("reasons", reasons)
"""


def inner(folder: Path, tests: str, *arguments: str, env: Mapping[str, str | None] | None = None) -> Report:
    """Run tests with the plugin; what they did is reported as outcomes and reasons, by name of the test."""
    (folder / "conftest.py").write_text(dedent(CONFTEST), encoding="utf-8")
    (folder / "test_inner.py").write_text(dedent(tests), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "ortgpu.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-ra",
        *arguments,
    ]
    unset: dict[str, str | None] = dict.fromkeys(
        ["ORTGPU_GPU", "ORTGPU_REQUIRE_GPU", "PYTEST_ADDOPTS", "PYTEST_PLUGINS"]
    )
    environment = child_environment({**unset, **(env or {})})
    return Report(run_child(command, env=environment, deadline=DEADLINE, cwd=folder))


def test_sessions_open_on_the_gpu_and_are_closed(tmp_path: Path, mlp: Path, gpus: GPUs) -> None:
    tests = f"""
        import numpy as np
        import pytest
        from ortgpu import ExecutionError

        opened = []

        def test_open(gpu_session, gpu_device):
            session = gpu_session({str(mlp)!r}, cpu_nodes="forbid")
            feed = {{x.name: np.zeros([n if isinstance(n, int) else 2 for n in x.shape], np.float32)
                     for x in session.get_inputs()}}
            assert all(np.isfinite(y).all() for y in session.run(None, feed))
            assert session.device == gpu_device
            opened.append((session, feed))

        def test_closed():
            (session, feed), = opened
            with pytest.raises(ExecutionError, match="closed"):
                session.run(None, feed)
        """
    report = inner(tmp_path, tests, "--ortgpu=require")
    assert report["outcomes"] == {"test_open": "call passed", "test_closed": "call passed"}, report["reasons"]
    shown = ", ".join(f"cuda:{gpu.ordinal} ({gpu.name}, {gpu.uuid})" for gpu in gpus.visible)
    assert f"\nortgpu: {shown}\n" in report.child.stdout


def test_the_process_may_still_fork(tmp_path: Path, mlp: Path) -> None:
    """Looking for a GPU starts no CUDA in the process of the tests."""
    tests = f"""
        import os
        import ortgpu

        def test_fork(gpu_device):
            pid = os.fork()
            if pid == 0:
                try:
                    ortgpu.GPUSession({str(mlp)!r}, device=gpu_device.ordinal)
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        """
    report = inner(tmp_path, tests)
    assert report["outcomes"] == {"test_fork": "call passed"}, report["reasons"]


def test_gpus_that_do_not_do(tmp_path: Path, gpus: GPUs) -> None:
    tests = f"""
        import pytest

        @pytest.mark.ortgpu(memory="1TiB")
        def test_memory(): pass

        @pytest.mark.ortgpu(compute_capability=(99, 0))
        def test_capability(): pass

        @pytest.mark.ortgpu(count={len(gpus.visible) + 1})
        def test_count(): pass

        @pytest.mark.ortgpu(count={len(gpus.visible)}, memory="64MiB", compute_capability=(5, 0))
        def test_all_of_it(): pass
        """
    refused = dict.fromkeys(["test_memory", "test_capability", "test_count"])
    report = inner(tmp_path, tests)
    passed = {"test_all_of_it": "call passed"}
    assert report["outcomes"] == {**passed, **dict.fromkeys(refused, "setup skipped")}, report["reasons"]
    assert " GiB free" in report["reasons"]["test_memory"]
    report = inner(tmp_path, tests, "--ortgpu=require")
    assert report["outcomes"] == {**passed, **dict.fromkeys(refused, "setup failed")}


@pytest.mark.parametrize(("mode", "outcome"), [("auto", "setup skipped"), ("require", "setup failed")])
def test_a_gpu_that_is_hidden(tmp_path: Path, mode: str, outcome: str) -> None:
    tests = "def test_it(gpu_session): pass"
    report = inner(tmp_path, tests, f"--ortgpu={mode}", env={"CUDA_VISIBLE_DEVICES": ""})
    assert report["outcomes"] == {"test_it": outcome}
    assert "no GPU can be used: no-device: CUDA_VISIBLE_DEVICES hides" in report["reasons"]["test_it"]


LEAKS = """
    import numpy as np
    import onnx.helper as helper
    import onnx.numpy_helper
    import onnxruntime
    import pytest
    from ortgpu import GPUSession

    pytestmark = pytest.mark.usefixtures("gpu_leak_check")
    kept = []

    def run(session):
        feed = {x.name: np.zeros([n if isinstance(n, int) else 2 for n in x.shape], np.float32)
                for x in session.get_inputs()}
        return session.run(None, feed)

    def large_model():  # 144 MB of weights
        weight = onnx.numpy_helper.from_array(np.ones((6000, 6000), np.float32), "w")
        x, y = (helper.make_tensor_value_info(name, 1, [1, 6000]) for name in "xy")
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "large", [x], [y], [weight])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return model.SerializeToString()

    def test_first_use(gpu_session): run(gpu_session(MLP))
    def test_first_convolution(gpu_session): run(gpu_session(CONV))
    def test_large(gpu_session): run(gpu_session(large_model()))
    def test_closed_by_the_test(gpu_device):
        with GPUSession(large_model(), device=gpu_device.ordinal) as session:
            run(session)
    def test_session_is_kept(gpu_device): kept.append(GPUSession(large_model(), device=gpu_device.ordinal))
    def test_value_is_kept(gpu_device):
        value = np.zeros(256 * 2**20, np.uint8)
        kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", gpu_device.ordinal))
    def test_after_leaks(gpu_session): run(gpu_session(MLP))
    def test_that_fails(gpu_device):
        session = GPUSession(large_model(), device=gpu_device.ordinal)
        assert not session
"""


def test_the_leak_check(tmp_path: Path, mlp: Path, conv: Path) -> None:
    tests = f"MLP, CONV = {str(mlp)!r}, {str(conv)!r}\n{dedent(LEAKS)}"
    report = inner(tmp_path, tests, "--ortgpu=require")
    clean = ["test_first_use", "test_first_convolution", "test_large", "test_closed_by_the_test", "test_after_leaks"]
    leaking = ["test_session_is_kept", "test_value_is_kept"]
    assert report["outcomes"] == {
        **dict.fromkeys(clean, "call passed"),
        **dict.fromkeys(leaking, "call passed, teardown failed"),
        "test_that_fails": "call failed",
    }, (report["reasons"], report.get("grown"))
    for name in leaking:
        assert "GPU memory was left behind: " in report["reasons"][name]
        assert "cuda:0" in report["reasons"][name]


# With pytest-xdist


SPREAD = """
    import os
    import time
    import pytest
    from tests.support.children import report

    @pytest.mark.parametrize("number", range(6))
    def test_it(number, gpu_session, gpu_device):
        session = gpu_session(MLP)
        worker = os.environ["PYTEST_XDIST_WORKER"]
        report(f"{worker} {number}", [session.device.ordinal, session.device.uuid])
        time.sleep(0.5)  # or the first worker has done it all before the second is ready
"""


def devices_of_workers(folder: Path, mlp: Path) -> dict[str, set[tuple[int, str]]]:
    if importlib.util.find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist, which is not installed here")
    tests = f"MLP = {str(mlp)!r}\n{dedent(SPREAD)}"
    report = inner(folder, tests, "-n", "2", "--ortgpu=require")
    assert report.child.returncode == 0, report.child.output
    found: dict[str, set[tuple[int, str]]] = {}
    for name, value in report.child.reports.items():
        if name.startswith("gw"):
            found.setdefault(name.partition(" ")[0], set()).add((value[0], value[1]))
    return found


def test_workers_have_a_gpu_each(tmp_path: Path, mlp: Path, gpus: GPUs) -> None:
    if len(gpus.visible) < 2:
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")
    first, second = gpus.visible[:2]
    assert devices_of_workers(tmp_path, mlp) == {"gw0": {(0, first.uuid)}, "gw1": {(1, second.uuid)}}


def test_workers_share_one_gpu(tmp_path: Path, mlp: Path, gpus: GPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus.visible[0].uuid)
    found = devices_of_workers(tmp_path, mlp)
    assert set(found) == {"gw0", "gw1"}
    assert set.union(*found.values()) == {(0, gpus.visible[0].uuid)}
