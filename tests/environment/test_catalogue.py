"""Invariants of the library table, and the table against the wheels that are installed."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ortgpu.environment.libraries.catalogue import (
    BY_STEM,
    CUDNN_CORE_PARTS,
    LIBRARIES,
    TOOLKIT_MAJORS,
    LibrarySpec,
    canonical,
    major_of,
    spec_for,
    wheel_name,
)
from ortgpu.environment.libraries.library_file import read_library
from ortgpu.environment.libraries.wheel import ProviderLibrary, read_provider

EACH = pytest.mark.parametrize("spec", LIBRARIES, ids=lambda spec: spec.stem)
EACH_OF_EACH_MAJOR = pytest.mark.parametrize(
    ("spec", "major"),
    [pytest.param(spec, major, id=f"{spec.stem}-cuda{major}") for spec in LIBRARIES for major in spec.sonames],
)

# What a provider links besides CUDA: the driver, the C and C++ libraries.
SYSTEM = re.compile(r"libcuda\.so\.1|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux.*\.so\.\d+")

# Shipped by the wheels and of no use to the provider: other interfaces over the same libraries, and what they open
# beside themselves.
UNUSED = {"libnvblas", "libcufftw", "libnvrtc-builtins", "libnvrtc.alt", "libnvrtc-builtins.alt"}


def distribution_of(requirement: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(Requirement(requirement).name)
    except importlib.metadata.PackageNotFoundError:
        return None


def libraries_in(distribution: importlib.metadata.Distribution) -> set[str]:
    names = (PurePosixPath(str(file)).name for file in distribution.files or ())
    return {name for name in names if ".so." in name}


@pytest.fixture(scope="module")
def provider(provider_library: str) -> ProviderLibrary:
    return read_provider(provider_library)


# The table itself


def test_stems_and_sonames_are_unique() -> None:
    stems = [spec.stem for spec in LIBRARIES]
    assert len(set(stems)) == len(stems)
    assert list(BY_STEM) == stems
    for major in TOOLKIT_MAJORS:
        sonames = [spec.sonames[major] for spec in LIBRARIES if major in spec.sonames]
        assert len(set(sonames)) == len(sonames)


@EACH
def test_what_comes_before_comes_earlier(spec: LibrarySpec) -> None:
    stems = [other.stem for other in LIBRARIES]
    for before in spec.after:
        assert stems.index(before) < stems.index(spec.stem)


@EACH
def test_parts_belong_to_a_whole_that_is_loaded_first(spec: LibrarySpec) -> None:
    if spec.part_of is None:
        return
    whole = BY_STEM[spec.part_of]
    assert whole.part_of is None
    assert LIBRARIES.index(whole) < LIBRARIES.index(spec)
    assert set(spec.sonames) <= set(whole.sonames)
    assert spec.wheels == {major: whole.wheels[major] for major in spec.wheels}
    for major, soname in spec.sonames.items():
        assert major_of(soname) == major_of(whole.sonames[major]), "parts of one release"


@EACH
def test_majors(spec: LibrarySpec) -> None:
    assert spec.sonames
    assert set(spec.sonames) == set(spec.wheels) <= set(TOOLKIT_MAJORS)
    assert {12, 13} <= set(spec.sonames), "a library that a supported release may need"


@EACH_OF_EACH_MAJOR
def test_soname(spec: LibrarySpec, major: int) -> None:
    soname = spec.sonames[major]
    assert re.fullmatch(re.escape(spec.stem) + r"\.so\.\d+(\.\d+)?", soname)
    assert spec_for(soname) is spec
    assert major_of(soname) is not None


@EACH_OF_EACH_MAJOR
def test_dll(spec: LibrarySpec, major: int) -> None:
    """Names as in the wheels for Windows, which tests/behaviour/test_windows_wheels.py reads."""
    name = spec.dlls[major]
    assert re.fullmatch(re.escape(spec.dll_stem) + r"\d+(_\d)?\.dll", name)
    assert spec_for(name) is spec_for(name.upper()) is spec
    assert major_of(name) == major_of(spec.sonames[major])
    assert canonical(name.upper()) == canonical(name) == name


def test_names_of_dlls_are_unique() -> None:
    for major in TOOLKIT_MAJORS:
        names = [spec.dlls[major] for spec in LIBRARIES if major in spec.dlls]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["cudart32_110.dll", "nvrtc64_120_0.alt.dll", "nvrtc-builtins64_129.dll", "cufftw64_12.dll",
             "cublas64_.dll", "cublas64_13.dll.bak", "nvblas64_13.dll", ".dll", "libcublas.so.13.dll"]
)  # fmt: skip
def test_what_is_beside_them_in_the_wheels_is_none_of_them(name: str) -> None:
    assert spec_for(name) is None
    assert canonical(name) == name


@EACH_OF_EACH_MAJOR
def test_wheel_is_a_requirement_for_releases_with_that_soname(spec: LibrarySpec, major: int) -> None:
    requirement = Requirement(spec.wheels[major])
    assert requirement.name == canonicalize_name(requirement.name)
    assert wheel_name(spec.wheels[major]) == requirement.name
    assert (requirement.extras, requirement.marker, requirement.url) == (set(), None, None)
    # From CUDA 13 on the toolkit's wheels have no suffix; the suffixed names are empty placeholders.
    suffix = f"-cu{major}"
    assert requirement.name.endswith(suffix) == (spec.is_cudnn or major < 13)
    # The release that has this SONAME, except that a CUDA 11 toolkit's runtime says 11.0 and its compiler 11.2.
    release = major_of(spec.sonames[major])
    assert requirement.specifier.contains(Version(f"{release}.9.9"))
    assert not requirement.specifier.contains(Version(f"{(release or 0) + 1}.0.0"))
    assert not requirement.specifier.contains(Version(f"{(release or 0) - 1}.9.9"))


@pytest.mark.parametrize("major", sorted(CUDNN_CORE_PARTS))
def test_core_parts_are_in_the_table(major: int) -> None:
    for stem in CUDNN_CORE_PARTS[major]:
        spec = BY_STEM[stem]
        assert spec.part_of == "libcudnn"
        assert spec.is_cudnn


@pytest.mark.parametrize(
    ("name", "stem", "major"),
    [
        ("libcublas.so.13", "libcublas", 13),
        ("libcublasLt.so.12.8.4.1", "libcublasLt", 12),
        ("libcudart.so.11.0", "libcudart", 11),
        ("libcudnn_ops.so.9", "libcudnn_ops", 9),
        ("libcudart.so", "libcudart", None),
        ("libcudart", "libcudart", None),
        ("libcudart.so.x", "libcudart", None),
        ("libcuda.so.1", None, 1),
        ("libc.so.6", None, 6),
        ("", None, None),
    ],
)
def test_names(name: str, stem: str | None, major: int | None) -> None:
    found = spec_for(name)
    assert (found.stem if found else None) == stem
    assert major_of(name) == major


# The table and what is installed


def test_everything_that_the_installed_provider_links_is_known(provider: ProviderLibrary) -> None:
    assert provider.needed
    assert provider.cuda_major is not None
    for soname in provider.needed:
        spec = spec_for(soname)
        assert spec is not None or SYSTEM.fullmatch(soname), soname
        if spec is not None:
            assert spec.sonames[provider.cuda_major] == soname


@EACH
def test_the_installed_wheel_has_the_library(spec: LibrarySpec, provider: ProviderLibrary) -> None:
    assert provider.cuda_major is not None
    distribution = distribution_of(spec.wheels[provider.cuda_major])
    if distribution is None:
        pytest.skip(f"{spec.wheels[provider.cuda_major]} is not installed")
    assert Requirement(spec.wheels[provider.cuda_major]).specifier.contains(distribution.version)
    in_wheel = spec.sonames[provider.cuda_major] in libraries_in(distribution)
    assert in_wheel or spec.stem.endswith("_infer"), "only cuDNN 8 has parts for inference alone"


def test_every_library_of_the_installed_wheels_is_in_the_table(provider: ProviderLibrary) -> None:
    assert provider.cuda_major is not None
    wheels = {spec.wheels[provider.cuda_major] for spec in LIBRARIES}
    distributions = [found for wheel in wheels if (found := distribution_of(wheel)) is not None]
    assert distributions, "install the CUDA wheels: pip install -e '.[cuda,test]'"
    shipped = {name for one in distributions for name in libraries_in(one) if name.split(".so.")[0] not in UNUSED}
    known = {spec.sonames[provider.cuda_major] for spec in LIBRARIES}
    assert shipped
    assert shipped <= known


@EACH
def test_what_an_installed_library_links_comes_before_it(spec: LibrarySpec, provider: ProviderLibrary) -> None:
    assert provider.cuda_major is not None
    distribution = distribution_of(spec.wheels[provider.cuda_major])
    name = spec.sonames[provider.cuda_major]
    paths = [str(file.locate()) for file in (distribution.files or () if distribution else ()) if file.name == name]
    if not paths:
        pytest.skip(f"{name} is not installed")
    before = set(spec.after)
    while added := {stem for known in before for stem in BY_STEM[known].after} - before:
        before |= added
    linked = {found.stem for soname in read_library(paths[0]).needed if (found := spec_for(soname))}
    assert linked <= before
