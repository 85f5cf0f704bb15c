"""Libraries that are there and cannot be loaded, beside those that are absent."""

from __future__ import annotations

from dataclasses import replace

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.environment.libraries.search import Candidate, Resolution
from ortgpu.errors import LibraryNotFoundError
from tests.support.made_facts import (
    HEALTHY,
    NO_DRIVER,
    NO_LIBRARIES,
    SITE,
    all_of,
    resolution,
)


def unmappable(soname: str) -> Resolution:
    path = f"{SITE}/nvidia/cu13/lib/{soname}"
    problem = f"{path}: failed to map segment from shared object"
    file = Candidate(soname, path, "nvidia wheels", f"{SITE}/nvidia", problem)
    return resolution(soname, found=False, rejected=(file,))


def test_a_file_that_may_not_be_mapped_is_not_installed_again() -> None:
    """A file system without execution, for which the loader has the same words as for want of memory."""
    kept = [found for found in HEALTHY.environment.libraries if found.soname != "libcublasLt.so.13"]
    environment = replace(HEALTHY.environment, libraries=(*kept, unmappable("libcublasLt.so.13")))
    problem = find_problems(replace(HEALTHY, environment=environment))[0]
    assert type(problem).__name__ == "LibraryNotFoundError"
    assert [fix.needs for fix in problem.fixes] == ["host"]
    assert f"{SITE}/nvidia/cu13/lib" in problem.fixes[0]
    assert "noexec" in problem.fixes[0]


def test_beside_it_what_is_absent_is_installed() -> None:
    kept = [f for f in HEALTHY.environment.libraries if not f.soname.startswith(("libcublasLt.", "libcurand."))]
    libraries = (*kept, unmappable("libcublasLt.so.13"), resolution("libcurand.so.10", found=False))
    problem = find_problems(replace(HEALTHY, environment=replace(HEALTHY.environment, libraries=libraries)))[0]
    assert [fix.kind for fix in problem.fixes] == ["manual", "shell"]
    assert "nvidia-curand" in problem.fixes[1]
    assert "nvidia-cublas" not in problem.fixes[1]


def test_where_libraries_and_the_driver_are_absent_the_first_lines_say_both() -> None:
    """Gigabytes of wheels help nobody who has no GPU."""
    absent = find_problems(all_of(NO_LIBRARIES, NO_DRIVER)(HEALTHY))[0]
    first, second, *_ = str(absent).splitlines()
    assert type(absent) is LibraryNotFoundError
    assert "libcublas.so.13" in first
    assert first.endswith("and neither is an NVIDIA driver")
    assert "no libcuda, no NVML, no device files" in second
    assert "driver" in str(absent.fixes[0])
