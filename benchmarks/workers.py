"""What overhead.py and pool.py measure inside one process, in turns.

Started in a child, as ``workers.py NAME '{"argument": value}'``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common import mapped_files, report
from ortgpu.timing import in_turns

PLAIN_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def feed_of(session: Any) -> dict[str, Any]:
    """Zeros for every input, one wherever the size is open."""
    import numpy as np

    inputs = session.get_inputs()
    return {each.name: np.zeros([n if isinstance(n, int) else 1 for n in each.shape], np.float32) for each in inputs}


def plain_session(model: str, device: int = 0) -> Any:
    """ONNX Runtime's own session, known to be on CUDA."""
    import onnxruntime

    providers = [(PLAIN_PROVIDERS[0], {"device_id": str(device)}), *PLAIN_PROVIDERS[1:]]
    session = onnxruntime.InferenceSession(model, providers=providers if device else PLAIN_PROVIDERS)
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
    """Mean seconds of a call, by blocks of calls.

    Two plain sessions differ by a microsecond, by where their memory happens to lie. "inherited" is therefore plain
    ONNX Runtime's ``run`` on our own session: what differs is only what we add.
    """
    import onnxruntime

    from ortgpu import GPUSession

    ours = GPUSession(model)
    inherited = functools.partial(onnxruntime.InferenceSession.run, ours)
    runs = {
        "ours": ours.run,
        "inherited": inherited,
        "plain": plain_session(model).run,
        "plain again": plain_session(model).run,
    }
    feed = feed_of(ours)

    def seconds(run: Callable[..., Any]) -> Callable[[], float]:
        def action() -> float:
            started = time.perf_counter()
            for _ in range(calls):
                run(None, feed)
            return (time.perf_counter() - started) / calls

        return action

    actions = {name: seconds(each) for name, each in runs.items()}
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


def pool(model: str, counts: list[int], batch: int, feeds: int, rounds: int, on_cpu: bool) -> None:
    """Seconds for so many feeds a GPU, by number of GPUs: of a pool, and of plain sessions with three threads each.

    All are open at once, so that they can be measured in turns. The arrays are ordinary ones, of random numbers: pages
    that were never written to would all be one, and lie in the cache.
    """
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSessionPool

    sessions = [
        onnxruntime.InferenceSession(model, providers=PLAIN_PROVIDERS[1:]) if on_cpu else plain_session(model, device)
        for device in range(max(counts))
    ]
    random = np.random.default_rng(0)
    arrays = [
        {
            each.name: random.random([n if isinstance(n, int) else batch for n in each.shape], np.float32)
            for each in sessions[0].get_inputs()
        }
        for _ in range(8)
    ]

    def work(count: int) -> Iterator[dict[str, Any]]:
        return itertools.islice(itertools.cycle(arrays), feeds * count)

    def plain(count: int) -> Callable[[], float]:
        def action() -> float:
            started = time.perf_counter()
            with contextlib.ExitStack() as stack:
                # each session has its share beforehand: nobody has to be told which is free
                ended = [
                    stack.enter_context(ThreadPoolExecutor(3)).map(functools.partial(session.run, None), work(1))
                    for session in sessions[:count]
                ]
                for results in ended:
                    deque(results, 0)
            return time.perf_counter() - started

        return action

    def ours(count: int, opened: Any) -> Callable[[], float]:
        def action() -> float:
            started = time.perf_counter()
            deque(opened.map(work(count)), 0)
            return time.perf_counter() - started

        return action

    with contextlib.ExitStack() as stack:
        actions = {}
        for count in counts:
            opened = stack.enter_context(GPUSessionPool(model, range(count), allow_cpu=on_cpu))
            actions[f"ours {count}"] = ours(count, opened)
            actions[f"plain {count}"] = plain(count)
        in_turns(actions, 2)
        report("seconds", in_turns(actions, rounds))
        report("devices", [str(device) for device in opened.devices])


WORKERS: dict[str, Callable[..., None]] = {"construct": construct, "run": run, "locate": locate, "pool": pool}


if __name__ == "__main__":
    try:
        WORKERS[sys.argv[1]](**json.loads(sys.argv[2]))
    except BaseException:
        report("error", traceback.format_exc())
        raise
