"""Programs about what is asked of a session on a GPU that works; see programs.py."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.gpu.programs import (
    CPU,
    CUDA,
    attempt,
    cpu_reference,
    device_facts,
    free_memory,
    random_feed,
    relative_error,
)
from tests.support.children import report

TENSORRT = "TensorrtExecutionProvider"


def choose_devices(model: str, requests: dict[str, Any]) -> None:
    """Open one session per request; ``device`` is absent from a request that names none."""
    from ortgpu import GPUSession

    for name, request in requests.items():

        def open_and_run(arguments: dict[str, Any] = request) -> dict[str, Any]:
            with GPUSession(model, **arguments) as session:
                session.run(None, random_feed(session, 1))
                return device_facts(session)

        # JSON has no tuples, and a provider with options is one
        if "providers" in request:
            request["providers"] = [tuple(entry) for entry in request["providers"]]
        attempt(name, open_and_run)


def two_devices(model: str) -> None:
    """A session on each of the first two GPUs at once, used in turns."""
    from ortgpu import GPUSession

    with GPUSession(model, device=0) as first, GPUSession(model, device=1) as second:
        feed = random_feed(first, 2)
        results = [session.run(None, feed) for session in (first, second, first)]
        report("first", device_facts(first))
        report("second", device_facts(second))
        report("difference", max(relative_error(results[1], results[0]), relative_error(results[2], results[0])))


def make_requests(model: str, missing: str) -> None:
    """Requests that can be met, and that cannot, on a GPU that works."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession

    def opened(*arguments: Any, **named: Any) -> dict[str, Any]:
        with GPUSession(*arguments, **named) as session:
            session.run(None, random_feed(session, 1))
            return device_facts(session)

    attempt("unknown option", lambda: opened(model, providers=[(CUDA, {"no_such_option": "1"})]))
    attempt("bad value", lambda: opened(model, providers=[(CUDA, {"gpu_mem_limit": "plenty"})]))
    attempt("misspelt provider", lambda: opened(model, providers=["CudaExecutionProvider"]))
    attempt("lengths differ", lambda: opened(model, providers=[CUDA], provider_options=[{}, {}]))
    report("TensorRT loads", tensorrt_loads())
    attempt("TensorRT", lambda: opened(model, providers=[TENSORRT, CUDA]))

    limits = {"gpu_mem_limit": str(2 * 2**30), "arena_extend_strategy": "kSameAsRequested"}
    attempt("options with the provider", lambda: opened(model, providers=[(CUDA, limits)]))
    attempt("options beside the provider", lambda: opened(model, providers=[CUDA], provider_options=[limits]))
    attempt("CPU first", lambda: opened(model, providers=[CPU, CUDA]))

    def keep_session_options() -> dict[str, Any]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.intra_op_num_threads = 3
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")

        def settings(used: Any) -> dict[str, Any]:
            return {
                "graph_optimization_level": used.graph_optimization_level.name,
                "intra_op_num_threads": used.intra_op_num_threads,
                "log_severity_level": used.log_severity_level,
                "allow_spinning": used.get_session_config_entry("session.intra_op.allow_spinning"),
            }

        before = settings(options)
        with GPUSession(model, options) as session:
            inside = settings(session.get_session_options())
            session.run(None, random_feed(session, 1))
        # an options object that was made to forbid the CPU provider would no longer serve its owner
        plain = onnxruntime.InferenceSession(model, options, providers=[CPU])
        plain.run(None, random_feed(plain, 1))
        return {
            "before": before,
            "inside": inside,
            "after": settings(options),
            "recording": options.get_session_config_entry("session.record_ep_graph_assignment_info"),
            "plain": plain.get_providers(),
        }

    attempt("session options", keep_session_options)

    broken = {"missing model": missing, "invalid model": b"this is no model", "empty model": b""}
    for name, content in broken.items():
        attempt(name, partial(opened, content))
        attempt(f"{name}, plain", partial(onnxruntime.InferenceSession, content, providers=[CPU]))

    wrong: dict[str, dict[str, np.ndarray[Any, Any]]] = {
        "wrong name": {"no_such_input": np.zeros((1, 16), np.float32)},
        "wrong type": {"x": np.zeros((1, 16), np.float64)},
        "wrong shape": {"x": np.zeros((1, 17), np.float32)},
        "wrong rank": {"x": np.zeros(16, np.float32)},
    }
    plain = cpu_reference(model)
    with GPUSession(model) as session:
        for name, feed in wrong.items():
            attempt(name, partial(session.run, None, feed))
            attempt(f"{name}, plain", partial(plain.run, None, feed))
        feed = random_feed(session, 2)
        report("still right", relative_error(session.run(None, feed), plain.run(None, feed)))


