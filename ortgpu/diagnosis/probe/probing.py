"""Open the driver, the provider and a session in a child process: the last step of a diagnosis.

NVML may work where CUDA does not, and a library may abort the process that opens it, or never return. The child
reports each step before and after it is tried; the parent kills it, with all that it started, at a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...environment.child import cause_of_death, run_python
from ...environment.gpu.driver import LIBCUDA, load_libcuda, read_nvml
from ...environment.packages.plugins import environ_of_child
from ...model.files import is_special_file, write_temporary
from ...provider.preloading import OPENING, logger, preload
from ...provider.requests import CPU, CUDA
from .result import NVML, ProbeResult, ProbeStep

MARK = "ORTGPU-PROBE "  # the start of a line of the report; libraries print the rest

# The guard is passed in, because it stands above the diagnosis.
_OPEN = "from ortgpu import uninstall; probing.try_all(uninstall, *sys.argv[1:])"

# y = Relu(x) for four floats: opset 13, IR version 7, which every release since 1.7 reads.
RELU = bytes.fromhex(
    "080712003a370a0c0a0178120179220452656c75120570726f62655a0f0a0178120a0a08080112040a020804620f0a0179120a0a08080112040a"
    "02080442040a00100d"
)

_Outcome = tuple[bool, str, dict[str, Any]]


def run_probe(model: str | os.PathLike[str] | bytes | None = None, *, timeout: float = 30.0) -> ProbeResult:
    """Run the child and wait for it, at most ``timeout`` seconds.

    Nothing is raised for what happens to it, nor where it cannot be started: ``died_in`` is "start" then. A model in
    bytes is written to a temporary file that no other user can read.
    """
    try:
        if not isinstance(model, bytes):
            path = os.path.abspath(os.fsdecode(model)) if model and not is_special_file(model) else ""
            return run_probe_child(_OPEN, path, timeout=timeout)
        with tempfile.TemporaryDirectory(prefix="ortgpu-probe-") as folder:
            copy = os.path.join(folder, "model")
            write_temporary(copy, model)
            return run_probe_child(_OPEN, copy, "bytes", timeout=timeout)
    except OSError as error:
        return _not_started(str(error), 0.0)


def run_probe_child(code: str, *arguments: str, timeout: float) -> ProbeResult:
    """Run ``code``, which calls a function of this module, in a process of its own."""
    started = time.monotonic()
    ended = run_python(
        f"from {__package__} import probing; {code}",
        *arguments,
        timeout=timeout,
        environ=environ_of_child(),
        together=True,
    )
    seconds = time.monotonic() - started
    if ended.returncode is None and not ended.timed_out:
        return _not_started(ended.errors, seconds)
    return parse_report(ended.output, ended.returncode, seconds)


def _not_started(why: str, seconds: float) -> ProbeResult:
    return ProbeResult((), False, None, None, False, "start", seconds, why)


def parse_report(text: str, returncode: int | None, seconds: float) -> ProbeResult:
    """Return the child's output as a result. ``returncode`` None: it was killed at the deadline."""
    steps: list[ProbeStep] = []
    current: str | None = None
    opening: str | None = None
    rest: list[str] = []
    before = 0  # the number of other lines when the current step began
    completed = False
    for line in text.splitlines():
        if not line.startswith(MARK):
            rest.append(line)
            continue
        try:
            entry = json.loads(line[len(MARK) :])
        except ValueError:  # cut off by the child's death
            continue
        if not isinstance(entry, dict):  # a library printed it
            continue
        if "begin" in entry:
            current, before = entry["begin"], len(rest)
        elif "end" in entry:
            data = entry.get("data", {})
            if not entry.get("ok") and (printed := [each for each in rest[before:] if each.strip()]):
                # Both ends: OpenBLAS prints a cause before NumPy's traceback, others print it last.
                data = {**data, "printed": printed if len(printed) <= 30 else [*printed[:10], *printed[-20:]]}
            steps.append(ProbeStep(str(entry["end"]), bool(entry.get("ok")), entry.get("detail", ""), data))
            current = opening = None
        opening = entry.get("opening", opening)
        completed = completed or "done" in entry
    name = cause_of_death(returncode) if returncode is not None else None
    return ProbeResult(
        tuple(steps),
        completed,
        returncode,
        name,
        returncode is None,
        None if completed else current or "start",
        seconds,
        "\n".join(rest[-20:]),
        None if completed else opening,
    )


# The program of the child. Any step may hang, or end the process.


def try_all(uninstall: Callable[[], None], model: str, given_as: str = "path") -> None:
    """Try every step in order; a step that needs a failed one is left out.

    A model that was given as bytes is opened as bytes: its format and its external data are found in other ways.
    ``uninstall`` ends the guard: the probe asks what ONNX Runtime does by itself, also under `ortgpu exec`.
    """
    driver, libraries, imported = _step("driver", _driver), _step("libraries", _libraries), _step("import", _import)
    uninstall()  # after the import, at which ORTGPU_ENFORCE installs the guard
    opened = False
    if libraries and imported and load_libcuda()[0] is not None and _step("provider", _provider) and driver:
        opened = _step("session", lambda: _session(RELU, run=True))
        if model:
            source = model if given_as == "path" else Path(model).read_bytes()
            if _step("model", lambda: _session(source)):
                _step("record", lambda: _record(source))
    if model and not opened and hasattr(sys.modules.get("onnxruntime"), "InferenceSession"):
        _step("load", lambda: _load(model if given_as == "path" else Path(model).read_bytes()))
    _done()


