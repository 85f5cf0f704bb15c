"""Options of the command line that list batch sizes."""

from __future__ import annotations

import click


def parse_batches(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Return the sizes of an option. Raises click.BadParameter."""
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise click.BadParameter(f"{text!r} is no list of positive whole numbers, such as 1,8,64")
    return tuple(dict.fromkeys(sizes))
