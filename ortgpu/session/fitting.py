"""``ortgpu.fit``: the GPU memory of a model at each batch, and the largest batch that fits."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..environment.child_process import ChildFailedError, ChildProcess
from ..environment.gpu.cuda import initialise
from ..errors import ExecutionError, GPUError, manual
from ..model.files import ModelSource
from ..process.threads import drop_own_frames
from ..provider.devices import DeviceRequest, check_form, choose_visible, is_cpu, plain_request
from .request import NAMES, PoolArguments, Unpack, refuse_misspelt

_MIB = 1 << 20
_CHILD = "ortgpu.session.fit_child"
_NOISE = 4 * _MIB  # Two measurements of the same run may differ by as much.
_LONGEST = 600.0  # seconds for one measurement: EXHAUSTIVE searches of a large model take minutes


@dataclass(frozen=True, slots=True)
class FitRow:
    """One input of a model. Bytes do not include CUDA's context; None: unknown.

    Attributes:
        batch: items of the input; None for a feed of the caller's.
        shapes: the shapes of the inputs, by name.
        peak: the most GPU memory in the first run.
        steady: the GPU memory of later runs, after ``session.trim()``.
        opening_seconds, first_run_seconds, run_seconds: times of the opening, the first run and a later run.
        fits_now: whether it fits into the memory that was free.
        fits_empty: whether it fits into a GPU of this kind that nothing else uses.
        error: why it did not run: the GPU has too little memory.
    """

    batch: int | None
    shapes: Mapping[str, tuple[int, ...]]
    peak: int | None
    steady: int | None
    opening_seconds: float | None
    first_run_seconds: float | None
    run_seconds: float | None
    fits_now: bool | None
    fits_empty: bool | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ModelFit:
    """One model.

    Attributes:
        model: its path, "<bytes>" for a model in memory.
        opened: bytes of the session before its first run.
        rows: the batches or feeds, in the order of the argument.
        largest_now, largest_empty: the largest batch that fits into the free memory, and into an empty GPU. It is
            estimated by a line through the two largest batches that ran. None: unknown.
    """

    model: str
    opened: int | None
    rows: tuple[FitRow, ...]
    largest_now: int | None
    largest_empty: int | None


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of :func:`ortgpu.fit`. ``str()`` is a table. Sizes are in bytes; None: unknown.

    Attributes:
        device: the GPU; "cpu" if the host's memory was measured.
        on_cpu: True if the host's memory was measured.
        free, total: memory of the device, before the measurement.
        context: memory of CUDA's context, once in each process.
        models: the measurements of each model.
        together: memory of all models in one process, each with its smallest input that ran.
        fit_together: whether ``together`` fits into the free memory. None for one model.
    """

    device: str
    on_cpu: bool
    free: int | None
    total: int | None
    context: int | None
    models: tuple[ModelFit, ...]
    together: int | None
    fit_together: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self._head(), *(line for model in self.models for line in _lines(model)), *self._last()])

    def _head(self) -> str:
        kind = "host memory (no GPU is used)" if self.on_cpu else "GPU memory"
        context = "the process" if self.on_cpu else "CUDA's context"
        return (
            f"{self.device}: {_mib(self.free)} of {_mib(self.total)} MiB of {kind} free; "
            f"{context} takes {_mib(self.context)} MiB beside"
        )

    def _last(self) -> list[str]:
        if self.fit_together is None:
            return []
        fits = "fit" if self.fit_together else "do not fit"
        return [f"Together, at their smallest inputs: {_mib(self.together)} MiB, which {fits} into the free memory"]


def fit(
    model: ModelSource | Sequence[ModelSource],
    batches: Iterable[int] = (1, 8, 32),
    feeds: Iterable[Mapping[str, Any]] | None = None,
    device: DeviceRequest = None,
    *,
    timeout: float = _LONGEST,
    **arguments: Unpack[PoolArguments],
) -> Fit:
    """Measure how much GPU memory a model takes at each batch, in child processes with nothing else on the GPU.

    Each input runs in a process of its own, so that neither the memory nor the loaded kernels of another input count.
    Inputs are made up for each batch (free dimensions beside the batch are 1), or are ``feeds``. If no GPU can be used
    and the CPU is allowed, the host's memory is measured, and the result says so.

    Args:
        model: the path of a model, or its bytes; or a list of these, to tell whether they fit together.
        batches: sizes of the batch. Only 1 is possible for a model without a free first dimension.
        feeds: inputs to run instead of made-up inputs, for each model.
        device: as GPUSession takes it.
        timeout: seconds for each input; a child that takes longer is killed.
        arguments: other arguments of GPUSession: ``providers``, ``allow_cpu``, ``tuned``.

    Returns:
        The measurements. In most containers NVML does not show the memory of a process. Then the figures are for the
        whole GPU, and other processes should not use the GPU during the measurement.

    Raises:
        GPUError, Exception: as GPUSession and its ``run`` raise; an input that is out of memory is a row of the result.
        ExecutionError: the child ended, or took longer than ``timeout``.
        ValueError: a batch is not positive, or no input can be made up.
        TypeError: an argument has another type, or its name looks misspelt.
    """
    models = [model] if isinstance(model, (str, bytes, os.PathLike)) else list(model)
    if not models or not all(isinstance(source, (str, bytes, os.PathLike)) for source in models):
        raise TypeError(f"fit() takes the path of a model, its bytes, or a list of these, not {model!r}")
    inputs = _inputs_of(batches, feeds)
    refuse_misspelt("fit()", arguments.keys() - set(NAMES), (*NAMES, "batches", "feeds", "timeout"))
    device = plain_request(device)
    if not is_cpu(device):
        check_form(device)
    arguments = {"cpu_nodes": "allow", **arguments}
    start: Any = None
    rows: list[list[Any]] = []
    for source in models:
        rows.append([])
        for batch, feed in inputs:
            if start is not None and start.device.is_gpu:
                device = start.device.ordinal  # The device "auto" might be another GPU now.
            with ChildProcess(keeps_output=True) as child:
                begun = _ask(child, "begin", device, arguments.get("allow_cpu"), _uuid_of(device), timeout=timeout)
                options = {**arguments, "device": begun.device.ordinal if begun.device.is_gpu else device}
                rows[-1].append(_ask(child, "measure", source, options, batch, feed, timeout=timeout))
            start = start or begun
    model_fits = tuple(
        _model_fit(source, inputs, measured, start) for source, measured in zip(models, rows, strict=True)
    )
    together = _together(model_fits, start) if len(model_fits) > 1 else None
    return Fit(
        device=str(start.device),
        on_cpu=not start.device.is_gpu,
        free=start.free,
        total=start.total,
        context=start.context,
        models=model_fits,
        together=together,
        fit_together=together <= start.free if together is not None and start.free is not None else None,
    )


