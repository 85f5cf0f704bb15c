"""The answer of ``GPUSession.shapes``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]

# The number of kept shapes. Each doubling adds a level of If nodes, and some ten microseconds to a run.
MOST = 8


@dataclass(frozen=True, slots=True)
class SessionShapes:
    """The shapes that a session runs without planning its convolutions again.

    Attributes:
        kept: the shapes of the inputs, by name, for each shape that has plans; the one that was used least recently
            first. Empty as long as there are no plans for several shapes.
        most: the number of shapes that are kept. Further ones replace the one that was used least recently.
        why_none: why the session has no plans for several shapes. None if it has some, or has needed none so far.
    """

    kept: tuple[Shapes, ...]
    most: int
    why_none: str | None

    def __str__(self) -> str:
        """Return a line for each shape."""
        if not self.kept:
            return f"no plans for several shapes: {self.why_none or 'none were needed'}"
        return "\n".join(
            ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())
            for shapes in self.kept
        )
