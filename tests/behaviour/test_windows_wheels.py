"""What is published for Windows, against the names, the layouts and the reader that this library has for it.

On demand, since the wheels have 3.5 GB, of which 1.5 GB are kept: ``pytest -m matrix``. Nothing of them is opened:
it runs on any system. tests/README.md records a run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ortgpu.environment.libraries.catalogue import LIBRARIES, spec_for
from ortgpu.environment.libraries.library_file import exported_names, imported_names, read_library
from ortgpu.environment.libraries.loader_windows import is_of_the_system, lacking_functions
from ortgpu.environment.libraries.places import WINDOWS, SearchPlaces
from ortgpu.environment.libraries.search import resolve
from ortgpu.environment.libraries.wheel import cuda_major_of, provider_beside, read_provider
from tests.windows.wheels import unpacked

# Wheels are downloaded and unpacked in the setup of the first test.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Release:
    """``linked``: what ``objdump -p`` says of the provider, of CUDA only. ``held``: what its fat binary is for."""

    version: str
    cuda: int
    linked: tuple[str, ...]
    held: str

    def __str__(self) -> str:
        return self.version


CUDA_12 = ("cublasLt64_12.dll", "cublas64_12.dll", "cufft64_11.dll", "cudart64_12.dll", "cudnn64_9.dll")
CUDA_13 = ("cublasLt64_13.dll", "cublas64_13.dll")

RELEASES = (
    Release("1.22.0", 12, CUDA_12, "sm_52 sm_61 sm_75 sm_86 sm_89 compute_90"),
    Release("1.26.0", 12, CUDA_12, "sm_52 sm_61 sm_75 sm_86 sm_89 compute_90"),
    Release("1.31.1", 13, CUDA_13, "sm_75 sm_80 sm_86 sm_89 sm_120a"),
)

# What NVIDIA's wheels have and no provider uses: other interfaces over the same libraries, and what these open beside
# themselves.
UNUSED = re.compile(r"(nvblas64_|cufftw64_|nvrtc-builtins64_)\d+\.dll|nvrtc64_\d+_0\.alt\.dll")


@dataclass(frozen=True)
class Site:
    release: Release
    folder: Path
    cuda: Path  # where the wheels of CUDA are unpacked: releases of one CUDA share them

    @property
    def provider(self) -> str:
        return str(self.folder / "onnxruntime/capi/onnxruntime_providers_cuda.dll")

    def places(self, tmp_path: Path) -> SearchPlaces:
        variables = {"SYSTEMROOT": str(tmp_path / "Windows"), "PROGRAMFILES": str(tmp_path / "Program Files")}
        path = (str(self.folder), str(self.cuda))
        return SearchPlaces(path, variables, "", str(tmp_path), "AMD64", (), WINDOWS)


@pytest.fixture(scope="session", params=RELEASES, ids=str)
def site(request: pytest.FixtureRequest) -> Site:
    release: Release = request.param
    wheels = [spec.wheels[release.cuda] for spec in LIBRARIES if release.cuda in WINDOWS.names(spec)]
    return Site(
        release,
        unpacked(f"windows-{release}", [f"onnxruntime-gpu=={release}"]),
        unpacked(f"windows-cuda{release.cuda}", dict.fromkeys(wheels)),
    )


@pytest.fixture(autouse=True)
def _on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.environment.libraries.wheel.this_machine", lambda: "AMD64")


def dlls(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.dll") if "nvidia" in path.parts)


def test_the_provider_is_read(site: Site) -> None:
    found = read_provider(site.provider)
    assert found.problem is None
    assert tuple(name for name in found.needed if spec_for(name)) == site.release.linked
    assert " ".join(map(str, found.architectures or ())) == site.release.held
    assert cuda_major_of(found.needed) == site.release.cuda
    assert os.path.isfile(provider_beside(found.path, "shared"))
    known = re.compile(r"onnxruntime_providers_shared|kernel32|(msvcp|vcruntime)140", re.IGNORECASE)
    others = [name for name in found.needed if not spec_for(name) and not is_of_the_system(name)]
    assert [name for name in others if not known.match(name)] == []


def test_every_library_of_the_wheels_is_in_the_catalogue_or_of_no_use(site: Site) -> None:
    found = dlls(site.cuda)
    assert found
    unknown = {path.name for path in found if spec_for(path.name) is None}
    assert [name for name in unknown if not UNUSED.fullmatch(name)] == []
    for path in found:
        spec, file = spec_for(path.name), read_library(path)
        assert (file.problem, file.machine) == (None, "x86_64"), path
        if spec is not None:
            assert file.name == path.name == spec.dlls[site.release.cuda]


def test_everything_is_found_where_the_wheels_have_it(site: Site, tmp_path: Path) -> None:
    found = resolve(site.places(tmp_path), read_provider(site.provider).needed, site.release.cuda)
    by_name = {path.name: str(path) for path in dlls(site.cuda)}
    for one in found:
        assert one.rejected == ()
        assert (one.chosen.path if one.chosen else None) == by_name.get(one.soname), one.soname
    of_other_releases = {one.soname for one in found if one.chosen is None}
    assert all(name.endswith("_infer64_9.dll") for name in of_other_releases)  # cuDNN 8's
    folders = {os.path.relpath(os.path.dirname(path), site.cuda) for path in by_name.values()}
    components = ("cublas", "cuda_nvrtc", "cuda_runtime", "cudnn", "cufft", "nvjitlink")
    of_cuda = {f"nvidia/{name}/bin" for name in components} if site.release.cuda == 12 else {"nvidia/cu13/bin/x86_64"}
    assert folders == of_cuda | {"nvidia/cudnn/bin"}


def test_all_of_it_can_be_loaded_in_order_and_fits_together(site: Site, tmp_path: Path) -> None:
    """What each file links comes before it, and has the functions that it takes from it by name."""
    provider = read_provider(site.provider)
    found = resolve(site.places(tmp_path), provider.needed, site.release.cuda)
    order = [one.chosen.path for one in found if one.chosen]
    absent = {one.soname for one in found if one.chosen is None}
    assert [name for name in absent if not name.endswith("_infer64_9.dll")] == []
    for position, path in enumerate(order):
        linked = {name for name in read_library(path).needed if spec_for(name)}
        assert linked <= {os.path.basename(earlier) for earlier in order[:position]}, path
        assert list(lacking_functions(path, order)) == []
    assert list(lacking_functions(provider.path, [*order, provider_beside(provider.path, "shared")])) == []
    for name in site.release.linked:
        (path,) = (path for path in order if os.path.basename(path) == name)
        assert exported_names(path)
        assert imported_names(provider.path, name)


def test_a_toolkit_without_one_is_told_by_its_name(site: Site, tmp_path: Path) -> None:
    provider = read_provider(site.provider)
    for name in site.release.linked:
        where = replace(site.places(tmp_path), sys_path=(str(_but(site.cuda, name, tmp_path / name)),))
        missing = [one.soname for one in resolve(where, provider.needed, site.release.cuda) if one.required]
        assert set(missing) == set(site.release.linked)
        found = {one.soname: one for one in resolve(where, provider.needed, site.release.cuda)}
        assert [each for each in site.release.linked if found[each].chosen is None] == [name]


def _but(site: Path, name: str, folder: Path) -> Path:
    """The same files, as links, without one."""
    for path in dlls(site):
        if path.name != name:
            link = folder / path.relative_to(site)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return folder