def _inputs_of(
    batches: Iterable[int], feeds: Iterable[Mapping[str, Any]] | None
) -> list[tuple[int | None, Mapping[str, Any] | None]]:
    if feeds is not None:
        if isinstance(feeds, Mapping):
            raise TypeError("feeds is a list of feeds, not a feed")
        pairs = [(None, feed) for feed in feeds]
        if not pairs:
            raise ValueError("feeds is empty")
        return list(pairs)
    sizes = [operator.index(batch) for batch in batches]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"batches must be positive, not {sizes}")
    return [(size, None) for size in sizes]


def _uuid_of(device: DeviceRequest) -> str | None:
    """Return the UUID of the GPU to use, or None if it is unknown. Its memory is read before any is taken."""
    if is_cpu(device):
        return None
    try:
        return choose_visible(device, initialise()).uuid
    except GPUError:  # The session in the child raises the same error.
        return None


def _ask(child: ChildProcess, function: str, *arguments: Any, timeout: float) -> Any:
    try:
        return child.ask(f"{_CHILD}:{function}", *arguments, timeout=timeout)
    except ChildFailedError as error:
        raise ExecutionError(
            "the child process that measures did not answer",
            evidence=[str(error)],
            fixes=[manual(f"pass a timeout of more than {timeout:.0f} seconds")] if error.timed_out else [],
        ) from None
    except Exception as error:  # noqa: BLE001 - it is raised again
        raise drop_own_frames(error)  # noqa: B904 - the same error


def _model_fit(
    model: ModelSource, inputs: Sequence[tuple[int | None, Any]], measured: Sequence[Any], start: Any
) -> ModelFit:
    def fits(size: int | None, memory: int | None) -> bool | None:
        return None if None in (size, memory, start.context) else size + start.context <= memory

    rows = tuple(
        FitRow(
            batch=batch,
            fits_now=False if measurement.error else fits(measurement.peak, start.free),
            fits_empty=fits(measurement.peak, start.total),
            **{name: value for name, value in asdict(measurement).items() if name != "opened"},
        )
        for (batch, _), measurement in zip(inputs, measured, strict=True)
    )
    opened = next((measurement.opened for measurement in measured if measurement.opened is not None), None)
    name = "<bytes>" if isinstance(model, bytes) else os.fsdecode(model)
    room = [None if None in (memory, start.context) else memory - start.context for memory in (start.free, start.total)]
    return ModelFit(name, opened, rows, *(_largest_batch(rows, measurement) for measurement in room))


def _largest_batch(rows: Sequence[FitRow], room: int | None) -> int | None:
    """Return the largest batch with a first run in ``room`` bytes, by a line through the two largest that ran."""
    peaks = sorted((row.batch, row.peak) for row in rows if row.batch is not None and row.peak is not None)
    if room is None or len(peaks) < 2:
        return None
    (small, less), (large, more) = peaks[-2:]
    if small == large or more - less < _NOISE:
        return None
    return max(0, large + int((room - more) * (large - small) // (more - less)))


def _together(models: Sequence[ModelFit], start: Any) -> int | None:
    sizes = [min((row.peak for row in model.rows if row.peak is not None), default=None) for model in models]
    known_sizes = [size for size in sizes if size is not None]
    return sum(known_sizes) + (start.context or 0) if len(known_sizes) == len(sizes) else None


def _lines(model: ModelFit) -> list[str]:
    head = f"{'batch':<12}{'first run':>14}{'later runs':>14}{'seconds':>10}{'later':>10}  fits"
    seconds = next((row.opening_seconds for row in model.rows if row.opening_seconds is not None), None)
    after = f", after {seconds:.2f} seconds" if seconds is not None else ""
    lines = [f"{model.model}: {_mib(model.opened)} MiB when it is open{after}", head]
    for number, row in enumerate(model.rows):
        label = f"feed {number}" if row.batch is None else str(row.batch)
        if row.error is not None:
            lines.append(f"{label:<12}{row.error}")
            continue
        fits = {True: "yes", False: "on an empty GPU" if row.fits_empty else "no", None: "unknown"}[row.fits_now]
        sizes = f"{_mib(row.peak):>10} MiB{_mib(row.steady):>10} MiB"
        lines.append(f"{label:<12}{sizes}{row.first_run_seconds or 0:>10.3f}{row.run_seconds or 0:>10.4f}  {fits}")
    if model.largest_now is not None:
        lines.append(f"largest batch, estimated: {model.largest_now} now, {model.largest_empty} on an empty device")
    return lines


def _mib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _MIB:,.0f}"
