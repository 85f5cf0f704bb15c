"""Programs about what other code of a process does to the GPU that its sessions are on; see programs.py."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import attempt
from tests.gpu.running import elementwise, negated

LARGE = 8 << 20  # floats: an array that is staged


def negated_large(session: Any) -> float:
    import numpy as np

    return float(session.run(None, {"x": np.ones(LARGE, dtype=np.float32)})[0].sum()) / LARGE


def mapped(session: Any) -> list[float]:
    import numpy as np

    feeds = ({"x": np.full(LARGE, number, dtype=np.float32)} for number in (1, 2))
    return [float(results[0][0]) for results in session.map(feeds)]


def reset_device() -> int:
    """As numba's Device.reset() does."""
    return int(ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxReset_v2(0))


def reset_under_sessions(first: str) -> None:
    from ortgpu import GPUSession

    uses: dict[str, Callable[[Any], object]] = {"run": negated, "large": negated_large, "map": mapped}
    session, other = GPUSession(elementwise("n")), GPUSession(elementwise("n"))
    # A small run goes to ONNX Runtime at once, which dies of SIGSEGV if two runs at a time came before the reset.
    before = [use for name, use in uses.items() if first != "run" or name != "map"]
    attempt("before", lambda: [use(session) for use in before])
    attempt("reset", reset_device)
    attempt("first", functools.partial(uses[first], session))
    for name, use in uses.items():
        attempt(f"then {name}", functools.partial(use, session))
    attempt("other session", lambda: negated(other))
    new = GPUSession(elementwise("n"))
    attempt("new session", lambda: [use(new) for use in uses.values()])
    attempt("close", session.close)
    attempt("new session still", lambda: negated(new))


def reset_and_close() -> None:
    from ortgpu import GPUSession

    session = GPUSession(elementwise("n"))
    attempt("before", functools.partial(negated_large, session))
    attempt("reset", reset_device)
    attempt("close", session.close)
    del session  # its destructor
    attempt("new session", lambda: negated(GPUSession(elementwise("n"))))


def reset_before_small_runs(way: str) -> None:
    """A session without handles of cuDNN, whose next run of small arrays would go to ONNX Runtime at once."""
    import numpy as np
    from onnx import parser

    from ortgpu import GPUSession
    from ortgpu.running.cudart import runtime_of

    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[8, 8] x) => (float[8, 8] y) { t = MatMul(x, x) y = Relu(t) }'
    )
    session = GPUSession(parser.parse_model(text).SerializeToString(), cuda_graph=way == "graph")
    feed = {"x": np.ones((8, 8), np.float32)}
    session.run(None, feed)
    uses: dict[str, Callable[[], object]] = dict.fromkeys(
        ("run", "graph"), lambda: float(session.run(None, feed)[0][0, 0])
    )
    if way != "graph":
        binding: Any = session.io_binding()
        binding.bind_cpu_input("x", feed["x"])
        binding.bind_output("y", "cuda")
        uses["run_with_iobinding"] = lambda: session.run_with_iobinding(binding)
        uses["bind_cpu_input"] = lambda: binding.bind_cpu_input("x", feed["x"])
        uses["map"] = lambda: len(list(session.map([feed])))
    attempt("before", uses[way])
    runtime = runtime_of(session.device)
    assert runtime is not None
    attempt("reset", lambda: int(runtime._library.cudaDeviceReset()))
    attempt("first", uses[way])
    attempt("second", uses[way])
    attempt("new session", lambda: negated(GPUSession(elementwise("n"))))


def captured_elsewhere(mode: str) -> None:
    import torch

    from ortgpu import GPUSession

    stream: Any = torch.cuda.Stream  # without types in torch
    warm, cold = GPUSession(elementwise("n")), GPUSession(elementwise("n"))
    negated(warm)
    tensor, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()

    def meanwhile() -> None:
        if mode == "thread_local":
            attempt("run", lambda: negated(warm))
        else:
            attempt("first run", lambda: negated(cold))
            attempt("new session", lambda: negated(GPUSession(elementwise("n"))))

    def capture() -> str:
        with torch.cuda.graph(graph, stream=stream(), capture_error_mode=mode):
            tensor.mul_(2)
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
        return "captured"

    attempt("capture", capture)
    attempt("afterwards", lambda: [negated(warm), negated(cold), negated(GPUSession(elementwise("n")))])


def few_descriptors(left: int, fix: str | None = None) -> None:
    import resource

    import numpy as np  # noqa: F401 - all that is imported is imported before
    import onnxruntime  # noqa: F401 - the same

    from ortgpu import GPUSession

    taken = [os.dup(0) for _ in range(100)]
    model = elementwise("n")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + left, hard))
    if fix is not None:
        exec(fix)

    def session() -> list[float]:
        try:
            return negated(GPUSession(model))
        finally:
            for descriptor in taken:  # of which a report needs one
                os.close(descriptor)

    attempt("session", session)


PROGRAMS: dict[str, Callable[..., None]] = {
    "reset_under_sessions": reset_under_sessions,
    "reset_and_close": reset_and_close,
    "reset_before_small_runs": reset_before_small_runs,
    "captured_elsewhere": captured_elsewhere,
    "few_descriptors": few_descriptors,
}
