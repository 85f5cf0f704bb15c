"""Small libraries that really have the names they need."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.stubs import Stubs
from tests.library_search.trees import Put


@pytest.fixture(scope="session")
def compiled(stubs: Stubs) -> Callable[[str], Path]:
    """A library of a few kilobytes with this SONAME; each is compiled once."""
    made: dict[str, Path] = {}

    def library(soname: str) -> Path:
        if soname not in made:
            made[soname] = stubs.library(soname)
        return made[soname]

    return library


@pytest.fixture
def put(compiled: Callable[[str], Path]) -> Put:
    """``put(folder, *sonames)``: these libraries in this folder, which is returned."""

    def into(folder: Path, *sonames: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for soname in sonames:
            shutil.copy(compiled(soname), folder / soname)
        return folder

    return into
