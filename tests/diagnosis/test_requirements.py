"""The published tables held against facts: what passes, what fails, and what is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ortgpu.diagnosis.requirements import Requirement, check_inference
from ortgpu.environment.gpu.driver import GPU, Driver, Nvml
from ortgpu.environment.host import Host
from ortgpu.environment.inspection import Environment, inspect_environment
from ortgpu.environment.libraries.catalogue import BY_STEM, LIBRARIES
from ortgpu.environment.libraries.search import Candidate, Resolution
from ortgpu.environment.libraries.wheel import Architecture, ProviderLibrary
from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Packages
from ortgpu.environment.packages.installer import Installer
from ortgpu.environment.variables import Variables

GIB = 1 << 30
SITE = "/site-packages"
H200 = GPU(0, "GPU-0", "NVIDIA H200", (9, 0), 141 * GIB, 140 * GIB, "default", None, (), None)
LINKED = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13", "libcuda.so.1")
ARCHITECTURES = tuple(Architecture(major, minor, False, False) for major, minor in ((7, 5), (8, 0), (9, 0)))


def library(stem: str, *, major: int = 13, required: bool | None = None, found: bool = True) -> Resolution:
    spec = BY_STEM[stem]
    soname = spec.sonames[major]
    place = f"{SITE}/nvidia/lib/{soname}"
    candidates = (Candidate(soname, place, "nvidia wheels", f"{SITE}/nvidia"),) if found else ()
    return Resolution(spec, soname, soname in LINKED if required is None else required, candidates, ())


def healthy() -> Environment:
    """A machine that meets every row, CUDA 13."""
    packages = Packages(
        OnnxRuntime(
            folder=f"{SITE}/onnxruntime",
            importable=True,
            owners=(Distribution("onnxruntime-gpu", "1.31.1", SITE),),
            elsewhere=(),
            build_name="onnxruntime-gpu",
            build_version="1.31.1",
            cuda_version=(13, 0),
            provider_library=f"{SITE}/onnxruntime/capi/libonnxruntime_providers_cuda.so",
            extension=f"{SITE}/onnxruntime/capi/onnxruntime_pybind11_state.cpython-312-x86_64-linux-gnu.so",
            tensorrt_library=None,
        ),
        None,
        (Distribution("nvidia-cudnn-cu13", "9.27.0.42", SITE),),
        tuple(Distribution(*one, SITE) for one in (("numpy", "2.4.6"), ("flatbuffers", "25.1"), ("protobuf", "7.3"))),
    )
    return Environment(
        host=Host(
            "Linux", "x86_64", "Some Linux", "6.1", "glibc 2.36", (3, 12, 4), "CPython", "/bin/python", 64 * 10**9,
            None, False, frozenset({0x10DE}), False,
        ),
        installer=Installer("pip", "pip install", "pip uninstall"),
        packages=packages,
        extension=None,
        bridge=None,
        provider=ProviderLibrary("/p.so", None, LINKED, (), ARCHITECTURES),
        libraries=tuple(library(spec.stem) for spec in LIBRARIES if 13 in spec.sonames),
        mapped=(),
        driver=Driver(
            "/lib/libcuda.so.1", None, (13, 0), "580.65.06", ("/dev/nvidia0",),
            Nvml(True, None, "580.65.06", (13, 0), (H200,)),
        ),
        variables=Variables({}, {}),
    )  # fmt: skip


def row(environment: Environment, name: str) -> Requirement:
    (found,) = [one for one in check_inference(environment) if one.name == name]
    return found


def statuses(environment: Environment, name: str) -> tuple[str, str]:
    found = row(environment, name)
    return found.status_minimum, found.status_recommended


def with_gpus(*gpus: GPU, cuda: tuple[int, int] | None = (13, 0), version: str | None = "580.65.06") -> Environment:
    driver = replace(healthy().driver, nvml=Nvml(True, None, version, cuda, gpus), kernel_version=version)
    return replace(healthy(), driver=driver)


def with_host(**changes: Any) -> Environment:
    return replace(healthy(), host=replace(healthy().host, **changes))


def with_engine(**changes: Any) -> Environment:
    packages = healthy().packages
    return replace(
        healthy(), packages=replace(packages, onnxruntime=replace(packages.onnxruntime, **changes)), provider=None
    )


def test_healthy_machine_meets_every_row() -> None:
    rows = check_inference(healthy())
    assert [
        (one.name, one.status_minimum, one.status_recommended) for one in rows if one.status_minimum != "pass"
    ] == []
    assert [one for one in rows if one.status_recommended != "pass"] == []
    assert all(one.found for one in rows)


def test_every_row_of_the_published_table_is_there() -> None:
    names = [one.name for one in check_inference(healthy())]
    assert len(set(names)) == len(names)
    assert set(names) == {
        "compute capability", "CUDA", "cuDNN", "driver", "Python", "operating system", "memory", "GPU memory",
        "libraries", "onnxruntime-gpu", "nvidia-cudnn-cu13", "numpy", "flatbuffers", "protobuf",
    }  # fmt: skip


def test_rows_are_plain_data() -> None:
    assert row(healthy(), "Python").as_dict() == {
        "name": "Python",
        "minimum": "3.10",
        "recommended": "3.12",
        "found": "3.12.4",
        "status_minimum": "pass",
        "status_recommended": "pass",
        "note": "",
    }


# What the file says, where the page says something else


def test_capability_is_judged_by_the_provider_file() -> None:
    volta = replace(H200, name="Tesla V100", compute_capability=(7, 0))
    found = row(with_gpus(volta), "compute capability")
    assert (found.status_minimum, found.status_recommended) == ("fail", "fail")
    assert found.found == "7.0"
    assert "sm_75" in found.minimum
    assert "3.7" in found.note
    assert "no code for Tesla V100" in found.note


def test_capability_that_the_driver_compiles_for() -> None:
    environment = with_gpus(replace(H200, name="New", compute_capability=(13, 0)))
    ptx = (*ARCHITECTURES, Architecture(12, 0, True, False))
    provider = ProviderLibrary("/p.so", None, LINKED, (), ptx)
    found = row(replace(environment, provider=provider), "compute capability")
    assert found.status_minimum == "pass"
    assert "compiles it at first use for New" in found.note


def test_one_gpu_that_will_do_is_enough() -> None:
    turing = replace(H200, index=1, name="T4", compute_capability=(7, 5), memory_total=15 * GIB)
    assert statuses(with_gpus(turing, H200), "compute capability") == ("pass", "pass")
    assert statuses(with_gpus(turing), "compute capability") == ("pass", "fail")
    assert statuses(with_gpus(turing, H200), "GPU memory") == ("pass", "pass")


def test_a_gpu_that_is_hidden_does_not_count() -> None:
    volta = replace(H200, index=1, uuid="GPU-1", name="V100", compute_capability=(7, 0))
    environment = replace(with_gpus(H200, volta), variables=Variables({"CUDA_VISIBLE_DEVICES": "1"}, {}))
    assert row(environment, "compute capability").found == "7.0"
    assert statuses(environment, "compute capability") == ("fail", "fail")


@pytest.mark.parametrize(
    ("cuda", "version", "expected"),
    [
        ((13, 0), "580.65.06", ("pass", "pass")),
        ((12, 8), "570.86.15", ("fail", "fail")),
        (None, "580.65.06", ("pass", "pass")),
        (None, "570.86.15", ("fail", "fail")),
        (None, None, ("unknown", "unknown")),
    ],
)
def test_driver(cuda: tuple[int, int] | None, version: str | None, expected: tuple[str, str]) -> None:
    environment = with_gpus(H200, cuda=cuda, version=version)
    environment = replace(environment, driver=replace(environment.driver, cuda_version=None))
    assert statuses(environment, "driver") == expected


def test_driver_of_forward_compatibility_counts_by_the_cuda_it_supports() -> None:
    environment = with_gpus(H200, cuda=(12, 8), version="570.86.15")
    environment = replace(environment, driver=replace(environment.driver, cuda_version=(13, 0)))
    assert statuses(environment, "driver") == ("pass", "pass")


def test_driver_without_its_library() -> None:
    driver = replace(healthy().driver, libcuda=None, libcuda_error="not there", cuda_version=None)
    found = row(replace(healthy(), driver=driver), "driver")
    assert found.status_minimum == "fail"
    assert found.found == "580.65.06, without its CUDA library"
    none = replace(driver, kernel_version=None, nvml=Nvml(False, "not found", None, None, ()))
    assert row(replace(healthy(), driver=none), "driver").found == "no driver"


def test_cuda_12_has_numbers_of_its_own() -> None:
    linked = ("libcublas.so.12", "libcudart.so.12", "libcudnn.so.9")
    resolutions = tuple(
        library(spec.stem, major=12, required=spec.sonames[12] in linked) for spec in LIBRARIES if 12 in spec.sonames
    )
    environment = replace(
        with_gpus(H200, cuda=(12, 2), version="530.30"),
        provider=ProviderLibrary("/p.so", None, linked, (), ARCHITECTURES),
        libraries=resolutions,
    )
    environment = replace(environment, driver=replace(environment.driver, cuda_version=(12, 2)))
    assert row(environment, "CUDA").minimum == "12.x"
    assert statuses(environment, "driver") == ("pass", "fail")  # 525 will do, 535 is better
    assert "without it no session opens" in row(environment, "cuDNN").note
    assert row(environment, "nvidia-cudnn-cu12").found == "not this package; cuDNN comes from nvidia wheels"


# What is missing


def test_library_that_is_linked_and_one_that_is_opened_at_need() -> None:
    def without(stem: str) -> Environment:
        kept = tuple(
            library(one.spec.stem, found=one.spec.stem != stem) if one.spec.stem == stem else one
            for one in healthy().libraries
        )
        return replace(healthy(), libraries=kept)

    linked = row(without("libcurand"), "libraries")
    assert (linked.status_minimum, linked.status_recommended) == ("fail", "fail")
    assert linked.found == "7 of 8; not found: libcurand.so.10"
    assert statuses(without("libcurand"), "CUDA") == ("fail", "fail")
    assert statuses(without("libcufft"), "libraries") == ("pass", "fail")
    assert statuses(without("libcufft"), "CUDA") == ("pass", "pass")
    assert statuses(without("libcudnn"), "cuDNN") == ("fail", "fail")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": (3, 11, 7)}, ("fail", "fail")),  # the extension module is for 3.12
        ({"python": (3, 12, 0)}, ("pass", "pass")),
    ],
)
def test_python(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    assert statuses(with_host(**changes), "Python") == expected


def test_python_that_the_file_name_does_not_tell() -> None:
    environment = with_engine(extension=f"{SITE}/onnxruntime/capi/onnxruntime_pybind11_state.pyd")
    older = replace(environment, host=replace(environment.host, python=(3, 10, 1)))
    assert statuses(older, "Python") == ("pass", "fail")
    assert "3.11" in row(older, "Python").note


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("Linux", "x86_64", ("pass", "pass")),
        ("Windows", "AMD64", ("pass", "fail")),
        ("Linux", "aarch64", ("pass", "fail")),  # not in the published table, and on the package index
        ("Darwin", "arm64", ("fail", "fail")),
        ("Linux", "ppc64le", ("fail", "fail")),
    ],
)
def test_operating_system(system: str, machine: str, expected: tuple[str, str]) -> None:
    assert statuses(with_host(system=system, machine=machine), "operating system") == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (7 * 10**9, ("fail", "fail")),
        (8 * GIB, ("pass", "fail")),
        (32 * GIB, ("pass", "pass")),
        (None, ("unknown",) * 2),
    ],
)
def test_memory(size: int | None, expected: tuple[str, str]) -> None:
    assert statuses(with_host(memory_total=size), "memory") == expected


def test_engine() -> None:
    cpu = with_engine(provider_library=None, build_name="onnxruntime")
    assert statuses(cpu, "onnxruntime-gpu") == ("fail", "fail")
    assert "no CUDA provider" in row(cpu, "onnxruntime-gpu").note
    nothing = with_engine(folder=None, importable=False, owners=(), build_name=None, build_version=None,
                          provider_library=None, extension=None)  # fmt: skip
    assert row(nothing, "onnxruntime-gpu").found == "not installed"
    nightly = with_engine(build_name="ort-nightly-gpu")
    assert statuses(nightly, "onnxruntime-gpu") == ("pass", "pass")


def test_no_metadata_is_no_proof_of_absence() -> None:
    """Images are stripped of it."""
    environment = replace(healthy(), packages=replace(healthy().packages, others=()))
    assert statuses(environment, "protobuf") == ("unknown", "unknown")


# What is not known


def test_nothing_is_guessed() -> None:
    unknown = replace(
        healthy(),
        packages=Packages(
            OnnxRuntime(None, False, (), (), None, None, None, None, None, None), None, (), ()
        ),
        provider=None,
        libraries=(),
        driver=Driver("nvcuda.dll", None, None, None, (), Nvml(False, "not found", None, None, ())),
        host=replace(healthy().host, memory_total=None),
    )  # fmt: skip
    rows = {one.name: one for one in check_inference(unknown)}
    decided = {name for name, one in rows.items() if one.status_minimum != "unknown"}
    assert decided == {"Python", "operating system", "onnxruntime-gpu"}
    assert all(rows[name].found is None for name in set(rows) - decided - {"nvidia-cudnn-cu13"})


def test_this_machine() -> None:
    rows = check_inference(inspect_environment())
    assert rows == check_inference(inspect_environment())
    for one in rows:
        assert {one.status_minimum, one.status_recommended} <= {"pass", "fail", "unknown"}
        assert (one.found is None) <= (one.status_minimum == "unknown"), one


GB = 10**9


@pytest.mark.parametrize(
    ("sizes", "fact", "expected"),
    [
        ([4 * GB], "4.0 GB", ("pass", "fail")),
        ([3 * GB], "3.0 GB", ("fail", "fail")),
        ([16 * GB], "16.0 GB", ("pass", "pass")),
        ([15 * GB], "15.0 GB", ("pass", "fail")),
        ([2 * GB, 24 * GB, 8 * GB], "24.0 GB", ("pass", "pass")),  # a session can be on the largest
        ([2 * GB, 8 * GB], "8.0 GB", ("pass", "fail")),
    ],
)
def test_the_memory_of_the_largest_gpu_counts(sizes: list[int], fact: str, expected: tuple[str, str]) -> None:
    environment = with_gpus(*(replace(H200, index=number, memory_total=size) for number, size in enumerate(sizes)))
    assert statuses(environment, "GPU memory") == expected
    assert [each.found for each in check_inference(environment) if each.name == "GPU memory"] == [fact]
