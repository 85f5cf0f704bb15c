"""Open the driver, the provider and a session in a child process: the last step of a diagnosis.

NVML may work where CUDA does not, and a library may abort the process that opens it, or never return. The child
reports each step before and after it is tried. At a deadline the parent kills it, with all of its own children.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...environment.child import cause_of_death
from ...environment.child_process import ChildFailedError, ChildProcess
from ...environment.gpu.cuda import initialise
from ...environment.gpu.driver import LIBCUDA, load_libcuda, read_nvml
from ...environment.libraries.wheel import read_provider
from ...environment.packages.plugins import environ_of_child
from ...errors import GPUError, counted
from ...model.files import is_special_file
from ...process import parent
from ...process.late import late
from ...process.temporary import private_folder
from ...provider.options import recording_options
from ...provider.placement import read_placement
from ...provider.preloading import OPENING, logger, preload, why_provider_does_not_load
from ...provider.records import describe_record
from ...provider.requests import CPU, CUDA
from ...provider.runtime import load_runtime, why_plugin_is_of_no_use
from .result import NVML, ProbeResult, ProbeStep

if TYPE_CHECKING:
    import numpy
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as extension
else:
    onnxruntime = late("onnxruntime")
    extension = late("onnxruntime.capi.onnxruntime_pybind11_state")
    numpy = late("numpy")

# y = Relu(x) for four floats: opset 13 and IR version 7 are readable by every release since 1.7.
RELU = bytes.fromhex(
    "080712003a370a0c0a0178120179220452656c75120570726f62655a0f0a0178120a0a08080112040a020804620f0a0179120a0a08080112040a"
    "02080442040a00100d"
)

_Outcome = tuple[bool, str, dict[str, Any]]


def run_probe(model: str | os.PathLike[str] | bytes | None, *, timeout: float) -> ProbeResult:
    """Try every step in a child process, and wait for it, at most ``timeout`` seconds.

    No failure of the child raises an exception. If the child cannot start, ``died_in`` is "start".
    """
    if not isinstance(model, bytes):
        model = os.path.abspath(os.fsdecode(model)) if model and not is_special_file(model) else None
    return run_probe_child(try_all, model, timeout=timeout)


def run_probe_child(function: Callable[..., None], *arguments: Any, timeout: float) -> ProbeResult:
    started = time.monotonic()
    entries: list[dict[str, Any]] = []
    returncode: int | None = 0
    timed_out = False
    try:
        with _environ() as environ, ChildProcess(environ=environ, keeps_output=True) as child:
            try:
                child.ask(function, *arguments, timeout=timeout, on_note=entries.append)
            except ChildFailedError as error:
                timed_out, returncode = error.timed_out, child.returncode
            child.kill()
            output = child.output()
    except GPUError as error:  # The child cannot start.
        return ProbeResult((), False, None, None, False, "start", time.monotonic() - started, "\n".join(error.evidence))
    return result_of(entries, output, None if timed_out else returncode, time.monotonic() - started, timed_out)


@contextlib.contextmanager
def _environ() -> Iterator[dict[str, str]]:
    """Yield the variables of a child with ONNX Runtime's telemetry, in which a damaged library may crash."""
    environ = environ_of_child()
    if "ORT_DISABLE_TELEMETRY" in os.environ:
        yield environ
        return
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # Without space or a folder the telemetry stays off.
            environ["TMPDIR"] = opened.enter_context(private_folder("ortgpu-probe-"))
            del environ["ORT_DISABLE_TELEMETRY"]
        yield environ


def result_of(
    entries: Sequence[dict[str, Any]], output: bytes, returncode: int | None, seconds: float, timed_out: bool = False
) -> ProbeResult:
    steps: list[ProbeStep] = []
    current: str | None = None
    opening: str | None = None
    before = 0  # The output had this length at the start of the current step.
    for entry in entries:
        if "begin" in entry:
            current, before = entry["begin"], entry["printed"]
        elif "end" in entry:
            data = entry["data"]
            if not entry["ok"] and (printed := _lines(output[before : entry["printed"]])):
                # Both ends: OpenBLAS prints a cause before NumPy's traceback, others print it last.
                data = {**data, "printed": printed if len(printed) <= 30 else [*printed[:10], *printed[-20:]]}
            steps.append(ProbeStep(entry["end"], entry["ok"], entry["detail"], data))
            current = opening = None
        opening = entry.get("opening", opening)
    completed, end = any("done" in entry for entry in entries), "\n".join(_lines(output)[-20:])
    signal = cause_of_death(returncode) if returncode is not None else None
    died_in, opening = (None, None) if completed else (current or "start", opening)
    return ProbeResult(tuple(steps), completed, returncode, signal, timed_out, died_in, seconds, end, opening)


def _lines(output: bytes) -> list[str]:
    return [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]


# The functions below run in the child. Any step may hang, or end the process.


