"""``ortgpu.tune``: measure the settings for a model on its GPU, and keep the fastest in a record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..model.files import ModelSource
from ..process.late import late
from ..process.threads import drop_own_frames
from ..provider.requests import parse
from .tuning.children import BUDGET, Place, Trial, Tuning, Wanted

if TYPE_CHECKING:
    from ..provider.devices import Device, DeviceRequest
    from .tuning import tuning
    from .tuning.children import Objective, Precision
else:
    tuning = late("ortgpu.session.tuning.tuning")

_BATCHES: Mapping[str, tuple[int, ...]] = {"latency": (1,), "throughput": (32,)}


def tune(
    model: ModelSource,
    *,
    device: Device | DeviceRequest = None,
    feeds: Sequence[Mapping[str, Any]] | None = None,
    batches: Sequence[int] | None = None,
    objective: Objective = "latency",
    precision: Precision = "float32",
    budget: float = BUDGET,
    record: str | os.PathLike[str] | None = None,
    on_trial: Callable[[Trial], object] = lambda _: None,
    providers: Sequence[Any] = (),
) -> Tuning:
    """Measure the settings for a model on its GPU, compare every result, and keep the fastest in a record.

    Each candidate runs in a child process with a deadline, alternately with plain ONNX Runtime. Its results may be
    twice as far from the CPU's float32 results as plain ONNX Runtime's are. Only one process of this user at a time
    tunes on a GPU. Other work on the GPU spoils the measurement.

    Args:
        model: path or bytes.
        device: as for GPUSession.
        feeds: inputs to measure with, one mapping for each batch. Without them inputs are made up: batches of
            ``batches`` items, other free dimensions are 1.
        objective: "latency" measures single runs with their arrays on the GPU, by default one item. "throughput"
            measures four runs at a time from arrays to arrays, as ``map`` makes them, by default 32 items.
        precision: "float16" also tries float16 inside, with inputs and outputs as they are. Its results may be off by
            2e-2 of the largest value of an output.
        budget: seconds for the candidates; no further candidate is tried after it.
        record: the path of the record, instead of the user's cache folder.
        on_trial: called with each trial when it has ended.
        providers: as for GPUSession. They are measured at the end as they are, for the budget once more. TensorRT is an
            example: it is no candidate and was never run here. No record has these providers.

    Raises:
        GPUError: the model cannot be opened on the GPU.
        UnknownInputError: no inputs can be made up. It is a ValueError.
        TimeoutError: another process tuned on this GPU all the time, or the model takes minutes to open.
        OSError: ``record`` cannot be written.
        ValueError: an argument is invalid.
        Exception: ONNX Runtime's own, if it refuses the model or the inputs.

    Not promised: the same choice each time. Two settings count as equal if their times differ by 1 % or less.
    """
    if objective not in _BATCHES:
        raise ValueError(f'objective must be "latency" or "throughput", not {objective!r}')
    if precision not in ("float32", "float16"):
        raise ValueError(f'precision must be "float32" or "float16", not {precision!r}')
    shapes = tuple(batches or _BATCHES[objective])
    if (feeds is not None and not feeds) or min(shapes) < 1:
        raise ValueError("there must be a feed, or a batch, and batches must be of one item or more")
    provider_arguments = tuple(parse(list(providers), None).provider_arguments())
    from .gpu_session import GPUSession as GPUSession  # raises the reason if ONNX Runtime cannot be imported

    inputs = tuple(map(dict, feeds)) if feeds is not None else None
    request = Wanted(model, device, inputs, shapes, objective, precision, budget, provider_arguments)
    try:
        return tuning.tune_at(Place(), request, record, on_trial=on_trial)
    except Exception as error:  # noqa: BLE001 - it is raised again
        raise drop_own_frames(error)  # noqa: B904 - the same error
