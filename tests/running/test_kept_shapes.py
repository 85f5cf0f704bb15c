"""What ``GPUSession.shapes`` answers."""

from __future__ import annotations

import dataclasses

import pytest

from ortgpu.running.kept_shapes import MOST, SessionShapes


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (None, "no plans for several shapes: none were needed"),
        ("it is on the CPU", "no plans for several shapes: it is on the CPU"),
    ],
)
def test_without_plans_it_says_why(why: str | None, text: str) -> None:
    assert str(SessionShapes((), MOST, why)) == text


def test_a_line_for_each_shape_the_least_recently_used_first() -> None:
    kept = ({"x": (1, 3, 224, 224), "scale": ()}, {"x": (8, 3, 224, 224), "scale": ()})
    assert str(SessionShapes(kept, MOST, None)) == "x 1x3x224x224, scale scalar\nx 8x3x224x224, scale scalar"


def test_nobody_changes_it() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SessionShapes((), MOST, None).most = 9  # type: ignore[misc]  # which is the point
