"""Libraries that a process has loaded from a folder that no search would look into, and what lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.environment.libraries.library_file import this_machine
from ortgpu.environment.libraries.places import LINUX, SearchPlaces
from ortgpu.environment.libraries.search import Resolution, resolve
from tests.lab.fixtures import Lab

NEEDED = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13")
CUDNN = ("libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9")


def put(lab: Lab, folder: Path, *sonames: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for soname in sonames:
        (folder / soname).write_bytes(lab.stubs.library(soname).read_bytes())
    return folder


def search(site: Path, nothing: Path, *mapped: Path) -> dict[str, Resolution]:
    places = SearchPlaces(
        (str(site),), {}, "", str(nothing), this_machine(), tuple(map(str, mapped)), LINUX, filesystem=nothing
    )
    return {found.soname: found for found in resolve(places, NEEDED, 13)}


@pytest.fixture
def site(lab: Lab, tmp_path: Path) -> Path:
    put(lab, tmp_path / "site/nvidia/cu13/lib", *NEEDED)
    put(lab, tmp_path / "site/nvidia/cudnn/lib", *CUDNN)
    return tmp_path / "site"


def test_the_rest_of_a_toolkit_comes_from_where_one_of_it_was_loaded(lab: Lab, site: Path, tmp_path: Path) -> None:
    """cuBLAS and cuBLASLt of two releases do not go together: onnxruntime issue 8594."""
    unknown = put(lab, tmp_path / "unknown", *NEEDED)
    found = search(site, tmp_path / "none", unknown / "libcublasLt.so.13")
    assert {Path(found[soname].candidates[0].path).parent for soname in NEEDED} == {unknown}
    assert found["libcublas.so.13"].candidates[0].source == "beside a loaded one"


def test_the_parts_of_cudnn_come_from_where_it_was_loaded(lab: Lab, site: Path, tmp_path: Path) -> None:
    unknown = put(lab, tmp_path / "unknown", *CUDNN)
    found = search(site, tmp_path / "none", unknown / "libcudnn.so.9")
    assert {Path(c.path).parent for soname in CUDNN[1:] for c in found[soname].candidates} == {unknown}
    assert found["libcublas.so.13"].candidates[0].source == "nvidia wheels"


def test_a_folder_that_is_searched_anyway_is_not_searched_twice(site: Path, tmp_path: Path) -> None:
    loaded = site / "nvidia/cu13/lib/libcublasLt.so.13"
    found = search(site, tmp_path / "none", loaded)
    assert [c.source for c in found["libcublas.so.13"].candidates] == ["nvidia wheels"]
    assert [c.source for c in found["libcublasLt.so.13"].candidates] == ["already loaded"]


def test_what_is_nowhere_else_is_not_missing(lab: Lab, site: Path, tmp_path: Path) -> None:
    unknown = put(lab, tmp_path / "unknown", *NEEDED)
    (site / "nvidia/cu13/lib/libcurand.so.10").unlink()
    assert search(site, tmp_path / "none")["libcurand.so.10"].candidates == ()
    found = search(site, tmp_path / "none", unknown / "libcudart.so.13")
    assert [c.path for c in found["libcurand.so.10"].candidates] == [str(unknown / "libcurand.so.10")]
