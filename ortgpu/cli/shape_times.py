"""The cost of a change of shape, and the gain by plans for several shapes: ``ortgpu check --shapes`` and ``bench``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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

    def document(self) -> dict[str, Any]:
        return asdict(self)


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
    plain_session = session._gpu_runner.own

    def seconds(feed: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        plain_session.run(session, None, dict(feed), None)
        return time.perf_counter() - start

    repeated: dict[int, float] = {}
    for size, feed in feeds.items():
        seconds(feed)
        repeated[size] = statistics.median(seconds(feed) for _ in range(_REPEATS))
    changed = _measure_in_turn(feeds, seconds)
    has_plans = bool(session.warm(list(feeds.values())).kept)

    def planned_seconds(feed: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        session.run(None, dict(feed))
        return time.perf_counter() - start

    planned = _measure_in_turn(feeds, planned_seconds) if has_plans else {}
    return [
        ShapeTimes(
            size,
            _milliseconds(repeated[size]),
            _milliseconds(changed[size]),
            _milliseconds(planned[size]) if size in planned else None,
        )
        for size in feeds
    ]


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


def _measure_in_turn(feeds: Mapping[int, Any], seconds: Any) -> dict[int, float]:
    seconds_by_size: dict[int, list[float]] = {size: [] for size in feeds}
    for _ in range(_REPEATS):
        for size, feed in feeds.items():
            seconds_by_size[size].append(seconds(feed))
    return {size: statistics.median(times) for size, times in seconds_by_size.items()}


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 4)
