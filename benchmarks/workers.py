"""What overhead.py measures inside one process, in turns.

Started in a child, as ``workers.py NAME '{"argument": value}'``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.common import in_turns, mapped_files, report

PLAIN_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def feed_of(session: Any) -> dict[str, Any]:
    """Zeros for every input, one wherever the size is open."""
    import numpy as np

    inputs = session.get_inputs()
    return {each.name: np.zeros([n if isinstance(n, int) else 1 for n in each.shape], np.float32) for each in inputs}


def plain_session(model: str) -> Any:
    """ONNX Runtime's own session, known to be on CUDA."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=PLAIN_PROVIDERS)
    if session.get_providers()[0] != PLAIN_PROVIDERS[0]:
        raise RuntimeError("the plain session is on the CPU: there is nothing to compare with")
    return session


def construct(model: str, rounds: int) -> None:
    """Seconds that the constructor takes, the process being warm. Letting go of the session is not part of it."""
    from ortgpu import GPUSession

    def seconds(make: Callable[[str], Any]) -> Callable[[], float]:
        def action() -> float:
            gc.collect()
            started = time.perf_counter()
            session = make(model)
            taken = time.perf_counter() - started
            if hasattr(session, "close"):
                session.close()
            del session
            gc.collect()
            return taken

        return action

    actions = {"ours": seconds(GPUSession), "plain": seconds(plain_session)}
    in_turns(actions, 2)
    report("seconds", in_turns(actions, rounds))


def run(model: str, rounds: int, calls: int) -> None:
    """Mean seconds of a call, by blocks of calls. How two plain sessions differ is what the comparison cannot see."""
    from ortgpu import GPUSession

    ours = GPUSession(model)
    sessions = {"ours": ours, "plain": plain_session(model), "plain again": plain_session(model)}
    feed = feed_of(ours)

    def seconds(session: Any) -> Callable[[], float]:
        def action() -> float:
            started = time.perf_counter()
            for _ in range(calls):
                session.run(None, feed)
            return (time.perf_counter() - started) / calls

        return action

    actions = {name: seconds(session) for name, session in sessions.items()}
    in_turns(actions, 3)
    gc.collect()
    gc.disable()
    report("seconds", in_turns(actions, rounds))
    device = ours.device
    report("device", {"name": device.name, "uuid": device.uuid, "driver_version": device.driver_version})


def locate(model: str) -> None:
    """Folders of the CUDA and cuDNN libraries of a session that works, for a process that must be told."""
    from ortgpu import GPUSession

    with GPUSession(model) as session:
        session.run(None, feed_of(session))
        paths = mapped_files()
    for name, start in (("cuda", "libcublas.so"), ("cudnn", "libcudnn.so")):
        report(
            name, next((path.rpartition("/")[0] for path in paths if path.rpartition("/")[2].startswith(start)), None)
        )


WORKERS: dict[str, Callable[..., None]] = {"construct": construct, "run": run, "locate": locate}


if __name__ == "__main__":
    try:
        WORKERS[sys.argv[1]](**json.loads(sys.argv[2]))
    except BaseException:
        report("error", traceback.format_exc())
        raise
