"""What the children of test_guard.py do: one function each, started as ``guarded_programs.py NAME MODEL``.

A program reports facts, the tests judge. Where there is no GPU, everything of a verified session is real but the device
that it is said to be on: see ``pretend_gpu``. With ``GUARD_TESTS_ON=gpu`` that is real too. More programs are in
guarded_scopes.py and guarded_verified.py.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
TENSORRT, OPENVINO, DIRECTML = "TensorrtExecutionProvider", "OpenVINOExecutionProvider", "DmlExecutionProvider"


def report(value: object) -> None:
    with open(os.environ["CHILD_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(["json", value], default=str) + "\n")


def outcome(action: Callable[[], Any]) -> str:
    """The providers of the session that ``action`` makes, or the name of what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ",".join(action().get_providers())
        except Exception as error:  # noqa: BLE001 - its type is the fact
            return type(error).__name__


def listed() -> list[dict[str, Any]]:
    import ortgpu

    return [
        {
            name: getattr(record, name)
            for name in ("model", "providers", "kind", "created_by", "pid", "alive", "fell_back")
        }
        | {"device": str(record.device), "nodes": record.placement.by_provider, "text": str(record)}
        for record in ortgpu.sessions()
    ]


def pretend_gpu() -> None:
    """From now on a GPUSession opens on the CPU, and takes that for a GPU."""
    if os.environ.get("GUARD_TESTS_ON") == "gpu":
        return
    from ortgpu.model.outline import GraphOutline
    from ortgpu.provider import requests as providers
    from ortgpu.provider.devices import Device
    from ortgpu.session import opening, verifying
    from ortgpu.session.plan import cpu_plan
    from ortgpu.session.request import SessionRequest, Verified

    def opened(made: Any, construct: Callable[..., None], request: SessionRequest, *_: Any) -> Verified:
        import onnxruntime

        providers.check_names(request.providers, onnxruntime.get_all_providers(), onnxruntime.get_available_providers())
        placement = opening.construct_session(made, construct, cpu_plan(request), GraphOutline(request.model))
        made._providers, made._provider_options = [CUDA, CPU], {CUDA: {"device_id": "0"}, CPU: {}}
        return Verified(Device("cuda", 0, "GPU-1", "pretended", (9, 0), 1 << 30, None), placement, {})

    vars(opening)["open_on_gpu"] = opened
    vars(verifying)["verify"] = lambda _, verified, __: verified


# By whatever name


def names_before(model: str) -> None:
    made = _names()
    import ortgpu

    ortgpu.install()
    report({name: outcome(functools.partial(make, model)) for name, make in made.items()})


def names_after(model: str) -> None:
    import ortgpu

    ortgpu.install()
    loaded = [name for name in ("onnxruntime", "numpy") if name in sys.modules]
    report({"loaded": loaded} | {name: outcome(functools.partial(make, model)) for name, make in _names().items()})


def names_unguarded(model: str) -> None:
    import ortgpu

    _ = ortgpu.enforce, ortgpu.install  # to have them changes nothing
    report({name: outcome(functools.partial(make, model)) for name, make in _names().items()})


