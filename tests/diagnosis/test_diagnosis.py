"""Judgement alone, over made facts: nothing is wrong with a healthy machine, and each change is one finding.

What the facts are on real broken environments is for ``test_broken_environments.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ortgpu import diagnose
from ortgpu.diagnosis.checks.surroundings import visible_gpus
from ortgpu.diagnosis.diagnosing import CHECKS, Diagnosis, find_problems
from ortgpu.environment.gpu.cuda import CudaState
from ortgpu.environment.gpu.driver import GPU, RefusedNode
from ortgpu.environment.libraries.wheel import Architecture
from ortgpu.environment.packages.installed import Distribution
from ortgpu.errors import GPUError
from ortgpu.model.contents import ModelFacts
from tests import faults
from tests.support.diagnosis_cases import CASES, OLD_DRIVER, OLD_GPU, PLUGIN, WITHOUT_LIBRARY, Case
from tests.support.made_facts import (
    CPU_ENGINE,
    CPU_ENGINE_THERE,
    CUDA_H200,
    CUDNN_13,
    ENGINE,
    H200,
    HEALTHY,
    NO_DRIVER,
    NO_ENGINE,
    NO_LIBRARIES,
    SEEN_HEALTHY,
    SITE,
    UUID,
    Change,
    all_of,
    assert_in_order,
    cuda_failed,
    engine,
    environment,
    gpus,
    nvml,
    observed,
    owned,
    part,
    probed,
    processes,
    refused,
    request,
    resolution,
    variables,
    without,
)

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def roots(problems: tuple[GPUError, ...]) -> list[str]:
    return [type(one).__name__ for one in problems if one.consequence_of is None]


# A healthy machine

HARMLESS: dict[str, Change] = {
    "facts alone": lambda facts: facts,
    "everything tried": lambda facts: replace(SEEN_HEALTHY, environment=facts.environment),
    "in a container": part("host", container="docker"),
    "a CPU build that is shadowed": engine(elsewhere=(replace(CPU_ENGINE, location="/usr"),)),
    "a meta-package beside the plugin that it requires": engine(
        plugins=(PLUGIN, replace(WITHOUT_LIBRARY, name="onnxruntime-ep-cuda", folder=None))
    ),
    "licences trimmed": owned(missing_files=("onnxruntime/LICENSE", "onnxruntime/tools/check.py")),
    "a library that is not used has another size": part(
        "packages",
        nvidia=(Distribution("nvidia-cublas", "13.1.0", SITE, altered_files=("nvidia/cu13/lib/libnvblas.so.13",)),),
    ),
    "cuDNN's wheels for two CUDAs": part(
        "packages",
        nvidia=(
            Distribution("nvidia-cudnn-cu12", "9.9", SITE),
            Distribution("nvidia-cudnn-cu13", "9.9", SITE, altered_files=("nvidia/cudnn/lib/libcudnn.so.9",)),
        ),
    ),
    "no metadata": engine(owners=(), build_name=None, build_version=None),
    "built by oneself": engine(owners=(replace(ENGINE, name="onnxruntime"),), build_name="onnxruntime"),
    "no NVML": nvml(available=False, error="not found", driver_version=None, cuda_version=None, gpus=()),
    "one GPU of two kept from this job": part(
        "driver",
        device_nodes=("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"),
        refused_nodes=(RefusedNode("/dev/nvidia1", "EPERM", "root"),),
    ),
    "files that CUDA does not seem to need": all_of(
        refused(RefusedNode("/dev/nvidiactl", "EACCES", "video")), observed(cuda=CudaState(0, (CUDA_H200,), 1))
    ),
    "nothing known of the driver": part("driver", cuda_version=None, kernel_version=None, device_nodes=()),
    "nothing known of the GPU": nvml(gpus=(GPU(0, None, None, None, None, None, None, None, (), None),)),
    "no fat binary": part("provider", architectures=None),
    "an older forward-compatible driver": nvml(cuda_version=(12, 2)),
    "one of two GPUs": all_of(gpus((9, 0), (9, 0)), variables(CUDA_VISIBLE_DEVICES="1")),
    "a GPU by UUID": variables(CUDA_VISIBLE_DEVICES=UUID[:12]),
    "a MIG instance": all_of(
        nvml(gpus=(replace(H200, mig_uuids=("MIG-1",)),)), variables(CUDA_VISIBLE_DEVICES="MIG-1")
    ),
    "one GPU of two that is held": all_of(processes("exclusive-process"), request(device=0)),
    "one GPU of two that is known": gpus((6, 1), (9, 0)),
    "a GPU of which less is known beside an old one": all_of(
        observed(
            cuda=CudaState(
                0,
                (
                    replace(CUDA_H200, compute_capability=None),
                    replace(CUDA_H200, ordinal=1, uuid="GPU-2", compute_capability=(6, 1)),
                ),
                1,
            )
        ),
        request(device="auto"),
    ),
    "a GPU that is asked for": request(device=UUID),
    "the emptiest GPU": request(device="auto"),
    "no cuDNN, and none wanted": all_of(without(CUDNN_13), request(cudnn_disabled=True)),
    "CUDA could not be asked": observed(cuda=CudaState(None, None, 1)),
    "CUDA 1.27 in the extension": observed(
        import_error="ImportError: libcudart.so.13: cannot open shared object file: No such file"
    ),
    "a cuDNN without code for one GPU of two": all_of(
        gpus((7, 0), (9, 0)),
        part("provider", architectures=(Architecture(7, 0, False, False), Architecture(9, 0, False, False))),
        environment(cudnn_architectures=(Architecture(9, 0, False, False),)),
        request(cudnn_operators=("Conv",)),
    ),
    "a cuDNN without code that is not to be used": all_of(OLD_GPU, request(cudnn_disabled=True)),
    "PTX that is not needed is passed over": variables(CUDA_DISABLE_PTX_JIT="1"),
    "machine code is not passed over": variables(CUDA_FORCE_PTX_JIT="0"),
    "a Jetson": part("driver", device_nodes=("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap")),
    "a file that the first cuInit makes": part("driver", device_nodes=("/dev/nvidia0", "/dev/nvidiactl")),
    "one GPU of two that is lost": nvml(error="GPU is lost", code=15),
    "WSL": all_of(
        part("host", wsl=True),
        part("driver", libcuda="/usr/lib/wsl/lib/libcuda.so.1", device_nodes=("/dev/dxg",), kernel_version=None),
    ),
    "a MIG instance in a GPU that says nothing of MIG": all_of(
        nvml(gpus=(replace(H200, mig_enabled=None),)), variables(CUDA_VISIBLE_DEVICES="MIG-1")
    ),
    "the probe did not start": probed(died_in="start"),
    "a model of usual operators": request(
        model=ModelFacts("m.onnx", operators=frozenset({("Conv", ""), ("Gelu", "com.microsoft")}))
    ),
    "a build with collective operators": all_of(
        request(collective_operators=("AllReduce",)), observed(has_collective_ops=True)
    ),
    "two older parts of cuDNN": environment(
        libraries=(*HEALTHY.environment.libraries, resolution("libcudnn_ops_infer.so.9", found=False))
    ),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_nothing_is_wrong(change: Change) -> None:
    assert [str(problem) for problem in find_problems(change(HEALTHY))] == []


# One change, one finding


@EACH
def test_one_change_is_one_finding(case: Case) -> None:
    problems = find_problems(case.change(HEALTHY))
    assert roots(problems) == [case.error], [str(problem) for problem in problems]
    found = problems[0]
    assert found.severity == case.severity
    assert case.says in str(found)
    assert {name: found.details()[name] for name in case.details} == case.details
    assert all(problem.consequence_of == found.code for problem in problems[1:])


@EACH
def test_a_finding_says_what_failed_why_and_what_to_do(case: Case) -> None:
    for found in find_problems(case.change(HEALTHY)):
        assert found.summary
        assert "\n" not in found.summary
        assert "None" not in str(found)
        assert "  " not in found.summary
        assert found.evidence
        assert found.fixes or found.code in ("provider-fallback", "provider-error"), "only the last resorts know none"
        assert all(fix.strip() and fix == fix.strip() for fix in found.fixes)


@EACH
def test_a_change_of_a_machine_on_which_everything_was_tried(case: Case) -> None:
    """What was observed before does not hide what is wrong with the facts, except where it contradicts them."""
    changed = case.change(SEEN_HEALTHY)
    problems = find_problems(changed)
    known_by_now = {"NoDeviceError", "UnsupportedDeviceError", "DeviceBusyError"}  # CUDA's answer is the better one
    libraries = {"LibraryNotFoundError", "LibraryVersionError"}  # what was loaded is there
    if case.error in libraries | known_by_now and not problems:
        return
    assert roots(problems) == [case.error], [str(problem) for problem in problems]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_single_thing_is_not_spoken_of_as_several(case: Case) -> None:
    text = "\n".join(map(str, find_problems(case.change(HEALTHY))))
    things = r"(?<![\d.,:_-])1 (?:of (?:\d+|the|its) )?(?:files|nodes|libraries|copies|packages|devices)"
    assert re.findall(rf"{things} (?:are|compute|need)\b", text) == []
    assert re.findall(r"(?<![\d.,:_-])1 (?:files|nodes|libraries|copies|packages|devices)\b", text) == []


def test_every_check_finds_something() -> None:
    """No check is dead: each reports at least one of the cases, or alone has the error of a case of the laboratory."""
    reporting = {check for case in CASES for check in CHECKS if check(case.change(HEALTHY)) is not None}
    names = Counter(name for check in CHECKS for name in check.__code__.co_names)
    played = {case.error for case in faults.CASES if names[case.error] == 1}
    in_the_laboratory = {check for check in CHECKS if not played.isdisjoint(check.__code__.co_names)}
    assert [check.__name__ for check in CHECKS if check not in reporting | in_the_laboratory] == []


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("0x0", ["A"]), ("1gpu,0", ["B", "A"]), (" +1", ["B"]), ("0,0", []), ("1,gpu,0", ["B"]), ("GPU-", []),
        ("GPU-a", ["A"]), ("0,-1,1", ["A"]), ("99999999999999999999", []), ("0;1", ["A"]), ("0,5,1", ["A"]),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_reads_them(value: str, seen: list[str]) -> None:
    two = tuple(replace(H200, index=number, name=name, uuid=f"GPU-{name}") for number, name in enumerate("AB"))
    facts = all_of(nvml(gpus=two), variables(CUDA_VISIBLE_DEVICES=value))(HEALTHY)
    assert [gpu.name for gpu in visible_gpus(facts.environment)] == seen


# Files that are not those of the package, and what was tried with them


# Several changes


OF_AMD = all_of(NO_DRIVER, part("host", display_vendors=frozenset({0x1002})))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((NO_DRIVER, NO_LIBRARIES), ["LibraryNotFoundError", "DriverNotFoundError"]),
        ((CPU_ENGINE_THERE, NO_DRIVER), ["CPUOnlyPackageError", "DriverNotFoundError"]),
        ((without(CUDNN_13), NO_DRIVER), ["DriverNotFoundError", "LibraryNotFoundError"]),  # cuDNN is a warning
        ((engine(owners=(CPU_ENGINE, ENGINE)), without("libcurand.so.10")),
            ["LibraryNotFoundError", "ConflictingPackagesError"],),
        ((without("libcurand.so.10"), without("libcufft.so.12")), ["LibraryNotFoundError", "LibraryNotFoundError"]),
        ((part("driver", cuda_version=(12, 8)), cuda_failed(999)), ["DriverTooOldError"]),
        ((part("driver", cuda_version=(12, 8)), gpus((6, 1))), ["UnsupportedDeviceError", "DriverTooOldError"]),
        # Mended by another release, which needs other libraries
        ((OLD_DRIVER, NO_LIBRARIES), ["DriverTooOldError"]),
        ((OLD_DRIVER, without(CUDNN_13)), ["DriverTooOldError"]),
        ((gpus((6, 1)), NO_LIBRARIES), ["UnsupportedDeviceError"]),
        ((OLD_DRIVER, observed(import_error="ImportError: libgcc_s.so.1: cannot open shared object file")),
            ["LibraryNotFoundError", "DriverTooOldError"],),
        ((all_of(NO_DRIVER, nvml(driver_version="570.86.15", cuda_version=(12, 8), available=True)), NO_LIBRARIES),
            ["LibraryNotFoundError", "DriverNotFoundError"],),
        # And by none
        ((OLD_DRIVER, part("host", python=(3, 15, 0)), NO_LIBRARIES), ["LibraryNotFoundError", "DriverTooOldError"]),
        ((part("driver", cuda_version=(12, 8)), NO_LIBRARIES), ["LibraryNotFoundError", "DriverTooOldError"]),
        # Nothing that is installed would help
        *(
            ((OF_AMD, change), ["DriverNotFoundError"])
            for change in (NO_LIBRARIES, without(CUDNN_13), CPU_ENGINE_THERE)
        ),
        ((OF_AMD, NO_ENGINE), ["OnnxRuntimeNotInstalledError", "DriverNotFoundError"]),  # which allow_cpu needs too
        ((OF_AMD, observed(import_error="ImportError: libgcc_s.so.1: cannot open shared object file")),
            ["LibraryNotFoundError", "DriverNotFoundError"],),
        ((NO_DRIVER, nvml(available=True, gpus=())), ["DriverNotFoundError"]),
        ((NO_DRIVER, variables(CUDA_VISIBLE_DEVICES="")), ["DriverNotFoundError", "NoDeviceError"]),
        *(
            ((part("driver", cuda_version=(12, 8)), variables(CUDA_VISIBLE_DEVICES=hiding), cuda_failed(100)),
                ["DriverTooOldError", "NoDeviceError"],)
            for hiding in ("-1", "7")
        ),
        ((owned(altered_files=("onnxruntime/__init__.py",)), observed(import_error="ImportError: x")),
            ["BrokenPackageError"],),
        ((owned(altered_files=("onnxruntime/__init__.py",)),
            observed(import_error="ImportError: numpy.core.multiarray failed to import")),
            ["BrokenPackageError", "BrokenPackageError"],),
        ((part("host", system="Darwin"), NO_ENGINE, NO_DRIVER), ["UnsupportedPlatformError"]),
        ((part("host", system="Darwin"), CPU_ENGINE_THERE, NO_DRIVER), ["UnsupportedPlatformError"]),
        ((NO_ENGINE, NO_DRIVER), ["OnnxRuntimeNotInstalledError", "DriverNotFoundError"]),
        ((nvml(gpus=()), request(device=1)), ["NoDeviceError"]),
        ((nvml(gpus=()), refused(RefusedNode("/dev/nvidiactl", "EPERM", "root"))), ["DriverUnusableError"]),
        ((part("provider", problem="truncated"), probed(died_in="provider")), ["BrokenPackageError"]),
    ],
)  # fmt: skip
def test_root_causes_first(changes: tuple[Change, ...], expected: list[str]) -> None:
    problems = find_problems(all_of(*changes)(HEALTHY))
    assert roots(problems) == expected
    assert_in_order(problems)


@pytest.mark.parametrize("first", range(0, len(CASES), 7), ids=lambda n: CASES[n].name)
def test_two_changes_are_no_surprise(first: int) -> None:
    for second in CASES:
        facts = second.change(CASES[first].change(HEALTHY))
        problems = find_problems(facts)
        cuda_works = facts.observed.cuda is not None and facts.observed.cuda.code == 0  # which is the better answer
        assert problems or cuda_works, second.name
        assert_in_order(problems)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_to_wait(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        diagnose(probe=True, timeout=timeout)


def test_what_a_notebook_or_print_shows_is_what_is_wrong() -> None:
    """The facts behind it are 20 KB: who wants them has ``environment`` and ``as_dict()``."""
    machine = NO_DRIVER(HEALTHY)
    problems = find_problems(machine)
    found = Diagnosis(problems, machine.environment)
    assert str(found) == str(problems[0])
    assert repr(found) == f"Diagnosis(problems={problems!r})"
    assert str(Diagnosis((*problems, *problems), machine.environment)) == f"{problems[0]}\n\n{problems[0]}"
    assert str(Diagnosis((), HEALTHY.environment)) == "no problem was found"


@pytest.mark.parametrize(
    "there",
    [
        {"kernel_version": "580.159.04"},
        {"device_nodes": ("/dev/nvidia0",)},
        {"libcuda_elsewhere": ("/a/libcuda.so.1",)},
    ],
)
def test_a_part_of_a_driver_is_a_driver_that_can_be_mended(there: dict[str, Any]) -> None:
    error = find_problems(all_of(NO_LIBRARIES, NO_DRIVER, part("driver", **there))(HEALTHY))[0]
    assert "driver" not in error.summary
