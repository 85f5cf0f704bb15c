"""The first tensor that diverges, as ``ortgpu check --compare`` looks for it, with the CPU in the place of a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ortgpu.cli.divergence import locate
from tests.support.networks import CHANNELS, SIZE, Network
from tests.support.tuning_faults import FAULTY

FEED = {"x": np.random.default_rng(0).random((1, CHANNELS, SIZE, SIZE), np.float32)}


@pytest.mark.parametrize(
    ("settings", "has_cpu", "where"),
    [
        ({"layout": "channels-last"}, True, "tensor 'v4' is the first that differs"),
        ({"layout": "channels-last"}, False, "tensor 'v4' is the first that differs"),
        (
            {"search": "heuristic"},
            True,
            "the difference vanishes when inner tensors become outputs, since operators are not fused then",
        ),
    ],
)
def test_the_first_diverging_tensor_is_found(settings: dict[str, str], has_cpu: bool, where: str) -> None:
    """The third of four convolutions has a wrong channel. Their tensors are v0 to v7; the third one makes v4."""
    network = Network(0)
    for _ in range(4):
        network.add("Relu", network.conv())
    assert locate(network.model(), FAULTY, FEED, settings, has_cpu) == where
