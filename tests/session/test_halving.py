"""Models that are converted to float16 inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ortgpu.provider.records import read_record
from ortgpu.session.tuning.children import Place
from ortgpu.session.tuning.tuning import Wanted, tune_at
from tests.session.test_tuning import only
from tests.support.tuning_faults import CPU

pytestmark = pytest.mark.timeout(300)  # a search is many children


def test_float16_inside_keeps_inputs_and_outputs(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "precision")
    wanted = Wanted(network, precision="float16", budget=60)
    found = tune_at(replace(CPU, opener=Place().opener), wanted, tmp_path / "record.json")
    halves = [each for each in found.trials if each.settings.get("precision") == "float16"]
    assert halves
    assert 0 < (halves[0].error or 0) < 2e-2
    assert read_record(tmp_path / "record.json").key.weights.startswith("sha256 ")
