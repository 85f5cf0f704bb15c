"""The opening of the provider: how often its libraries are searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ortgpu.environment.libraries.catalogue import BY_STEM
from ortgpu.environment.libraries.search import Candidate, Resolution
from ortgpu.environment.packages.installed import Packages
from ortgpu.provider import runtime as module
from ortgpu.provider.preloading import MissingLibrary, Plan, PreloadReport
from ortgpu.provider.runtime import Runtime
from tests.support.made_facts import HEALTHY, SEEN_HEALTHY

SONAME = "libcublas.so.13"
FILE = Candidate(SONAME, f"/wheels/{SONAME}", "nvidia wheels", "/wheels")


@pytest.mark.parametrize(
    ("candidates", "is_missing", "searches"),
    [((FILE,), False, ["quick"]), ((FILE,), True, ["quick", "thorough"]), ((), True, ["quick"])],
    ids=["it loads", "its file does not load", "it has no file"],
)
def test_a_second_search_follows_only_one_that_may_have_ended_early(
    monkeypatch: pytest.MonkeyPatch, candidates: Sequence[Candidate], is_missing: bool, searches: list[str]
) -> None:
    """The quick search ends at a folder that has everything. Where a library has no file, it has seen all folders."""
    report = SEEN_HEALTHY.observed.preload
    assert report is not None
    missing = (MissingLibrary(SONAME, True, None, ()),) if is_missing else ()
    # Without a driver the provider itself is not opened.
    loaded = replace(report, missing=missing, driver_missing=True)
    done: list[str] = []

    def plan(_: Packages, *, thorough: bool = True) -> Plan:
        done.append("thorough" if thorough else "quick")
        return Plan(loaded.provider, (Resolution(BY_STEM["libcublas"], SONAME, True, tuple(candidates), ()),))

    def load(_: Plan, *, lazily_opened: frozenset[str]) -> PreloadReport:
        assert lazily_opened == frozenset()
        return loaded

    monkeypatch.setattr(module, "_runtime", None)
    monkeypatch.setattr(module, "load_runtime", lambda: Runtime(HEALTHY.environment.packages, None, None, None))
    monkeypatch.setattr(module, "plan", plan)
    monkeypatch.setattr(module, "load", load)
    assert module.open_provider().preload is loaded
    assert done == searches
