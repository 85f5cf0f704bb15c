"""The list of mutants stays alive: each can be planted, and its tests exist."""

from __future__ import annotations

import pytest

from tests.mutants.planted import MUTANTS, Mutant
from tests.support.children import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_can_be_planted(mutant: Mutant) -> None:
    """The old text occurs once, and the new text is Python."""
    planted = mutant.applied((ROOT / "ortgpu" / mutant.path).read_text(encoding="utf-8"))
    compile(planted, mutant.path, "exec", dont_inherit=True)
    assert all((ROOT / path.partition("::")[0]).is_file() for path in mutant.tests)


def test_names_are_unique_and_there_are_at_least_a_hundred() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len({*names}) >= 100
