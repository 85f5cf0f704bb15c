"""The program of the probe's child: it reports each step before and after it is tried.

Any step may hang, or end the process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...environment.gpu.driver import LIBCUDA, load_libcuda, read_nvml
from ...provider.preloading import OPENING, logger, preload
from ...provider.requests import CPU, CUDA
from .parent import MARK
from .result import NVML

# y = Relu(x) for four floats: opset 13, IR version 7, which every release since 1.7 reads.
RELU = bytes.fromhex(
    "080712003a370a0c0a0178120179220452656c75120570726f62655a0f0a0178120a0a08080112040a020804620f0a0179120a0a08080112040a"
    "02080442040a00100d"
)

Outcome = tuple[bool, str, dict[str, Any]]


def main(uninstall: Callable[[], None], model: str, given_as: str = "path") -> None:
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
            _step("model", lambda: _session(model if given_as == "path" else Path(model).read_bytes()))
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


def _step(name: str, attempt: Callable[[], Outcome]) -> bool:
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


def _driver() -> Outcome:
    from ...environment.gpu.cuda import initialise

    # The parent asks the driver only what this process survives.
    _report({"opening": NVML})
    read_nvml()
    _report({"opening": LIBCUDA})
    path, _, _ = load_libcuda()
    _report({"opening": path})
    state = initialise()
    devices = None if state.devices is None else [asdict(device) for device in state.devices]
    count = "unknown" if devices is None else str(len(devices))
    detail = "there is no driver" if state.code is None else f"cuInit {state.code}, devices: {count}"
    return state.code == 0 and devices != [], detail, {"code": state.code, "devices": devices}


def _libraries() -> Outcome:
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
    """Report which library is being opened."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == OPENING:
            _report({"opening": record.getMessage().removeprefix(OPENING % "")})


def _import() -> Outcome:
    import onnxruntime

    providers = list(onnxruntime.get_available_providers())
    return CUDA in providers, f"onnxruntime {onnxruntime.__version__}", {"providers": providers}


def _training() -> Outcome:
    import onnxruntime
    from onnxruntime import training
    from onnxruntime.training import api, artifacts

    data = {"ort_module": hasattr(training, "ORTModule")}
    return bool(api and artifacts), f"onnxruntime.training of {onnxruntime.__version__}", data


def _provider() -> Outcome:
    from ...environment.libraries.wheel import read_provider
    from ...environment.packages.installed import locate_packages
    from ...provider.preloading import why_provider_does_not_load

    path = locate_packages().onnxruntime.provider_library
    if path is None:
        return False, "there is no CUDA provider library", {}
    error = why_provider_does_not_load(read_provider(path))
    return error is None, error or path, {}


def _load(model: str | bytes) -> Outcome:
    """Read the model with ONNX Runtime, without a GPU.

    No weights are read from other files, and the model is not made ready to run, which may take long and means other
    kernels on the CPU.
    """
    from onnxruntime import SessionOptions
    from onnxruntime.capi import onnxruntime_pybind11_state as extension

    extension.InferenceSession(SessionOptions(), model, isinstance(model, str), False)
    return True, "read", {}


def _session(model: str | bytes, *, run: bool = False) -> Outcome:
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
