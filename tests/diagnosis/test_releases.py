"""Advice names a release only where the package index has a wheel of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts
from ortgpu.diagnosis.remedies import fixes as remedies
from ortgpu.diagnosis.remedies.releases import (
    FOR_AARCH64,
    FOR_CUDA_12,
    FOR_CUDA_13,
    FOR_OTHER_GPUS,
    Release,
    cuda_major_of,
    newest_for_gpus,
)
from ortgpu.environment.packages.installed import OnnxRuntime
from tests.support.made_facts import HEALTHY

HOST = HEALTHY.environment.host
NOTHING = OnnxRuntime(None, False, (), (), None, None, None, None, None, None)

WINDOWS = {"system": "Windows", "machine": "AMD64", "libc": None}


def facts(cuda: tuple[int, int] | None = None, **host: Any) -> Facts:
    """A machine without ONNX Runtime, and without NVML: ``cuda`` is what libcuda says."""
    environment = HEALTHY.environment
    driver = replace(environment.driver, cuda_version=cuda, nvml=replace(environment.driver.nvml, cuda_version=None))
    return replace(
        HEALTHY,
        environment=replace(
            environment,
            host=replace(environment.host, **host),
            packages=replace(environment.packages, onnxruntime=NOTHING),
            provider=None,
            libraries=(),
            driver=driver,
        ),
    )


@pytest.mark.parametrize(
    ("host", "cuda", "release"),
    [
        ({}, None, FOR_CUDA_13),
        ({}, (13, 1), FOR_CUDA_13),
        ({}, (12, 8), FOR_CUDA_12),
        ({"python": (3, 10, 13)}, (13, 1), FOR_CUDA_12),
        ({"python": (3, 14, 0)}, (12, 8), FOR_CUDA_12),
        (WINDOWS, None, FOR_OTHER_GPUS[0]),  # of an H200, for which the newest wheels for Windows hold no code
        ({"machine": "aarch64"}, None, FOR_AARCH64),
    ],
)
def test_the_release_for_a_machine(host: dict[str, Any], cuda: tuple[int, int] | None, release: Release) -> None:
    problem = find_problems(facts(cuda, **host))[0]
    assert problem.code == "onnxruntime-not-installed"
    (fix,) = problem.fixes
    assert fix.executable
    quote = '"' if host.get("system") == "Windows" else "'"  # cmd.exe knows no other
    wanted = release.requirement if "==" in release.requirement else f"{quote}{release.requirement}{quote}"
    assert fix.endswith(f" install {wanted}")


@pytest.mark.parametrize(
    ("host", "cuda", "words"),
    [
        ({"python": (3, 15, 0)}, None, "use Python 3.11 to 3.14"),
        ({"python": (3, 15, 0)}, (12, 8), "use Python 3.10 to 3.14"),
        ({"libc": "musl"}, None, "glibc 2.28"),
        ({"implementation": "PyPy"}, None, "use CPython"),
        ({"libc": "glibc 2.17"}, None, "glibc 2.28"),
        ({"libc": "glibc 2.31", "machine": "aarch64"}, None, "glibc 2.34"),
        ({"machine": "aarch64"}, (12, 6), "this machine's vendor"),  # a Jetson
    ],
)
def test_no_release_for_a_machine(host: dict[str, Any], cuda: tuple[int, int] | None, words: str) -> None:
    """A command would end with "No matching distribution found"."""
    (fix,) = find_problems(facts(cuda, **host))[0].fixes
    assert not fix.executable
    assert words in fix


@pytest.mark.parametrize(("python", "advised"), [((3, 14, 0), True), ((3, 15, 0), False)])
def test_a_driver_for_cuda_12_is_given_a_release_only_where_there_is_one(
    python: tuple[int, int, int], advised: bool
) -> None:
    environment = replace(
        HEALTHY.environment,
        host=replace(HOST, python=python),
        driver=replace(
            HEALTHY.environment.driver,
            cuda_version=(12, 4),
            kernel_version="550.54",
            nvml=replace(HEALTHY.environment.driver.nvml, driver_version="550.54", cuda_version=(12, 4)),
        ),
    )
    problem = find_problems(replace(HEALTHY, environment=environment))[0]
    assert problem.code == "driver-too-old"
    assert any(FOR_CUDA_12.requirement in fix for fix in problem.fixes) == advised
    assert problem.fixes[0].endswith("or else, to keep the present driver:") == advised, "one of the two is enough"


def test_an_old_gpu_is_given_no_release_that_its_python_cannot_have() -> None:
    maxwell = replace(HEALTHY.environment.driver.nvml.gpus[0], compute_capability=(5, 2))
    nvml = replace(HEALTHY.environment.driver.nvml, gpus=(maxwell,))
    environment = replace(HEALTHY.environment, driver=replace(HEALTHY.environment.driver, nvml=nvml))
    for python, advised in (((3, 12, 1), True), ((3, 13, 0), False)):
        here = replace(environment, host=replace(HOST, python=python))
        problem = find_problems(replace(HEALTHY, environment=here))[0]
        assert problem.code == "unsupported-device"
        assert problem.fixes[0].executable == advised
        assert ("onnxruntime-gpu==1.19.2" in problem.fixes[0]) == advised


@pytest.mark.parametrize(
    ("host", "capability", "requirement"),
    [
        ({}, (9, 0), FOR_CUDA_13.requirement),
        ({}, (7, 0), "onnxruntime-gpu>=1.24,<1.27"),
        ({}, (5, 2), "onnxruntime-gpu==1.19.2"),
        ({}, (10, 0), "onnxruntime-gpu==1.28.0"),
        ({}, (3, 5), FOR_CUDA_13.requirement),  # no release has code for it: the error after the installation says so
        (WINDOWS, (8, 9), FOR_CUDA_13.requirement),
        (WINDOWS, (9, 0), "onnxruntime-gpu==1.28.0"),
        (WINDOWS, (6, 1), "onnxruntime-gpu>=1.24,<1.27"),
    ],
)
def test_where_nothing_is_installed_the_release_is_one_with_code_for_the_gpu(
    host: dict[str, Any], capability: tuple[int, int], requirement: str
) -> None:
    here = facts(**host)
    gpu = replace(HEALTHY.environment.driver.nvml.gpus[0], compute_capability=capability)
    driver = replace(here.environment.driver, nvml=replace(here.environment.driver.nvml, gpus=(gpu,)))
    problem = find_problems(replace(here, environment=replace(here.environment, driver=driver)))[0]
    assert problem.fixes[0].replace('"', "").replace("'", "").endswith(f" install {requirement}")


@pytest.mark.parametrize(("capability", "pinned"), [((7, 0), True), ((7, 5), False)])
def test_an_old_gpu_is_given_a_cudnn_with_code_for_it(capability: tuple[int, int], pinned: bool) -> None:
    """cuDNN 9.11 has none for GPUs before 7.5, and an installer takes the newest that it is not kept from."""
    gpu = replace(HEALTHY.environment.driver.nvml.gpus[0], compute_capability=capability)
    driver = replace(HEALTHY.environment.driver, nvml=replace(HEALTHY.environment.driver.nvml, gpus=(gpu,)))
    here = replace(HEALTHY.environment, driver=driver)
    advised = (remedies.other_release(here, FOR_CUDA_12), remedies.install_libraries(here, ["nvidia-cudnn-cu12~=9.0"]))
    assert [" 'nvidia-cudnn-cu12~=9.0,<9.11'" in fix for fix in advised] == [pinned] * 2
    assert all("nvidia-cudnn-cu12~=9.0" in fix for fix in advised)


def test_the_same_version_again_needs_no_table() -> None:
    """What is installed had a wheel, wherever it came from."""
    here = replace(HEALTHY.environment, host=replace(HOST, python=(3, 15, 0)))
    assert remedies.reinstall_onnxruntime(here).endswith("install onnxruntime-gpu==1.31.1")


@pytest.mark.matrix
@pytest.mark.parametrize("release", [FOR_CUDA_12, FOR_CUDA_13, FOR_AARCH64, *FOR_OTHER_GPUS], ids=str)
def test_the_index_has_what_the_table_says(release: Release) -> None:
    """The index has a wheel of this range for the first and the last Python on each platform, and none for later."""
    import re
    import subprocess
    import sys

    from packaging.requirements import Requirement

    # There is no such release, and pip names every file that it has looked at
    command = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "onnxruntime-gpu==999"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    names = set(re.findall(r"onnxruntime_gpu-([0-9.]+)-cp(\d)(\d+)-cp\d+-([^\s/#]+)\.whl", said))
    assert names, said[-3000:]
    wanted = Requirement(release.requirement).specifier
    first, last = release.pythons
    for system, machine in release.code:
        tag = {"Windows": "win_amd64"}.get(system, machine)
        found = {(int(major), int(minor)) for version, major, minor, ends in names
                 if wanted.contains(version) and tag in ends}  # fmt: skip
        assert {first, last} <= found
        assert max(found) == last


@pytest.mark.parametrize(
    ("version", "cuda"),
    [
        ("1.32.0", 13), ("1.27.0", 13), ("1.27.0.dev20260101", 13),
        ("1.26.9", 12), ("1.26.0", 12), ("1.20.1", 12), ("1.19.0", 12),
        ("1.18.1", 11), ("1.4", 11), ("2.0.0", 13), ("1", None), ("", None),
    ],
)  # fmt: skip
def test_the_cuda_of_a_version(version: str, cuda: int | None) -> None:
    assert cuda_major_of(version) == cuda


@pytest.mark.parametrize(
    ("driver", "requirement"),
    [
        ((13, 0), "onnxruntime-gpu==1.28.0"),
        (None, "onnxruntime-gpu==1.28.0"),
        ((12, 8), "onnxruntime-gpu>=1.24,<1.27"),
        ((12, 0), "onnxruntime-gpu>=1.24,<1.27"),
        ((11, 8), None),
    ],
)
def test_an_older_release_is_one_that_the_driver_supports(
    driver: tuple[int, int] | None, requirement: str | None
) -> None:
    """Each has code for a GPU of compute capability 9.0."""
    found = newest_for_gpus(replace(HEALTHY.environment.host, python=(3, 12, 0)), driver, [(9, 0)])
    assert (found.requirement if found is not None else None) == requirement