def try_all(model: str | bytes | None) -> None:
    """Try every step in order; a step that needs a failed one is left out.

    A model in bytes is opened from bytes: ONNX Runtime finds its format and its external data in other ways. The guard
    is not in force: the probe examines ONNX Runtime alone, under `ortgpu exec` as well.
    """
    parent.heed_interrupts()  # OpenBLAS interrupts the import of NumPy if it gets no thread.
    driver, libraries, imported = _step("driver", _driver), _step("libraries", _libraries), _step("import", _import)
    opened = False
    if libraries and imported and load_libcuda()[0] is not None and _step("provider", _provider) and driver:
        opened = _step("session", lambda: _session(RELU, run=True))
        if model is not None and _step("model", lambda: _session(model)):
            # What a record of tune for the model does on the first GPU.
            gpu = next(iter(initialise().devices or ()), None)
            _step("record", lambda: (True, describe_record(model, gpu), {}))
    if model is not None and not opened and hasattr(sys.modules.get("onnxruntime"), "InferenceSession"):
        _step("load", lambda: _load(model))
    _report({"done": True})


def train() -> None:
    """Try the driver and ONNX Runtime's training API. MPI has a child of its own: it would end this one."""
    parent.heed_interrupts()
    _step("driver", _driver)
    _step("training", _training)
    _report({"done": True})


def _step(name: str, attempt: Callable[[], _Outcome]) -> bool:
    _report({"begin": name})
    try:
        ok, detail, data = attempt()
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the finding
        ok, detail, data = False, f"{type(error).__name__}: {error}", {}
    _report({"end": name, "ok": ok, "detail": detail, "data": data})
    return ok


def _report(entry: dict[str, Any]) -> None:
    """Send an entry to the parent, with the length of the output so far."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent.tell({**entry, "printed": os.fstat(1).st_size})


_ACCESS_VIOLATION = 0xC0000005 - (1 << 32)  # os._exit takes a signed number.


def _driver() -> _Outcome:
    # The parent asks the driver only the questions that this process survives.
    _report({"opening": NVML})
    read_nvml()
    _report({"opening": LIBCUDA})
    path, _, _ = load_libcuda()
    _report({"opening": path})
    state = initialise()
    if state.has_crashed:
        os._exit(_ACCESS_VIOLATION)  # The same crash ends a process if the CUDA runtime initialises the driver.
    detail = f"cuInit {state.code}, devices: {'unknown' if state.devices is None else len(state.devices)}"
    detail = "there is no driver" if state.code is None else detail
    return state.code == 0 and state.devices != (), detail, {"code": state.code, "devices": state.devices}


def _libraries() -> _Outcome:
    logger.addHandler(_Opening())
    logger.setLevel(logging.DEBUG)
    report = preload()
    missing = [library.soname for library in report.missing]
    detail = f"missing: {', '.join(missing)}" if missing else f"{len(report.libraries)} loaded"
    data = {"missing": missing, "not_loaded": report.missing, "cudnn_mixed": report.cudnn_mixed, "cudnn": report.cudnn}
    return report.ok, detail, data


class _Opening(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == OPENING:
            _report({"opening": record.getMessage().removeprefix(OPENING % "")})


def _import() -> _Outcome:
    importlib.import_module("onnxruntime")
    providers = list(load_runtime().available_providers or onnxruntime.get_available_providers())
    return CUDA in providers, f"onnxruntime {onnxruntime.__version__}", {"providers": providers}


def _training() -> _Outcome:
    from onnxruntime.training import api, artifacts

    data = {"ort_module": hasattr(onnxruntime.training, "ORTModule")}
    return bool(api and artifacts), f"onnxruntime.training of {onnxruntime.__version__}", data


def _provider() -> _Outcome:
    runtime = load_runtime()
    path = runtime.provider_library
    if path is None:
        return False, "there is no CUDA provider library", {}
    if runtime.cuda_is_plugin:
        problem, error = why_plugin_is_of_no_use(runtime)
        return not (problem or error), error or problem or path, {"plugin_problem": problem}
    error = why_provider_does_not_load(read_provider(path))
    return error is None, error or path, {}


def _load(model: str | bytes) -> _Outcome:
    """Read the model without a GPU, weights in other files and kernels of the CPU: preparing it may take long."""
    extension.InferenceSession(onnxruntime.SessionOptions(), model, isinstance(model, str), False)
    return True, "read", {}


def _session(model: str | bytes, *, run: bool = False) -> _Outcome:
    session = onnxruntime.InferenceSession(model, recording_options(), providers=[CUDA, CPU], enable_fallback=0)
    bound, placement = list(session.get_providers()), read_placement(session)
    data: dict[str, Any] = {"providers": bound, "nodes": placement.nodes if placement.known else None}
    if CUDA not in bound:
        return False, f"bound: {', '.join(bound)}", data
    if run:
        result = session.run(None, {"x": numpy.array([-1, 0, 1, 2], dtype=numpy.float32)})[0]
        return result.tolist() == [0, 0, 1, 2], f"ran: {result.tolist()}", data
    return True, counted(len(placement.nodes), "node") if placement.known else "opened", data
