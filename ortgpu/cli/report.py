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
    options: Mapping[str, str]  # of the CUDA provider, as it has them
    gpu_memory: int | None  # bytes of this process, with its context; None if the driver knows other process ids
    latency: Mapping[str, float] | None  # see ``latency_of``
    latency_error: str | None
    tuned: str | None = None  # what a record of tune does for the session, or why it does nothing; None on the CPU
    held: str | None = None  # the version of onnxruntime that `ortgpu hold` stands for; None: nothing is held

    @property
    def is_idle(self) -> bool:
        """True if a GPU is bound and no node is placed on it, as with a model of strings alone."""
        return self.device.is_gpu and self.placement.known and set(self.placement.by_provider) == {CPU}

    def as_dict(self) -> dict[str, object]:
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
        found: dict[str, object] = {"device": f"cuda:{device.ordinal}" if device.is_gpu else "the CPU"}
        if device.is_gpu:
            capability = device.compute_capability
            found["name"] = device.name or "unknown"
            found["uuid"] = device.uuid or "unknown"
            found["compute capability"] = ".".join(map(str, capability)) if capability else "unknown"
            found["memory"] = _mebibytes(device.total_memory)
            found["driver"] = device.driver_version or "unknown"
            found["used by this process"] = _mebibytes(self.gpu_memory)
        found["providers"] = ", ".join(self.providers)
        if self.latency:
            text = "first run {first:.2f} ms; of {runs} more, median {median:.3f} ms, fastest {min:.3f} ms"
            found["time"] = text.format_map(self.latency)
        if self.tuned:
            found["settings"] = self.tuned
        if self.held:
            found["held"] = f"libraries that require onnxruntime find {self.held} (ortgpu hold)"
        if self.latency_error:
            found["time"] = f"not measured: {self.latency_error}"
        return found


def device_document(device: Device) -> dict[str, object]:
    facts = plain_data(device)
    del facts["kind"]
    return {"is_gpu": device.is_gpu, **facts}


def latency_of(seconds: Sequence[float]) -> dict[str, float]:
    """Return the times of runs in milliseconds, rounded to the precision of the clock.

    The first of two or more is separate, since it loads kernels and plans convolutions.
    """
    first, *others = [round(each * 1e3, 4) for each in seconds]
    return {"first": first, "median": round(statistics.median(others), 4), "min": min(others), "runs": len(others)}


def read(
    session: GPUSession, feeds: Mapping[str, Any] | None, runs: int, reason: str | None, refused: str
) -> SessionReport:
    """Run the model once and then ``runs`` times, and return the report of the session.

    Without ``feeds`` nothing runs, and ``reason`` says why. If ONNX Runtime refuses the inputs, which may be made up,
    the report says so in the words of ``refused``. A GPUError is raised.
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
        held=next((one.version for one in read_held()), None),
    )


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Keep stdout for the report and collect warnings, which are then not logged as well.

    ONNX Runtime's Python code and other libraries may print to stdout. Inside this block that goes to stderr. ONNX
    Runtime's log is silent from here on: for each session it would repeat what the report says once.
    """
    with (
        _libraries_print_to_stderr(),
        contextlib.redirect_stdout(sys.stderr),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)  # also under `python -W error`, since the report shows them
        logger.addFilter(_is_no_warning)
        try:
            if (onnxruntime := load_runtime().module) is not None:
                onnxruntime.set_default_logger_severity(4)  # fatal errors; others are raised
            yield caught
        finally:
            logger.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return not hasattr(record, "warning")


def split_warnings(caught: Iterable[warnings.WarningMessage]) -> tuple[GPUError | None, list[str]]:
    """Return the error for which a session is on the CPU, or None, and the first lines of other warnings.

    The first line is enough, since the report shows a table of the placement.
    """
    messages = [each.message for each in caught]
    because = next((message.error for message in messages if isinstance(message, CPUExecutionWarning)), None)
    others = [message for message in messages if not isinstance(message, CPUExecutionWarning)]
    return because, [str(message).partition("\n")[0] for message in others]


def show_warnings(console: Console, texts: Iterable[str]) -> None:
    for text in texts:
        output.line(console, f"warning: {text}", style="yellow")


@contextlib.contextmanager
def _libraries_print_to_stderr() -> Iterator[None]:
    """Redirect file descriptor 1, to which libraries write, to stderr, and flush the buffers of C at the end."""
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    with contextlib.suppress(OSError):  # stderr is closed
        os.dup2(2, 1)
    try:
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / (1 << 20):,.0f} MiB"
