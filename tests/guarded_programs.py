"""What the children of test_guard.py do: one function each, started as ``guarded_programs.py NAME MODEL``.

A program reports facts, the tests judge. Where there is no GPU, everything of a verified session is real but the device
that it is said to be on: see ``pretend_gpu``. With ``GUARD_TESTS_ON=gpu`` that is real too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
TENSORRT, OPENVINO, DIRECTML = "TensorrtExecutionProvider", "OpenVINOExecutionProvider", "DmlExecutionProvider"


def report(value: object) -> None:
    with open(os.environ["LAB_REPORT"], "w", encoding="utf-8") as file:
        json.dump(value, file, default=str)


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
        {name: getattr(record, name) for name in ("model", "providers", "kind", "created_by", "pid", "alive")}
        | {"device": str(record.device), "nodes": record.placement.by_provider, "text": str(record)}
        for record in ortgpu.sessions()
    ]


def pretend_gpu() -> None:
    """From now on a GPUSession opens on the CPU, and takes that for a GPU."""
    if os.environ.get("GUARD_TESTS_ON") == "gpu":
        return
    from ortgpu import opening, providers, session
    from ortgpu.devices import Device
    from ortgpu.opening import SessionRequest, Verified, record_placement
    from ortgpu.placement import read_placement

    def opened(made: Any, construct: Callable[..., None], request: SessionRequest, *_: Any) -> Verified:
        import onnxruntime

        asked = providers.parse(request.providers, request.provider_options)
        providers.check_names(asked, onnxruntime.get_all_providers(), onnxruntime.get_available_providers())
        options = request.sess_options if request.sess_options is not None else onnxruntime.SessionOptions()
        record_placement(options)
        construct(request.model, options, providers=[CPU], enable_fallback=0)
        made._providers, made._provider_options = [CUDA, CPU], {CUDA: {"device_id": "0"}, CPU: {}}
        return Verified(Device("cuda", 0, "GPU-1", "pretended", (9, 0), 1 << 30, None), read_placement(made), {})

    for module in (opening, session):
        if hasattr(module, "open_verified"):
            vars(module)["open_verified"] = opened


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

    class Explicit(InferenceSession):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            InferenceSession.__init__(self, path, None, [CUDA])

    class Slotted(Subclass):
        __slots__ = ("more",)

    class Registered(InferenceSession):  # type: ignore[misc]
        def __init_subclass__(cls, *, number: int, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)

    class Numbered(Registered, number=1):
        pass

    class Meta(type):
        pass

    class WithMeta(InferenceSession, metaclass=Meta):  # type: ignore[misc]
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
        "registered subclass": Numbered,
        "metaclass": WithMeta,
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
    }
    found = {
        name: outcome(functools.partial(onnxruntime.InferenceSession, model, **kwargs))
        for name, kwargs in asked.items()
    }
    missing = outcome(functools.partial(onnxruntime.InferenceSession, "no such file", providers=[CPU]))
    report(found | {"no such file": missing})


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


# For how long


def scopes(model: str) -> None:
    import onnxruntime

    import ortgpu
    from ortgpu.guard import is_enforced

    cls = onnxruntime.InferenceSession
    before, finders = dict(vars(cls)), list(sys.meta_path)
    found: dict[str, Any] = {}

    def make() -> Any:
        return cls(model)

    with ortgpu.enforce():
        found["inside"] = outcome(make)
        with ortgpu.enforce():
            found["nested"] = outcome(make)
        found["after the inner one"] = outcome(make)
    found["after"] = outcome(make)

    with contextlib.suppress(ZeroDivisionError), ortgpu.enforce():
        raise ZeroDivisionError
    found["after an exception"] = outcome(make)

    again = ortgpu.enforce()
    with again, again:
        found["twice the same"] = outcome(make)
    found["after twice the same"] = outcome(make)

    found["function"] = outcome(ortgpu.enforce()(make))
    found["function, without parentheses"] = outcome(ortgpu.enforce(make))
    found["after a function"] = outcome(make)

    @ortgpu.enforce()
    async def coroutine() -> str:
        await asyncio.sleep(0.01)
        return outcome(make)

    pending = coroutine()
    found["coroutine not started"] = outcome(make)
    found["coroutine"] = asyncio.run(pending)
    found["after a coroutine"] = outcome(make)

    def generator() -> Iterator[int]:
        yield 1

    for name, wrong in {"generator": generator, "class": Path, "nothing": 1}.items():
        try:
            ortgpu.enforce()(wrong)  # type: ignore[type-var]
        except TypeError as raised:
            found[name] = str(raised)

    ortgpu.install()
    ortgpu.install()
    found["installed"] = outcome(make)
    with ortgpu.enforce():
        ortgpu.uninstall()
        found["uninstalled inside"] = outcome(make)
    found["uninstalled"] = outcome(make)
    found["left over"] = [name for name in vars(cls) if vars(cls)[name] is not before.get(name)]
    found["finders"] = sys.meta_path == finders
    found["in force"] = is_enforced()
    report(found)


def interrupted(model: str) -> None:
    """Ctrl-C while the guard waits for ONNX Runtime to be imported, and one way out more than in."""
    import onnxruntime

    import ortgpu
    from ortgpu.guard import is_enforced

    home = "onnxruntime.capi.onnxruntime_inference_collection"
    loaded = sys.modules.pop(home)

    class Interrupting:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == home:
                raise KeyboardInterrupt

    interrupting: Any = Interrupting()
    sys.meta_path.insert(0, interrupting)
    found: dict[str, Any] = {}
    try:
        with ortgpu.enforce():
            found["entered"] = True
    except KeyboardInterrupt:
        found["in force after the interrupt"] = is_enforced()
    sys.meta_path.remove(interrupting)
    sys.modules[home] = loaded

    ortgpu.enforce().__exit__(None, None, None)
    with ortgpu.enforce():
        found["inside"] = outcome(lambda: onnxruntime.InferenceSession(model))
    found["after"] = outcome(lambda: onnxruntime.InferenceSession(model))
    report(found)


def over_ours(model: str) -> None:
    """Somebody changes the class after us, and keeps calling what was there."""
    import onnxruntime

    import ortgpu

    cls = onnxruntime.InferenceSession
    with ortgpu.enforce():
        ours = cls.__init__

        def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
            ours(self, *args, **kwargs)

        cls.__init__ = theirs
        inside = outcome(lambda: cls(model))
    report({"inside": inside, "after": outcome(lambda: cls(model)), "theirs": cls.__init__ is theirs})


def threads(model: str) -> None:
    """A session made in another thread than the one that is in the block; many blocks and sessions at once."""
    import onnxruntime

    import ortgpu

    def make() -> str:
        return outcome(lambda: onnxruntime.InferenceSession(model, providers=[CUDA, CPU]))

    found: list[str] = []
    with ortgpu.enforce():
        thread = threading.Thread(target=lambda: found.append(make()))
        thread.start()
        thread.join()

    results: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(20):
            with ortgpu.enforce():
                results.append(make())

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    report({"other thread": found, "many": sorted(set(results)), "count": len(results), "after": make()})


def importing_meanwhile(model: str) -> None:
    """The guard comes into force while another thread is importing ONNX Runtime."""
    import ortgpu
    from ortgpu.guard import is_enforced

    started = threading.Event()

    def work() -> None:
        started.set()
        import onnxruntime  # noqa: F401

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    ortgpu.install()
    thread.join()
    from onnxruntime import InferenceSession

    report({"made": outcome(lambda: InferenceSession(model)), "in force": is_enforced()})


def imported_again(model: str) -> None:
    import ortgpu

    ortgpu.install()
    home: Any = importlib.import_module("onnxruntime.capi.onnxruntime_inference_collection")
    first = home.InferenceSession
    importlib.reload(home)
    made = {"first": outcome(lambda: first(model)), "second": outcome(lambda: home.InferenceSession(model))}
    report({**made, "loader": type(home.__spec__.loader).__name__, "different": first is not home.InferenceSession})


# Sessions that are verified


def verified(model: str) -> None:
    pretend_gpu()
    import numpy as np
    import onnxruntime

    import ortgpu
    from ortgpu.errors import GPUError
    from tests.guarded_sessions import Pickable, Reducing

    feed = {"x": np.array([-1, 0, 1, 2], np.float32)}
    found: dict[str, Any] = {}
    with ortgpu.enforce():
        plain, pickable = onnxruntime.InferenceSession(model), Pickable(model, providers=[CUDA])
        sessions = {"plain": plain, "pickable": pickable}
    for name, session in sessions.items():
        found[name] = {
            "type": type(session).__name__,
            "instance": [isinstance(session, cls) for cls in (onnxruntime.InferenceSession, ortgpu.GPUSession)],
            "result": session.run(None, feed)[0].tolist(),
            "device": str(session.device),
            "falls back": session._enable_fallback,
            "to cpu": outcome(functools.partial(session.set_providers, [CPU])),
            "providers": session.get_providers(),
        }
    found["own attributes"] = pickable.model_path == model
    found["sent"] = _state_of(pickle.loads(pickle.dumps(plain)))
    unguarded = pickle.loads(pickle.dumps(pickable))
    with ortgpu.enforce():
        found["pickable sent"] = _state_of(pickle.loads(pickle.dumps(pickable)))
        found["reducing sent"] = _state_of(pickle.loads(pickle.dumps(Reducing(model))))
        found["copied"] = _state_of(copy.copy(plain))
    found["pickable sent to nobody"] = _state_of(unguarded)

    class FailingRun:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def run(self, *_arguments: Any) -> Any:
            raise onnxruntime.capi.onnxruntime_pybind11_state.EPFail("[ONNXRuntimeError] : 11 : EP_FAIL : broken")

    inner = plain._sess
    plain._sess = FailingRun()
    try:
        plain.run(None, feed)
    except GPUError as raised:
        found["while running"] = type(raised).__name__
    report(found)


def _state_of(session: Any) -> list[Any]:
    import ortgpu

    return [f"{type(session).__module__}.{type(session).__name__}", isinstance(session, ortgpu.GPUSession)]


def other_providers(model: str) -> None:
    """``set_providers`` of sessions that passed, and of one that was verified."""
    pretend_gpu()
    import onnxruntime

    import ortgpu

    ortgpu.install()
    found: dict[str, Any] = {}

    def change(session: Any, *arguments: Any) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                session.set_providers(*arguments)
            except Exception as raised:  # noqa: BLE001 - its type is the fact
                return type(raised).__name__
        return f"{','.join(session.get_providers())} {isinstance(session, ortgpu.GPUSession)}"

    session = onnxruntime.InferenceSession(model, providers=[CPU])
    session.mine = "kept"
    found["cpu to cpu"] = change(session, [CPU])
    found["cpu to openvino"] = change(session, [OPENVINO, CPU])
    found["cpu to a typo"] = change(session, ["cuda"])
    found["after the typo"] = f"{','.join(session.get_providers())} {isinstance(session, ortgpu.GPUSession)}"
    found["cpu to cuda"] = change(session, [CUDA])
    found["cuda to nothing"] = change(session)
    found["cuda to cpu"] = change(session, [CPU])
    found["mine"] = session.mine
    found["sessions"] = listed()
    ortgpu.uninstall()
    found["cuda to cpu, uninstalled"] = change(session, [CPU])
    session.close()
    found["closed to cuda"] = change(session, [CUDA])
    report(found)


# What there is


def list_sessions(model: str) -> None:
    import onnxruntime

    early = onnxruntime.InferenceSession(model, providers=[CPU])
    pretend_gpu()
    import ortgpu
    from tests.guarded_sessions import Pickable, make_one

    own = ortgpu.GPUSession(Path(model).read_bytes())
    ortgpu.install()
    kept = [make_one(model), Pickable(model), make_one(model, providers=[CPU]), make_one(model, providers=[OPENVINO])]
    closed = make_one(model)
    closed.close()
    dropped = make_one(model)
    del dropped
    gc.collect()
    found: dict[str, Any] = {"all": listed(), "pid": os.getpid()}
    if hasattr(os, "fork"):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, json.dumps([[one["kind"], one["alive"]] for one in listed()]).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as stream:
            found["in a forked child"] = json.loads(stream.read())
        os.waitpid(child, 0)
    del early, own
    kept.clear()
    gc.collect()
    report(found | {"left": listed()})


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
    import ortgpu  # noqa: F401

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
    programs: dict[str, Callable[[str], None]] = {
        name: value for name, value in list(globals().items()) if callable(value) and not name.startswith("_")
    }
    programs[sys.argv[1]](sys.argv[2])
