"""What a failed open asks of an environment: no more than it leaves open."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.diagnosis.checks import devices
from ortgpu.diagnosis.diagnosing import CHECKS, CHECKS_OF_THE_DRIVER, CHECKS_WITHOUT_A_DRIVER, why_unusable
from ortgpu.environment import inspection
from ortgpu.environment.gpu.cuda import CudaState
from ortgpu.provider.runtime import Runtime
from tests.support.made_facts import AVAILABLE, HEALTHY, NO_DRIVER, SEEN_HEALTHY


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The facts that are read, in their order. The machine has no driver, and is healthy but for that."""
    names: list[str] = []

    def reading(name: str) -> Callable[..., Any]:
        def read(*_: object) -> Any:
            names.append(name)
            return NO_DRIVER(HEALTHY).environment.driver if name == "driver" else getattr(HEALTHY.environment, name)

        return read

    for name in inspection._FACTS:
        monkeypatch.setitem(inspection._FACTS, name, reading(name))
    return names


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """ONNX Runtime as it is when every library is loaded, and the driver is not there."""
    folder = tmp_path / "onnxruntime"
    (folder / "capi").mkdir(parents=True)
    (folder / "capi" / "libonnxruntime_providers_shared.so").symlink_to(sys.executable)
    (tmp_path / "onnxruntime_gpu-1.31.1.dist-info").mkdir()
    report = SEEN_HEALTHY.observed.preload
    assert report is not None
    packages = HEALTHY.environment.packages
    installed = replace(packages.onnxruntime, folder=str(folder))
    module: Any = SimpleNamespace(get_available_providers=lambda: AVAILABLE)
    return Runtime(replace(packages, onnxruntime=installed), module, None, preload=replace(report, driver_missing=True))


def code_of(runtime: Runtime) -> str:
    error = why_unusable(runtime, cuda=CudaState(None, None, 1))
    assert error is not None
    return error.code


@pytest.mark.skipif(sys.platform != "linux", reason="a program of Linux stands for the library")
def test_a_missing_driver_is_told_without_the_packages(runtime: Runtime, asked: list[str]) -> None:
    assert code_of(runtime) == "driver-not-found"
    assert set(asked) == {"driver", "host", "variables"}


def forget_bridge(folder: Path) -> None:
    (folder / "onnxruntime" / "capi" / "libonnxruntime_providers_shared.so").unlink()


def add_cpu_package(folder: Path) -> None:
    (folder / "onnxruntime-1.31.1.dist-info").mkdir()


@pytest.mark.parametrize("change", [forget_bridge, add_cpu_package])
def test_packages_are_asked_where_they_are_in_doubt(
    runtime: Runtime, asked: list[str], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    change(tmp_path)
    assert code_of(runtime) == "driver-not-found"
    assert {"packages", "libraries"} <= set(asked)


@pytest.mark.parametrize("fault", [{"import_error": "ImportError: x"}, {"provider_error": "x"}, {"preload": None}])
def test_packages_are_asked_if_something_else_failed(runtime: Runtime, asked: list[str], fault: dict[str, Any]) -> None:
    code_of(replace(runtime, **fault))
    assert "packages" in asked


def test_the_checks_of_the_driver_are_all_there_in_the_same_order() -> None:
    of_the_driver = [check for check in CHECKS if check in CHECKS_OF_THE_DRIVER]
    assert of_the_driver == list(CHECKS_OF_THE_DRIVER)
    assert [check for check in CHECKS_OF_THE_DRIVER if check in CHECKS_WITHOUT_A_DRIVER] == list(
        CHECKS_WITHOUT_A_DRIVER
    )
    modules = {"devices", "driver"}
    others = {check for check in CHECKS if check.__module__.rpartition(".")[2] in modules} - set(of_the_driver)
    assert others == {devices.cudnn_without_code}, "an open session asks the cuDNN that it has loaded"


@pytest.mark.skipif(sys.platform != "linux", reason="a program of Linux stands for the library")
@pytest.mark.parametrize("cause", [None, RuntimeError("CUDA failure 999: unknown error")])
def test_a_driver_that_fails_is_explained_without_the_packages(
    runtime: Runtime, asked: list[str], monkeypatch: pytest.MonkeyPatch, cause: Exception | None
) -> None:
    """Also if ONNX Runtime's constructor met the failure."""
    monkeypatch.setitem(inspection._FACTS, "driver", lambda _: HEALTHY.environment.driver)
    runtime = replace(runtime, preload=SEEN_HEALTHY.observed.preload)
    error = why_unusable(runtime, cuda=CudaState(999, None, 1), cause=cause)
    assert (error.code if error is not None else None) == "driver-unusable"
    assert {"packages", "libraries"}.isdisjoint(asked)


def test_an_exception_that_is_not_about_the_gpu_starts_no_diagnosis(runtime: Runtime, asked: list[str]) -> None:
    cause = RuntimeError("[ONNXRuntimeError] : 10 : INVALID_GRAPH : Load model failed: not a registered input")
    assert why_unusable(runtime, cuda=CudaState(0, (), 1), cause=cause) is None
    assert {"packages", "libraries", "installer"}.isdisjoint(asked)
