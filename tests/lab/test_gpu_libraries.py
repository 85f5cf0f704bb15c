"""What GPU tests take away from the loader of a child is gone there, and nowhere else."""

from __future__ import annotations

from tests.gpu.libraries import hidden_from_the_loader
from tests.lab.stubs import Stubs
from tests.support.children import child_environment
from tests.support.this_machine import loader_finds

SONAME = "libtaken_away.so.1"


def test_a_library_is_hidden_from_one_process(stubs: Stubs) -> None:
    place = stubs.library(SONAME).parent
    env = child_environment({"LD_LIBRARY_PATH": str(place)})
    before = hidden_from_the_loader(SONAME, env)
    assert before, "a process without it needs no preparation, and this one has it"
    assert loader_finds(SONAME, env, before) is None
    assert loader_finds(SONAME, env) == str(place / SONAME)


def test_what_is_absent_needs_no_hiding(stubs: Stubs) -> None:
    env = child_environment({"LD_LIBRARY_PATH": str(stubs.folder)})
    assert hidden_from_the_loader("libnowhere.so.1", env) == []
