"""The report on an open session, for a person or as plain data."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ortgpu.cli import output
from ortgpu.environment.gpu import driver
from ortgpu.environment.inspection import plain_data
from ortgpu.environment.packages.installed import read_held
from ortgpu.errors import CPUExecutionWarning, GPUError
from ortgpu.provider.records import describe_record
from ortgpu.provider.requests import CPU, CUDA
from ortgpu.provider.runtime import load_runtime

if TYPE_CHECKING:
    from ortgpu import GPUSession
    from ortgpu.provider.devices import Device
    from ortgpu.provider.placement import Placement

logger = logging.getLogger("ortgpu")


@dataclass(frozen=True, slots=True)
class SessionReport:
    device: Device
    placement: Placement
    providers: tuple[str, ...]
    options: Mapping[str, str]  # The options that the CUDA provider reports.
    gpu_memory: int | None  # Bytes of this process, with its context; None if the driver knows other process ids.
    latency: Mapping[str, float] | None  # The times of ``latency_of``.
    latency_error: str | None
    tuned: str | None = None  # The effect of a record of tune, or why it has none; None on the CPU.
    held: str | None = None  # The version of the onnxruntime of `ortgpu hold`; None without a hold.

    @property
    def is_idle(self) -> bool:
        """True if a GPU is bound and no node is placed on it, as with a model of strings alone."""
        return self.device.is_gpu and self.placement.known and set(self.placement.by_provider) == {CPU}

    def document(self) -> dict[str, object]:
        return {
            "device": device_document(self.device),
            "providers": list(self.providers),
            "provider_options": dict(self.options),
            "placement": {
                "known": self.placement.known,
                "by_provider": self.placement.by_provider,
                "cpu_compute_nodes": [
                    {"name": node.name, "op_type": node.op_type, "domain": node.domain}
                    for node in self.placement.cpu_compute_nodes
                ],
            },
            "gpu_memory": self.gpu_memory,
            "latency_ms": self.latency,
            "latency_error": self.latency_error,
            "tuned": self.tuned,
            "held": self.held,
        }

    def show(self, console: Console, *, verbose: bool = False) -> None:
        output.facts(console, self._facts())
        output.heading(console, "Placement of the nodes")
        if self.placement.known:
            output.table(console, ("provider", "kind", "operator", "nodes"), self.placement.rows())
        else:
            output.line(console, f"  {self.placement}")
        if self.options and verbose:
            output.heading(console, f"Options bound to {CUDA}")
            output.facts(console, dict(sorted(self.options.items())))

    def _facts(self) -> dict[str, object]:
        device = self.device
        rows: dict[str, object] = {"device": f"cuda:{device.ordinal}" if device.is_gpu else "the CPU"}
        if device.is_gpu:
            capability = device.compute_capability
            rows["name"] = device.name or "unknown"
            rows["uuid"] = device.uuid or "unknown"
            rows["compute capability"] = ".".join(map(str, capability)) if capability else "unknown"
            rows["memory"] = _mebibytes(device.total_memory)
            rows["driver"] = device.driver_version or "unknown"
            rows["used by this process"] = _mebibytes(self.gpu_memory)
        rows["providers"] = ", ".join(self.providers)
        if self.latency:
            text = "first run {first:.2f} ms; of {runs} more, median {median:.3f} ms, fastest {min:.3f} ms"
            rows["time"] = text.format_map(self.latency)
        if self.tuned:
            rows["settings"] = self.tuned
        if self.held:
            rows["held"] = f"libraries that require onnxruntime find {self.held} (ortgpu hold)"
        if self.latency_error:
            rows["time"] = f"not measured: {self.latency_error}"
        return rows


def device_document(device: Device) -> dict[str, object]:
    facts = plain_data(device)
    del facts["kind"]
    return {"is_gpu": device.is_gpu, **facts}


def latency_of(seconds: Sequence[float]) -> dict[str, float]:
    """Return the times of runs in milliseconds, rounded to the precision of the clock.

    The first run of two or more is separate, since it loads kernels and plans convolutions.
    """
    first, *others = [round(duration * 1e3, 4) for duration in seconds]
    return {"first": first, "median": round(statistics.median(others), 4), "min": min(others), "runs": len(others)}


def read(
    session: GPUSession, feeds: Mapping[str, Any] | None, runs: int, reason: str | None, refused: str
) -> SessionReport:
    """Run the model once and then ``runs`` times, and return the report of the session.

    Without ``feeds`` nothing runs, and ``reason`` says why. If ONNX Runtime refuses the inputs, the report begins its
    message with ``refused``. A GPUError is raised.
    """
    times = []
    if feeds is not None:
        try:
            for _ in range(runs + 1):
                start = time.perf_counter()
                session.run(None, dict(feeds))
                times.append(time.perf_counter() - start)
        except GPUError:
            raise
        except Exception as error:
            if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("onnxruntime."):
                raise
            times, reason = [], f"{refused}: {error}"
    uuid = session.device.uuid
    return SessionReport(
        device=session.device,
        placement=session.placement,
        providers=tuple(session.get_providers()),
        options=dict(session.get_provider_options().get(CUDA, {})),
        gpu_memory=driver.processes_on(uuid).get(os.getpid()) if uuid else None,
        latency=latency_of(times) if times else None,
        latency_error=reason,
        tuned=(
            describe_record(session._request.model, session.device, session.options_chosen)
            if session.device.is_gpu
            else None
        ),
        held=next((distribution.version for distribution in read_held()), None),
    )


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Keep stdout for the report and collect warnings. Collected warnings are not logged.

    ONNX Runtime's Python code and other libraries may print to stdout. Inside this block that goes to stderr. ONNX
    Runtime's log is silent from here on, because it would repeat the content of the report for each session.
    """
    with (
        _libraries_print_to_stderr(),
        contextlib.redirect_stdout(sys.stderr),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)  # The report shows them, even under `python -W error`.
        logger.addFilter(_is_no_warning)
        try:
            if (onnxruntime := load_runtime().module) is not None:
                onnxruntime.set_default_logger_severity(4)  # Only fatal errors are logged. Other errors are raised.
            yield caught
        finally:
            logger.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return not hasattr(record, "warning")


def split_warnings(caught: Iterable[warnings.WarningMessage]) -> tuple[GPUError | None, list[str]]:
    """Return the error that put a session on the CPU, or None, and the first lines of other warnings.

    The first line is enough, since the report shows a table of the placement.
    """
    messages = [warning.message for warning in caught]
    because = next((message.error for message in messages if isinstance(message, CPUExecutionWarning)), None)
    others = [message for message in messages if not isinstance(message, CPUExecutionWarning)]
    return because, [str(message).partition("\n")[0] for message in others]


def show_warnings(console: Console, texts: Iterable[str]) -> None:
    for text in texts:
        output.line(console, f"warning: {text}", style="yellow")


@contextlib.contextmanager
def _libraries_print_to_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr, because libraries write to it. Flush the buffers of C at the end."""
    try:
        real_stdout = os.dup(1)
    except OSError:  # The descriptor is closed.
        yield
        return
    with contextlib.suppress(OSError):  # stderr may be closed.
        os.dup2(2, 1)
    try:
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)
        os.dup2(real_stdout, 1)
        os.close(real_stdout)


def _mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / (1 << 20):,.0f} MiB"
