"""Programs about sessions that are verified, and about what is listed; see guarded_programs.py."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

from tests.support.guarded_programs import CPU, CUDA, OPENVINO, listed, pretend_gpu, report

# Sessions that are verified


def verified(model: str) -> None:
    pretend_gpu()
    import numpy as np
    import onnxruntime

    import ortgpu
    from ortgpu.errors import GPUError
    from tests.support.guarded_sessions import Pickable, Reducing

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
    import numpy as np
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
    found["sessions"] = listed()
    found["cuda to cpu"] = change(session, [CPU])
    found["result on the cpu"] = session.run(None, {"x": np.array([-1, 0, 1, 2], np.float32)})[0].tolist()
    found["its own class"] = type(session) is onnxruntime.InferenceSession and not hasattr(session, "device")
    found["sessions on the cpu"] = [one["kind"] for one in listed()]
    found["back to cuda"] = change(session, [CUDA])
    found["to a missing option"] = change(session, [(OPENVINO, {}), CPU], [{}])
    found["after that"] = f"{','.join(session.get_providers())} {isinstance(session, ortgpu.GPUSession)}"
    found["mine"] = session.mine
    ortgpu.uninstall()
    found["cuda to cpu, uninstalled"] = change(session, [CPU])
    found["sessions, uninstalled"] = [one["kind"] for one in listed()]
    with ortgpu.enforce():
        closed = onnxruntime.InferenceSession(model)
        closed.close()
        found["closed to cuda"] = change(closed, [CUDA])
        found["closed to cpu"] = change(closed, [CPU])
    report(found)


# What there is


def list_sessions(model: str) -> None:
    import onnxruntime

    early = onnxruntime.InferenceSession(model, providers=[CPU])
    pretend_gpu()
    import ortgpu
    from tests.support.guarded_sessions import Pickable, make_one

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