def set_providers(model: str) -> None:
    """Other options of CUDA for sessions that are open: plain, staged and with pinned memory, captured, derived."""
    import numpy as np

    from ortgpu import GPUSession

    plain = cpu_reference(model)
    limit = str(2 * 2**30)
    for name in ("usual", "captured", "pinned"):
        with GPUSession(model, cpu_nodes="forbid", cuda_graph=name == "captured") as session:
            feed = random_feed(session, 4)
            expected = plain.run(None, feed)
            errors = [relative_error(session.run(None, feed), expected)]
            if name == "pinned":
                kept = session.pinned_empty((1 << 20,))
                kept[:] = 3
            session.set_providers([(CUDA, {"gpu_mem_limit": limit}), CPU, CPU])
            inside = session.get_provider_options()[CUDA]["gpu_mem_limit"]
            errors += [relative_error(session.run(None, feed), expected) for _ in range(3)]
            refused = []
            for request in ([CPU], [(CUDA, {"device_id": 99})]):
                try:
                    session.set_providers(request)
                except Exception as error:  # noqa: BLE001 - its type is the fact
                    refused.append(type(error).__name__)
            errors += [relative_error(session.run(None, feed), expected) for _ in range(3)]
            errors += [relative_error(found, expected) for found in session.map([feed] * 5)]
            if name == "pinned":
                assert np.all(kept == 3)
                assert session.pinned_empty((4,)).shape == (4,)
            facts = {**device_facts(session), "limit": inside, "refused": refused, "error": max(errors)}
            report(name, {**facts, "graph": hasattr(session._gpu_runner, "graphs")})
    try:
        session.set_providers([CUDA])
    except Exception as error:  # noqa: BLE001 - its type is the fact
        report("closed", type(error).__name__)


def set_providers_again_and_again(model: str) -> None:
    """Whether what was given up is given back."""
    import gc

    from ortgpu import GPUSession

    free = []
    with GPUSession(model) as session:
        feed = random_feed(session, 4)
        for number in range(30):
            session.set_providers([(CUDA, {"gpu_mem_limit": str((1 + number % 2) * 2**30)})])
            session.run(None, feed)
            gc.collect()
            free.append(free_memory(session.device.uuid))
    report("free", free)


def tensorrt_before_cuda(model: str, folder: str) -> None:
    """With a TensorRT in ``folder``, as pip puts it there, and a request in which it may take no node."""
    from ortgpu import GPUSession

    sys.path.insert(0, folder)

    excluded = {"trt_op_types_to_exclude": "MatMul,Gemm,FusedGemm,FusedMatMul,Add,Relu"}
    request = [(TENSORRT, excluded), CUDA]

    def opened() -> dict[str, Any]:
        with GPUSession(model, providers=request) as session:
            feed = random_feed(session, 3)
            return {
                **device_facts(session),
                "TensorRT options": session.get_provider_options()[TENSORRT],
                "placement": dict(session.placement.by_provider),
                "difference": relative_error(session.run(None, feed), cpu_reference(model).run(None, feed)),
            }

    def providers_of(asked: list[Any]) -> list[str]:
        with GPUSession(model, providers=asked) as session:
            return list(session.get_providers())

    attempt("before CUDA", opened)
    attempt("behind CUDA", lambda: providers_of([CUDA, (TENSORRT, excluded)]))
    attempt("alone", lambda: providers_of([(TENSORRT, excluded)]))
    attempt(
        "on another GPU", lambda: providers_of([(TENSORRT, {**excluded, "device_id": "1"}), (CUDA, {"device_id": "0"})])
    )


def tensorrt_loads() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


def open_in_a_rank(model: str, current: int | None) -> None:
    """Open sessions in a rank of a job; ``current``: the device that PyTorch has, None without PyTorch."""
    from ortgpu import GPUSession

    if current is not None:
        import torch

        torch.cuda.set_device(current)
        torch.zeros(1, device="cuda")
    found = {}
    requests: dict[str, dict[str, Any]] = {"nothing": {}, "device": {"device": 0}}
    for name, arguments in requests.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with GPUSession(model, **arguments) as session:
                session.run(None, random_feed(session, 1))
                ordinal = device_facts(session)["ordinal"]
        found[name] = [ordinal, sum("for_rank" in str(warning.message) for warning in caught)]
    report("found", found)


def open_on(model: str, ordinal: int, is_plain: bool) -> None:
    """Open one session, whose lines in ONNX Runtime's log the test compares."""
    import onnxruntime

    import ortgpu

    ortgpu.preload()
    if is_plain:
        session = onnxruntime.InferenceSession(model, providers=[(CUDA, {"device_id": str(ordinal)})])
    else:
        session = ortgpu.GPUSession(model, device=ordinal)
    session.run(None, random_feed(session, 1))
    report("providers", session.get_providers())


def by_a_plugin_of_another_name(model: str, library: str) -> None:
    """Register a plugin, and open a session whose options carry its first device, and one by the guard."""
    import onnxruntime

    import ortgpu

    ortgpu.preload()
    known = {device.ep_name for device in onnxruntime.get_ep_devices()}
    onnxruntime.register_execution_provider_library("another_cuda", library)
    device = next(device for device in onnxruntime.get_ep_devices() if device.ep_name not in known)
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices([device], {})
    report("name", device.ep_name)

    def opened(make: Callable[[], Any]) -> dict[str, Any]:
        session = make()
        feed = random_feed(session, 2)
        return {
            "providers": session.get_providers(),
            "error": relative_error(session.run(None, feed), cpu_reference(model).run(None, feed)),
            "records": [[record.kind, str(record.device)[:6]] for record in ortgpu.sessions()],
        }

    attempt("verified", lambda: opened(lambda: ortgpu.GPUSession(model, options, cpu_nodes="allow")))
    ortgpu.install()
    attempt("guarded", lambda: opened(lambda: onnxruntime.InferenceSession(model, options)))


PROGRAMS: dict[str, Callable[..., None]] = {
    "choose_devices": choose_devices,
    "two_devices": two_devices,
    "make_requests": make_requests,
    "set_providers": set_providers,
    "set_providers_again_and_again": set_providers_again_and_again,
    "tensorrt_before_cuda": tensorrt_before_cuda,
    "open_in_a_rank": open_in_a_rank,
    "open_on": open_on,
    "by_a_plugin_of_another_name": by_a_plugin_of_another_name,
}
