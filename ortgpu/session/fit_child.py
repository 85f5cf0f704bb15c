"""Measure how much GPU memory a model takes with one input, in a child process with nothing else on the GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..diagnosis.probe.probing import RELU
from ..environment.gpu.driver import processes_on, read_gpu_memory
from ..model.files import ModelSource
from ..process.parent import tell
from ..provider.devices import Device
from ..running.made_inputs import UnknownInputError, batch_dimension, make_inputs, shape_of
from .gpu_session import GPUSession

_STEADY_RUNS = 5  # With two, a small U-Net had 64 MiB less than later.


@dataclass(frozen=True, slots=True)
class Start:
    """The GPU before a model is opened.

    Attributes:
        device: the device that the models are opened on.
        free, total: bytes of the GPU before this process took any. On the CPU: bytes of host memory. None: unknown.
        context: the bytes that CUDA's context takes. All sessions of a process share it. None: unknown.
    """

    device: Device
    free: int | None
    total: int | None
    context: int | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model with one input, in a session of its own: what :class:`fitting.FitRow` says of it.

    ``opened`` are the bytes of the open session before its first run. After an error, the figures of later steps are
    unknown.
    """

    shapes: Mapping[str, tuple[int, ...]]
    opened: int | None = None
    peak: int | None = None
    steady: int | None = None
    opening_seconds: float | None = None
    first_run_seconds: float | None = None
    run_seconds: float | None = None
    error: str | None = None


_device: Device
_used_before: int | None = None  # The whole GPU's figure serves where NVML does not show this process.
_context: int | None = None


def begin(device: Any, allow_cpu: bool | None, uuid: str | None) -> Start:
    """Open a session of one node, and return the memory of the GPU. ``uuid`` names the GPU, if it is known before."""
    global _device, _used_before, _context
    memory = read_gpu_memory(uuid) if uuid is not None else None
    with GPUSession(RELU, device=device, allow_cpu=allow_cpu) as session:
        session.run(None, make_inputs(session.get_inputs()))
        _device = session.device
    _used_before = memory[1] - memory[0] if memory is not None else None
    _context = _taken()
    if not _device.is_gpu:
        free, total = _host_memory()
    else:
        free, total = memory if memory is not None else (None, _device.total_memory)
    return Start(_device, free, total, _context)


def measure(
    model: ModelSource, arguments: Mapping[str, Any], batch: int | None, feed: Mapping[str, Any] | None
) -> Measurement:
    """Open a model in a session of its own and run it on ``feed``, or on an input that is made up for ``batch``.

    Raises:
        UnknownInputError: no input can be made up, or none of this batch.
        Exception: as the constructor of GPUSession and ``run`` raise, except MemoryError.
    """
    start = time.perf_counter()
    try:
        session = GPUSession(model, **arguments)
    except MemoryError as error:
        return Measurement({}, error=_summary(error))
    opening = time.perf_counter() - start
    with session:
        opened = _growth_since_context()
        if feed is None:
            declared = session.get_inputs()
            if batch not in (None, 1) and batch_dimension(declared) is None:
                raise UnknownInputError("the model has no free batch dimension")
            feed = make_inputs(declared, batch or 1)
        shapes = {name: tuple(map(int, shape_of(value))) for name, value in feed.items()}
        tell(shapes)
        try:
            first = _seconds(session, feed)
            peak = _growth_since_context()
            session.trim()
            later = min(_seconds(session, feed) for _ in range(_STEADY_RUNS))
            steady = _growth_since_context()
        except MemoryError as error:
            return Measurement(shapes, opened, opening_seconds=opening, error=_summary(error))
    return Measurement(shapes, opened, peak, steady, opening, first, later)


def _seconds(session: GPUSession, feed: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    session.run(None, dict(feed))
    return time.perf_counter() - start


def _taken() -> int | None:
    """Return the memory of this process: on the GPU, or of the host."""
    if not _device.is_gpu:
        return _resident()
    if _device.uuid is None:
        return None
    own_bytes = processes_on(_device.uuid).get(os.getpid())
    if own_bytes is not None:
        return own_bytes
    memory = read_gpu_memory(_device.uuid)
    return memory[1] - memory[0] - _used_before if memory is not None and _used_before is not None else None


def _growth_since_context() -> int | None:
    taken = _taken()
    return max(taken - _context, 0) if taken is not None and _context is not None else None


def _summary(error: BaseException) -> str:
    return str(getattr(error, "summary", None) or error).partition("\n")[0]


def _resident() -> int | None:
    """Return the bytes of host memory that this process has; None where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _host_memory() -> tuple[int | None, int | None]:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.strip()}
    except (OSError, ValueError, IndexError):
        return None, None
    return sizes.get("MemAvailable"), sizes.get("MemTotal")
