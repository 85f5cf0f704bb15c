"""Lists of batch sizes on the command line."""

from __future__ import annotations

from typing import Any

import click
import pytest

from ortgpu.cli.batches import parse_batches

NOTHING: Any = None  # the context and the parameter, which no message names


@pytest.mark.parametrize(
    ("text", "sizes"),
    [(None, None), ("1", (1,)), ("1,8,64", (1, 8, 64)), (" 8 , 1", (8, 1)), ("8,1,8", (8, 1))],
)
def test_sizes_in_their_order_and_each_once(text: str | None, sizes: tuple[int, ...] | None) -> None:
    assert parse_batches(NOTHING, NOTHING, text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "1,0", "one", "1;2", "1.5", "1,,2"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no list of positive whole numbers, such as 1,8,64") as caught:
        parse_batches(NOTHING, NOTHING, text)
    assert repr(text) in str(caught.value)