def train() -> None:
    """Try the driver and ONNX Runtime's training API. MPI has a child of its own: it would end this one."""
    _step("driver", _driver)
    _step("training", _training)
    _done()


def _done() -> None:
    _report({"done": True})
    os._exit(0)  # libraries may hang at exit, and the report is complete


def _step(name: str, attempt: Callable[[], _Outcome]) -> bool:
    _report({"begin": name})
    try:
        ok, detail, data = attempt()
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the finding
        ok, detail, data = False, f"{type(error).__name__}: {error}", {}
    _report({"end": name, "ok": ok, "detail": detail, "data": data})
    return ok


def _report(entry: dict[str, Any]) -> None:
    # One write, so that a crash cannot tear the line.
    os.write(sys.stdout.fileno(), ("\n" + MARK + json.dumps(entry) + "\n").encode())


_ACCESS_VIOLATION = 0xC0000005 - (1 << 32)  # as the signed number that os._exit takes


def _driver() -> _Outcome:
    from ...environment.gpu.cuda import initialise

    # The parent asks the driver only what this process survives.
    _report({"opening": NVML})
    read_nvml()
    _report({"opening": LIBCUDA})
    path, _, _ = load_libcuda()
    _report({"opening": path})
    state = initialise()
    if state.has_crashed:
        os._exit(_ACCESS_VIOLATION)  # as it ends a process in which the CUDA runtime initialises it
    devices = None if state.devices is None else [asdict(device) for device in state.devices]
    count = "unknown" if devices is None else str(len(devices))
    detail = "there is no driver" if state.code is None else f"cuInit {state.code}, devices: {count}"
    return state.code == 0 and devices != [], detail, {"code": state.code, "devices": devices}


def _record(model: str | bytes) -> _Outcome:
    """Say what a record of tune does for the model on the first GPU."""
    from ...environment.gpu.cuda import initialise
    from ...provider.records import describe_record

    return True, describe_record(model, next(iter(initialise().devices or ()), None)), {}


def _libraries() -> _Outcome:
    logger.addHandler(_Opening())
    logger.setLevel(logging.DEBUG)
    report = preload()
    missing = [library.soname for library in report.missing]
    return (
        report.ok,
        f"missing: {', '.join(missing)}" if missing else f"{len(report.libraries)} loaded",
        {
            "missing": missing,
            "not_loaded": [asdict(library) for library in report.missing],
            "cudnn_mixed": report.cudnn_mixed,
            "cudnn": None if report.cudnn is None else (asdict(report.cudnn[0]), report.cudnn[1]),
        },
    )


class _Opening(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == OPENING:
            _report({"opening": record.getMessage().removeprefix(OPENING % "")})


def _import() -> _Outcome:
    import onnxruntime

    from ...provider.runtime import load_runtime

    providers = list(load_runtime().available_providers or onnxruntime.get_available_providers())
    return CUDA in providers, f"onnxruntime {onnxruntime.__version__}", {"providers": providers}


def _training() -> _Outcome:
    import onnxruntime
    from onnxruntime import training
    from onnxruntime.training import api, artifacts

    data = {"ort_module": hasattr(training, "ORTModule")}
    return bool(api and artifacts), f"onnxruntime.training of {onnxruntime.__version__}", data


def _provider() -> _Outcome:
    from ...environment.libraries.wheel import read_provider
    from ...provider.preloading import why_provider_does_not_load
    from ...provider.runtime import load_runtime, why_plugin_is_of_no_use

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
    """Read the model with ONNX Runtime, without a GPU.

    No weights are read from other files, and the model is not made ready to run, which may take long and means other
    kernels on the CPU.
    """
    from onnxruntime import SessionOptions
    from onnxruntime.capi import onnxruntime_pybind11_state as extension

    extension.InferenceSession(SessionOptions(), model, isinstance(model, str), False)
    return True, "read", {}


def _session(model: str | bytes, *, run: bool = False) -> _Outcome:
    import onnxruntime

    from ...provider.options import recording_options
    from ...provider.placement import read_placement

    session = onnxruntime.InferenceSession(model, recording_options(), providers=[CUDA, CPU], enable_fallback=0)
    bound = list(session.get_providers())
    placement = read_placement(session)
    data: dict[str, Any] = {
        "providers": bound,
        "nodes": [asdict(node) for node in placement.nodes] if placement.known else None,
    }
    if CUDA not in bound:
        return False, f"bound: {', '.join(bound)}", data
    if run:
        import numpy

        result = session.run(None, {"x": numpy.array([-1, 0, 1, 2], dtype=numpy.float32)})[0]
        return result.tolist() == [0, 0, 1, 2], f"ran: {result.tolist()}", data
    return True, f"{len(placement.nodes)} nodes" if placement.known else "opened", data
