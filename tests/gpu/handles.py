"""Programs about sessions that have no handle of cuDNN; see programs.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu.programs import (
    CUDA,
    attempt,
    cpu_reference,
    free_memory,
    random_feed,
    relative_error,
)
from tests.support.children import report


def operators_without_cudnn() -> None:
    """Whether each computes the same bits with a handle and without; and which of them are not on the GPU."""
    import onnxruntime

    from ortgpu.provider.options import recording_options
    from ortgpu.provider.placement import read_placement
    from tests.support.cudnn_operators import CASES, model_of

    report("a convolution", a_convolution())
    different, elsewhere = [], []
    for operator in CASES:
        model, feed = model_of(operator)
        results: list[Any] = []
        for enabled in "10":
            options = recording_options()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            session = onnxruntime.InferenceSession(model, options, [(CUDA, {"enable_cudnn": enabled})])
            results.append(session.run(None, feed))
        if any(one.tobytes() != other.tobytes() for one, other in zip(*results, strict=True)):
            different.append(operator)
        if CUDA not in read_placement(session).by_provider:
            elsewhere.append(operator)
    report("operators", {"compared": len(CASES), "different": different, "not on the GPU": elsewhere})


def a_convolution() -> list[float]:
    """What a convolution gives, which has cuDNN in this process from now on."""
    from ortgpu import GPUSession
    from tests.support.networks import random_network

    with GPUSession(random_network(1)) as session:
        return [float(value) for value in session.run(None, random_feed(session, 1))[0].ravel()[:3]]


def sessions_without_handles(mlp: str, conv: str, count: int) -> None:
    from ortgpu import GPUSession

    session = GPUSession(mlp)
    feed = random_feed(session, 2)
    right = cpu_reference(mlp).run(None, feed)
    report("error", relative_error(session.run(None, feed), right))
    report("options", session.get_provider_options()[CUDA]["enable_cudnn"])
    report("chosen", session.options_chosen.get("enable_cudnn"))
    with GPUSession(mlp, providers=[(CUDA, {"enable_cudnn": "1"})]) as asked:
        report(
            "asked for", [asked.get_provider_options()[CUDA]["enable_cudnn"], "enable_cudnn" in asked.options_chosen]
        )
    with GPUSession(conv) as other:
        report("conv", other.get_provider_options()[CUDA]["enable_cudnn"])
        attempt(
            "conv runs",
            lambda: relative_error(*(s.run(None, random_feed(other, 1)) for s in (other, cpu_reference(conv)))),
        )
    with GPUSession(mlp, cuda_graph=True) as graph:
        report("error of a graph", relative_error(graph.run(None, feed), right))

    def lost() -> int | None:
        before = free_memory(session.device.uuid)
        for _ in range(count):
            with GPUSession(mlp) as each:
                each.run(None, feed)
        after = free_memory(session.device.uuid)
        return before - after if before is not None and after is not None else None

    lost()
    report("lost", lost())


PROGRAMS: dict[str, Callable[..., None]] = {
    "operators_without_cudnn": operators_without_cudnn,
    "sessions_without_handles": sessions_without_handles,
}
