"""The cost of a change of shape, and the gain by plans for several shapes: ``ortgpu check --shapes`` and ``bench``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ortgpu.cli import output
from ortgpu.process.late import late

if TYPE_CHECKING:
    from rich.console import Console

    from ortgpu import GPUSession
    from ortgpu.running import made_inputs
else:
    made_inputs = late("ortgpu.running.made_inputs")

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """The milliseconds of a run with one size of the batch.

    Attributes:
        repeated: after a run of the same shape.
        changed: after a run of another shape, without plans for several shapes.
        planned: after a run of another shape, with such plans; None if the session has no plans.
    """

    batch: int
    repeated: float
    changed: float
    planned: float | None


def measure(session: GPUSession, sizes: Sequence[int]) -> list[ShapeTimes]:
    """Run made-up inputs of each size: repeated, alternately without plans, and alternately with plans.

    Raises:
        made_inputs.UnknownInputError: no inputs can be made up, or the model has a fixed batch size.
        GPUError, Exception: as ``run`` raises.
    """
    declared = session.get_inputs()
    if made_inputs.batch_dimension(declared) is None:
        raise made_inputs.UnknownInputError("the model has no free batch dimension")
    feeds = {size: made_inputs.make_inputs(declared, size) for size in sizes}

    def milliseconds(run: Callable[[None, dict[str, Any], None], object], feed: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        run(None, dict(feed), None)
        return round(1e3 * (time.perf_counter() - start), 4)

    without_plans = partial(milliseconds, partial(session._gpu_runner.own.run, session))
    repeated: dict[int, float] = {}
    for size, feed in feeds.items():
        without_plans(feed)
        repeated.update(_measure_in_turn({size: feed}, without_plans))
    changed = _measure_in_turn(feeds, without_plans)
    has_plans = bool(session.warm(list(feeds.values())).kept)

    planned = _measure_in_turn(feeds, partial(milliseconds, session.run)) if has_plans else {}
    return [ShapeTimes(size, repeated[size], changed[size], planned.get(size)) for size in feeds]


def show(console: Console, times: Sequence[ShapeTimes]) -> None:
    output.heading(console, "Milliseconds a run, by batch")
    rows = [
        (
            str(shape.batch),
            f"{shape.repeated:.3f}",
            f"{shape.changed:.3f}",
            "-" if shape.planned is None else f"{shape.planned:.3f}",
        )
        for shape in times
    ]
    output.table(console, ("batch", "repeated", "after another", "the same, with plans"), rows)


def _measure_in_turn(feeds: Mapping[int, Any], time_of: Callable[[Any], float]) -> dict[int, float]:
    times = [{size: time_of(feed) for size, feed in feeds.items()} for _ in range(_REPEATS)]
    return {size: statistics.median(each[size] for each in times) for size in feeds}
