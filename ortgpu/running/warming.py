"""The implementation of ``GPUSession.warm``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PerformanceWarning
from ..model.tensor_types import DTYPES
from ..provider import lifetime
from ..provider.living import stacklevel

if TYPE_CHECKING:
    from .kept_shapes import SessionShapes
    from .plain_runs import RunningSession

Progress = Callable[[int, int], object]


def warm(
    session: RunningSession, feeds: Iterable[Mapping[str, Any]], progress: Progress | None, runs: int = 1
) -> SessionShapes:
    """Run the feeds until each shape has its plans; see GPUSession.warm."""
    lifetime.refuse_if_unusable(session)
    types = types_of(session)
    arrays = [arrays_of(feed, types) for feed in listed(feeds)]
    runner = session._gpu_runner
    total = len(arrays)
    if runner.most_shapes and total > runner.most_shapes:
        text = f"{total} feeds were passed to warm(), and plans are kept for {runner.most_shapes} shapes"
        warnings.warn(text, PerformanceWarning, stacklevel=stacklevel(session))
    runner.prepare(session, arrays[:2])
    for number, feed in enumerate(arrays, 1):
        session.run(None, feed)
        session.run(None, feed)  # the arena gets the memory that a run without planning takes
        if progress is not None:
            progress(number, total)
    runner.widen(session, arrays, runs)
    shapes = runner.shapes()
    # The shapes take turns here, as in later requests: the arena places other shapes beside each.
    for feed in arrays[: len(shapes.kept)]:
        session.run(None, feed)
    return shapes


def warm_sizes(session: RunningSession, feeds: Sequence[Mapping[str, Any]]) -> None:
    """Make plans for the first of ``feeds``, as many as are kept, for the two threads of a service."""
    most = session._gpu_runner.most_shapes
    if most:
        warm(session, feeds[:most], None, runs=2)


def listed(feeds: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the feeds. Raises TypeError for a single one."""
    if isinstance(feeds, Mapping):
        raise TypeError("feeds is a single feed: pass a list of feeds, [feed]")
    return list(feeds)


def types_of(session: RunningSession) -> dict[str, str]:
    """Return the types of the inputs, by name, as the model declares them."""
    return {value.name: value.type for value in (*session._inputs_meta, *session._overridable_initializers)}


def arrays_of(feed: Any, types: Mapping[str, str]) -> dict[str, Any]:
    """Return a feed. A shape instead of an array becomes an array of zeros, or of empty strings.

    Args:
        types: the types of the inputs, by name, as the model declares them.
    """
    if not isinstance(feed, Mapping):
        raise TypeError(f"a feed is a mapping of input names to arrays or shapes, not {type(feed).__name__}")
    return {name: _zeros(name, value, types) if _is_shape(value) else value for name, value in feed.items()}


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(type(size) is int for size in value)


def _zeros(name: str, shape: Any, types: Mapping[str, str]) -> Any:
    kind = types.get(name)
    if kind == "tensor(string)":
        return np.full(tuple(shape), "", dtype=object)
    if kind is None or kind not in DTYPES:
        raise ValueError(f"input {name!r} cannot be made from a shape: pass an array")
    return np.zeros(tuple(shape), DTYPES[kind])
