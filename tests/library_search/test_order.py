"""The documented order of places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ortgpu.environment.libraries import places as library_places
from ortgpu.environment.libraries.catalogue import LIBRARIES
from ortgpu.environment.libraries.search import find_roots, resolve
from tests.library_search.trees import ALL, NEEDED, ORDER, TOOLKIT, Place, Put, folders_chosen, places, prepare, search


@pytest.mark.parametrize("place", ORDER, ids=lambda place: place.folder)
def test_each_place_alone(place: Place, tmp_path: Path, put: Put) -> None:
    found = search(prepare(tmp_path, put, place))
    for soname in ALL:
        candidate = found[soname].chosen
        assert candidate is not None, soname
        assert (candidate.source, candidate.path) == (place.source, str(tmp_path / place.folder / soname))
        assert candidate.problem is None
    assert {soname for soname, one in found.items() if one.required} == set(TOOLKIT)


@pytest.mark.parametrize("number", range(len(ORDER) - 1), ids=lambda n: ORDER[n].folder)
def test_each_place_before_the_next(number: int, tmp_path: Path, put: Put) -> None:
    earlier, later = ORDER[number : number + 2]
    found = search(prepare(tmp_path, put, later, earlier))
    assert folders_chosen(found, ALL) == {str(tmp_path / earlier.folder)}


def test_the_whole_order(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, *ORDER, sonames=("libcudnn.so.9",))
    candidates = search(where)["libcudnn.so.9"].candidates
    assert [c.path for c in candidates] == [str(tmp_path / place.folder / "libcudnn.so.9") for place in ORDER]


def test_the_order_is_the_documented_one() -> None:
    documented = re.findall(r"^\d\. (.*)", (library_places.__doc__ or "").partition("On Windows")[0], re.MULTILINE)
    keywords = (
        *("already loaded", "caller's directory", "``nvidia``", "torch", "conda", "CUDA_HOME", "system loader"),
        "has loaded from elsewhere",
    )
    assert [key in line for key, line in zip(keywords, documented, strict=True)] == [True] * len(keywords)


def test_nothing_anywhere(tmp_path: Path) -> None:
    where = places(tmp_path)
    assert list(find_roots(where, 13)) == []
    found = search(where)
    assert set(ALL) <= set(found)
    assert all(one.chosen is None and one.rejected == () for one in found.values())


def test_dependencies_come_first(tmp_path: Path) -> None:
    order = [one.spec.stem for one in resolve(places(tmp_path), NEEDED, 13)]
    assert order == [spec.stem for spec in LIBRARIES if 13 in spec.sonames]
