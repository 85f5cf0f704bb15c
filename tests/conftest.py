"""Fixtures that every test may ask for."""

import importlib.metadata
import os
from importlib.util import find_spec

import pytest

from tests.support.bytecode import keep_bytecode
from tests.support.this_machine import GPUs, find_gpus

keep_bytecode()  # before most of what is compiled

# Thousands of children import NumPy, and half of the time of that goes to threads that would multiply matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No example has a time limit, because the machine may be busy. An environment for training has no Hypothesis.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

# One variable for these tests, with ortgpu's plugin and without it: see tests/gpu/conftest.py.
if os.environ.get("ORTGPU_REQUIRE_GPU") == "1":
    os.environ.setdefault("ORTGPU_GPU", "require")

pytest.register_assert_rewrite("tests.lab", "tests.support.doctor_runs", "tests.support.preflight_runs")

from tests.lab.fixtures import lab, models, module_lab, stubs, wheels  # noqa: E402 - their assertions are rewritten
from tests.support.staged_sessions import staged_child  # noqa: E402 - it stands below what must come first

__all__ = ["lab", "models", "module_lab", "staged_child", "stubs", "wheels"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return three workers for two cores, since many tests wait. A worker without tests takes some of another.

    The tests of the laboratory use all cores themselves.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "not lab" not in config.option.markexpr:
        return cores
    if config.option.dist == "no":
        config.option.dist = "worksteal"
    return cores * 3 // 2


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for the laboratory. Other tests that carry the marker `lab` say so themselves."""
    for item in items:
        if {"lab", "module_lab"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def provider_library() -> str:
    """Path of the installed CUDA provider."""
    files = importlib.metadata.files("onnxruntime-gpu") or []
    (path,) = [str(file.locate()) for file in files if file.name == "libonnxruntime_providers_cuda.so"]
    return path


@pytest.fixture(scope="session")
def gpus(pytestconfig: pytest.Config) -> GPUs:
    """The GPUs that CUDA shows a fresh process, in its order."""
    found = find_gpus()
    if not found.visible:
        reason = f"needs an NVIDIA GPU: {found.reason}"
        if os.environ.get("ORTGPU_REQUIRE_GPU") == "1" or pytestconfig.getoption("ortgpu", None) == "require":
            pytest.fail(f"a GPU is required, and this host {reason}", pytrace=False)
        pytest.skip(reason)
    return found