def _names() -> dict[str, Callable[..., Any]]:
    import onnxruntime
    import onnxruntime.capi.onnxruntime_inference_collection as home
    from onnxruntime import InferenceSession

    class Subclass(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def __init__(self, path: str, **kwargs: Any) -> None:
            super().__init__(path, **kwargs)
            self.path = path

    class Explicit(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def __init__(self, path: str) -> None:
            InferenceSession.__init__(self, path, None, [CUDA])

    class Slotted(Subclass):
        __slots__ = ("more",)

    class Meta(type):
        pass

    class WithMeta(InferenceSession, metaclass=Meta):  # type: ignore[misc]  # onnxruntime ships no types
        pass

    class Registered(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def __init_subclass__(cls, *, number: int, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)

    class Numbered(Registered, number=1):
        pass

    backend: Any = importlib.import_module("onnxruntime.backend.backend")
    return {
        "from": InferenceSession,
        "module": lambda path: onnxruntime.InferenceSession(path),
        "home": lambda path: home.InferenceSession(path),
        "backend": lambda path: backend.InferenceSession(path),
        "partial": functools.partial(InferenceSession, providers=[CUDA, CPU]),
        "keywords": lambda path: InferenceSession(path_or_bytes=path, providers=[CUDA]),
        "positions": lambda path: InferenceSession(path, None, [CUDA], [{"use_tf32": "0"}]),
        "bytes": lambda path: InferenceSession(Path(path).read_bytes()),
        "path": lambda path: InferenceSession(Path(path)),
        "subclass": Subclass,
        "explicit subclass": Explicit,
        "slots": Slotted,
        "metaclass": WithMeta,
        "registered subclass": Numbered,
    }


# What was asked for


def requests(model: str) -> None:
    import onnxruntime

    import ortgpu

    ortgpu.install()
    asked: dict[str, dict[str, Any]] = {
        "none": {},
        "empty": {"providers": []},
        "cuda": {"providers": [CUDA]},
        "cuda, cpu": {"providers": [CUDA, CPU]},
        "cpu, cuda": {"providers": [CPU, CUDA]},
        "cuda with options": {"providers": [(CUDA, {"device_id": 0}), (CPU, {"arena_extend_strategy": "x"})]},
        "options beside": {"providers": [CUDA, CPU], "provider_options": [{"device_id": 0}, {}]},
        "cuda twice": {"providers": [CUDA, CPU, CUDA]},
        "all that there are": {"providers": onnxruntime.get_available_providers()},
        "tensorrt": {"providers": [TENSORRT]},
        "directml, cuda": {"providers": [DIRECTML, CUDA, CPU]},
        "unknown, cuda": {"providers": ["ROCMExecutionProvider", CUDA, CPU]},
        "unknown arguments": {"providers": [CUDA], "device": "elsewhere", "cpu_nodes": "?", "device_id": 3},
        "typo": {"providers": ["cuda"]},
        "typo, cpu": {"providers": ["CudaExecutionProvider", CPU]},
        "no list": {"providers": CUDA},
        "no names": {"providers": [1]},
        "wrong lengths": {"providers": [CUDA], "provider_options": [{}, {}]},
        "unknown option": {"providers": [(CUDA, {"devise_id": 0})]},
        "fallback": {"providers": [CUDA], "enable_fallback": 1},
        "cpu": {"providers": [CPU]},
        "cpu with options": {"providers": [(CPU, {})]},
        "cpu twice": {"providers": [CPU, CPU]},
        "openvino": {"providers": [OPENVINO, CPU]},
        "rocm": {"providers": ["ROCMExecutionProvider", CPU]},
        "snpe": {"providers": ["SNPEExecutionProvider", CPU]},
        "tvm": {"providers": ["TvmExecutionProvider"]},
        "unknown": {"providers": [("FooExecutionProvider", {"a": 1}), CPU]},
        "cpu as a text": {"providers": CPU},
    }
    found = {
        name: outcome(functools.partial(onnxruntime.InferenceSession, model, **kwargs))
        for name, kwargs in asked.items()
    }
    missing = outcome(functools.partial(onnxruntime.InferenceSession, "no such file", providers=[CPU]))
    backend: Any = importlib.import_module("onnxruntime.backend.backend")
    backend.get_device = lambda: "CPU"  # as in the CPU build; in others it refuses this device once the session is open
    on_cpu = outcome(lambda: backend.prepare(model, device="CPU")._session)
    default = outcome(lambda: backend.prepare(model)._session)
    report(found | {"no such file": missing, "backend of onnx on the cpu": on_cpu, "backend of onnx": default})


def error(model: str) -> None:
    import ortgpu
    from ortgpu.errors import GPUError

    ortgpu.install()
    import onnxruntime

    try:
        onnxruntime.InferenceSession(model, providers=onnxruntime.get_available_providers())
    except GPUError as raised:
        report(raised.as_dict() | {"text": str(raised)})


def allowed_cpu(model: str) -> None:
    import ortgpu

    ortgpu.install()
    import onnxruntime

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = onnxruntime.InferenceSession(model, providers=[CUDA])
    found = [
        {"type": one.category.__name__, "file": one.filename, "error": getattr(one.message, "error", None).__class__}
        for one in caught
    ]
    report({"providers": session.get_providers(), "warnings": found, "sessions": listed()})


# Processes


def spawned(model: str) -> None:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.SimpleQueue()
    worker = context.Process(target=_make_in_worker, args=(model, queue))
    worker.start()
    worker.join()
    report({"here": outcome(functools.partial(_make, model)), "there": queue.get()})


def _make(model: str) -> Any:
    from onnxruntime import InferenceSession

    return InferenceSession(model, providers=[CUDA, CPU])


def _make_in_worker(model: str, queue: Any) -> None:
    queue.put(outcome(functools.partial(_make, model)))


def by_variable(model: str) -> None:
    """What ORTGPU_ENFORCE does, or not, in this process."""
    before = [name for name in ("ortgpu", "onnxruntime") if name in sys.modules]
    first = outcome(functools.partial(_make, model))
    import ortgpu  # noqa: F401 - which is what puts the guard in force

    report(
        {
            "loaded at start": before,
            "before the import": first,
            "after the import": outcome(functools.partial(_make, model)),
            "path": sys.path,
            "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        }
    )


if __name__ == "__main__":
    name, path = sys.argv[1:]
    program = globals().get(name)
    if program is None:  # these import this file by its full name, which not every environment of the tests knows
        from tests.support import guarded_scopes, guarded_verified

        program = {**vars(guarded_scopes), **vars(guarded_verified)}[name]
    program(path)
