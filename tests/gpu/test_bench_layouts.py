"""``ortgpu bench`` tries other layouts of images where they can be right, and nowhere else. Times are not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortgpu.session.chosen.layouts import LAYOUTS
from tests.support.command_line import is_clean, ortgpu
from tests.support.networks import CHANNELS, Network

pytestmark = pytest.mark.ortgpu

FIRST, LAST, FUSED = LAYOUTS


def benched(model: Path, *arguments: str) -> dict[str, Any]:
    result = ortgpu("bench", str(model), "--rounds", "5", "--json", *arguments)
    assert result.returncode == 0, result
    assert is_clean(result)
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("name", ["resnet50", "conv"])
def test_those_that_the_session_has_not(name: str, make_model: Callable[[str], tuple[Path, str]]) -> None:
    path, _ = make_model(name)
    document = benched(path, "--batch", "1,4")
    assert document["left_out"] == []
    layouts = document["layouts"]
    tried = tuple(dict.fromkeys(each["layout"] for each in layouts))
    # A network of many convolutions has the last one already, on a GPU where that was measured.
    assert tried in ([(LAST, FUSED), (FIRST, LAST)] if name == "resnet50" else [(LAST, FUSED)])
    assert [(each["layout"], each["batch"]) for each in layouts] == [(layout, n) for layout in tried for n in (1, 4)]
    for each in layouts:
        low, high = each["ratio_to_run"]["quartiles"]
        assert 0 < low <= each["ratio_to_run"]["median"] <= high
        assert each["items_per_second"]["median"] > 0
        assert 0 < each["latency_ms"]["p50"] <= each["latency_ms"]["p90"]
        assert each["provider_options"] == LAYOUTS[each["layout"]]


def test_without_convolutions_none_is_tried(mlp: Path) -> None:
    document = benched(mlp, "--batch", "1")
    assert (document["layouts"], document["left_out"]) == ([], [])


def _computed_weights(network: Network) -> None:
    # Not of constants alone, which would be computed once, when the session is made.
    network.inputs.append(("factor", [1]))
    network.add("Conv", "x", network.add("Mul", network.weights(CHANNELS, CHANNELS, 1, 1), "factor"))


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (np.float32, "weights of a convolution are not constant"),
        (np.float64, "weights of a convolution are of the type"),
    ],
)
def test_weights_that_forbid_it(dtype: type, why: str, tmp_path: Path) -> None:
    network = Network(0, dtype)
    network.conv()
    if dtype is np.float32:
        _computed_weights(network)
    path = tmp_path / "model.onnx"
    path.write_bytes(network.model())
    document = benched(path, "--batch", "2")
    assert document["layouts"] == []
    left_out = [each for each in document["left_out"] if each["way"] in LAYOUTS]
    assert [(each["way"], each["batch"]) for each in left_out] == [(LAST, None), (FUSED, None)]
    assert all(each["why"].startswith(why) for each in left_out)
