"""Programs about sessions that have no handle of cuDNN; see programs.py."""

from __future__ import annotations

import functools
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


def forms_without_cudnn() -> None:
    """What a plain session does with each form that was seen to run on the GPU; and ours with some of each operator."""
    import json
    from pathlib import Path

    import onnxruntime

    from ortgpu import GPUSession, preload
    from ortgpu.provider.options import recording_options
    from tests.support.cudnn_forms import FORMS

    preload()
    onnxruntime.set_default_logger_severity(4)
    path = Path(__file__).parents[1] / "support" / "cudnn_forms.json"
    table = json.loads(path.read_text(encoding="utf-8"))["forms"]
    plain: dict[str, str] = {}
    ours: dict[str, str] = {}
    for kind in ("needs it", "runs without"):
        operators: set[str] = set()
        for form in FORMS:
            if form.name not in table[kind]:
                continue
            model, feed = form.model()
            options = recording_options()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            try:
                session = onnxruntime.InferenceSession(model, options, [CUDA, "CPUExecutionProvider"])
                session.disable_fallback()
                session.run(None, feed)
                plain[form.name] = "runs without"
            except Exception:  # noqa: BLE001 - of various classes: what counts is that it does not run
                plain[form.name] = "needs it"
            if form.operator not in operators:
                operators.add(form.operator)
                ours[form.name] = _outcome_of(functools.partial(GPUSession, model, cpu_nodes="allow"), feed)
    report("plain", plain)
    report("ours", ours)


def _outcome_of(opened: Callable[[], Any], feed: dict[str, Any]) -> str:
    try:
        with opened() as session:
            session.run(None, feed)
    except Exception as error:  # noqa: BLE001 - the name of the error is the fact
        return type(error).__name__
    return "ran"


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
    "forms_without_cudnn": forms_without_cudnn,
    "sessions_without_handles": sessions_without_handles,
}
